"""A pod as a process."""

from __future__ import annotations

import gc

from graftree.process import settle


def test_what_is_loaded_is_not_looked_at_again() -> None:
    """Everything there is leaves the collector's lists; what comes later is collected as before."""
    try:
        settle()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 10_000
        circle: list[object] = []
        circle.append(circle)
        del circle
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
