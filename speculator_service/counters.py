"""`Counters`: what a speculator has been asked and has answered since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Plain numbers; the event loop writes them.

    Attributes:
        sessions_opened: sessions taken in.
        sessions_failed: sessions refused or given up.
        commits: commits that trees followed.
        deltas: tree deltas sent.
        nodes: tree nodes in them.
    """

    sessions_opened: int = 0
    sessions_failed: int = 0
    commits: int = 0
    deltas: int = 0
    nodes: int = 0
