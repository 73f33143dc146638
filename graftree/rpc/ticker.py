"""`Ticker`: tells a change at once, and further changes no more often than an interval allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOAD_INTERVAL_SECONDS = 0.2  # of a pod's load


class Ticker:
    """Rate limit of a message that only says how things are now, such as a pod's load.

    Used on one event loop. The last change is always told, at most `interval_seconds` late.
    """

    def __init__(self, tell: Callable[[], None], interval_seconds: float) -> None:
        self._tell, self._interval = tell, interval_seconds
        self._told_at = -interval_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def changed(self) -> None:
        """There is something to tell."""
        if self._timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self._told_at + self._interval - loop.time()), self._fire)

    def close(self) -> None:
        """Tell nothing any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        self._timer = None
        self._told_at = asyncio.get_running_loop().time()
        self._tell()
