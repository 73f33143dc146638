"""`Outage`: whether Redis is away, why, since when, and when to try again."""

from __future__ import annotations

import random
from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)


class Outage:
    """Args:
        clock: seconds; read when an outage begins.
        rng: jitter of the pauses.
        shortest, longest: seconds between tries, before jitter; doubles from one to the other.
        lost, regained: what the log says when it begins and when it ends.

    Attributes:
        active: Redis is away.
        reason: the last error's text.
        since: the clock when it began.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        shortest: float,
        longest: float,
        lost: str = "sessions are not durable",
        regained: str = "sessions are durable again",
    ) -> None:
        self.active = False
        self.reason = ""
        self.since: float | None = None
        self._clock = clock
        self._rng = rng
        self._shortest, self._longest = shortest, longest
        self._pause = shortest
        self._lost, self._regained = lost, regained

    def begin(self, error: BaseException) -> None:
        """An error was met; begins the outage or renews its reason."""
        self.reason = str(error) or "Redis did not answer in time"
        if not self.active:
            self.active = True
            self.since = self._clock()
            self._pause = self._shortest
            _log.warning(self._lost, reason=self.reason)

    def end(self) -> None:
        """A command succeeded."""
        if self.active:
            self.active = False
            self.reason = ""
            self.since = None
            _log.info(self._regained)

    def next_pause(self) -> float:
        """Seconds to wait before the next try: between half the current pause and all of it."""
        pause, self._pause = self._pause, min(self._pause * 2, self._longest)
        return pause * (1 + self._rng.random()) / 2
