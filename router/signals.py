"""`Signals`: what an autoscaler needs to know about speculators, over the last half minute.

Let a round be *demanded* if its request wants a tree, and *starved* if it was demanded and had none because no
speculator had the session or not all had answered in time. With r demanded rounds a second, a share s of them
starved, a accepted draft tokens per round that had a tree, and n speculators, one pod serves r (1 - s) / n rounds a
second, so one more could serve min(r (1 - s) / n, r s) of the starved ones, and each would gain a tokens:

    marginal tokens per second = a * min(r (1 - s) / n, r s)        without a speculator: a * r

It is 0 when nobody waits for drafts or drafts are never right, which is when another pod would be wasted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from router.metrics import Metrics, Outcome

WINDOW_SECONDS = 30.0
INTERVAL_SECONDS = 1.0


class _Counts(NamedTuple):
    at: float
    demanded: int
    starved: int
    short: int
    accepted: int
    drafts: int


class Scaling(NamedTuple):
    """Figures of one window.

    Attributes:
        demanded_per_second: drafts that rounds asked for.
        short_share: of these, the share whose tree was missing, late, or cut because of load; 0 without demand.
        marginal_tokens_per_second: what one more speculator would add.
    """

    demanded_per_second: float = 0.0
    short_share: float = 0.0
    marginal_tokens_per_second: float = 0.0


class Signals:
    """Used on one event loop.

    Args:
        metrics: the router's.
        speculators: how many are linked now.
        clock: seconds, monotonic.
        window: seconds the figures are taken over.
    """

    def __init__(
        self,
        metrics: Metrics,
        speculators: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        window: float = WINDOW_SECONDS,
    ) -> None:
        self._metrics, self._speculators, self._clock, self._window = metrics, speculators, clock, window
        self._history: deque[_Counts] = deque()
        self._gain = 1.0  # accepted draft tokens per round with a tree, as last seen; 1 before any was
        self.tick()

    async def follow(self) -> None:
        """Look at the counters once a second until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.tick()

    def tick(self) -> None:
        """Note how the counters stand."""
        now = self._count()
        while self._history and self._history[0].at < now.at - self._window:
            self._history.popleft()
        self._history.append(now)

    def now(self) -> Scaling:
        """The figures, up to this moment."""
        first, last = self._history[0], self._count()
        seconds = last.at - first.at
        demanded = last.demanded - first.demanded
        if seconds <= 0 or not demanded:
            return Scaling()
        drafts = last.drafts - first.drafts
        if drafts:
            self._gain = (last.accepted - first.accepted) / drafts
        starved = (last.starved - first.starved) / seconds
        served = demanded / seconds - starved
        pods = self._speculators()
        reachable = min(served / pods, starved) if pods else starved
        return Scaling(demanded / seconds, (last.short - first.short) / demanded, self._gain * reachable)

    def _count(self) -> _Counts:
        metrics, outcomes = self._metrics, self._metrics.outcomes
        starved = outcomes[Outcome.ALONE] + outcomes[Outcome.LATE]
        return _Counts(
            at=self._clock(),
            demanded=metrics.rounds - outcomes[Outcome.PLAIN] - outcomes[Outcome.FIRST],
            starved=starved,
            short=starved + metrics.cut_rounds,
            accepted=metrics.accepted_tokens,
            drafts=metrics.drafts,
        )
