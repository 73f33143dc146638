"""`Admission`: whether a request that has just come can be answered in time, beside those that are there already.

    first token within   wait for a place
    last token within    wait for a place + (tokens + 1) * seconds per token at the load with it

A request that would come too late is refused at once: served, it would make the others late as well, and nobody
would want its answer (goodput falls where everything is taken in). Seconds per token are what was seen lately, times
what the verifiers' step time says about the difference in load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from graftree.errors import ResourceExhausted
from graftree.step_time import StepTime
from router.ema import Mean
from router.metrics import Metrics

INTERVAL_SECONDS = 0.5
SHARE = 0.8  # of the time that is left: it is a guess, and others are taken in later
FEWEST_TOKENS = 4  # in an interval that says something
MEMORY = 0.3
RETRY_SECONDS = (0.1, 10.0)


class Verifier(Protocol):
    """What `router.links.VerifierLink` says of itself."""

    step_time: StepTime | None

    @property
    def sessions(self) -> int: ...

    @property
    def full(self) -> bool: ...


class Admission:
    """Of one router.

    Args:
        metrics: the router's.
        verifiers: those that take sessions, now.
        longest_wait: seconds that a request waits for a place before it is refused in any case.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        verifiers: Callable[[], Sequence[Verifier]],
        *,
        longest_wait: float,
        clock: Callable[[], float],
    ) -> None:
        self._metrics, self._verifiers, self._longest_wait, self._clock = metrics, verifiers, longest_wait, clock
        self._slowness = Mean(MEMORY, 1.0)  # seconds per token over the step time at the load they were seen at
        self._rows = Mean(MEMORY, 1.0)  # of a session's step
        self._ends = Mean(MEMORY)  # requests per second
        self._load = 0.0
        self._before = self._counts()

    async def follow(self) -> None:
        """Look at the counters now and then, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.tick()

    def tick(self) -> None:
        """Learn from what has happened since the last time."""
        before, self._before = self._before, self._counts()
        took, ended, tokens, seconds, rounds, drafted = (
            now - then for now, then in zip(self._before, before, strict=True)
        )
        load = (self._load + (now := self._sessions())) / 2
        self._load = now
        if took <= 0 or not load:
            return
        self._ends.observe(ended / took)
        if rounds:
            self._rows.observe(1.0 + drafted / rounds)
        if tokens >= FEWEST_TOKENS and seconds:
            self._slowness.observe(seconds / tokens / self._step_seconds(load))

    def check(self, tokens: int, remaining: float | None, *, running: int, waiting: int, samples: int = 1) -> None:
        """A request may come in.

        Args:
            tokens: that it asks for, at most.
            remaining: seconds until nobody wants its answer any more; None = no deadline.
            running: requests under way here.
            waiting: of these, the ones without a verifier.
            samples: sessions that it needs.

        Raises:
            ResourceExhausted: it would be late, and when trying again makes sense.
        """
        wait = self._wait(waiting)
        if wait > self._longest_wait:
            self._refuse(f"{waiting} requests wait for a verifier, about {wait:.1f} s", wait - self._longest_wait)
        if remaining is None or not running or not self._slowness.count:
            return
        expected = wait + self.seconds(tokens, running, samples)
        if expected > SHARE * remaining:
            text = f"the answer would take about {expected:.1f} s at this load, and {remaining:.1f} s are left"
            self._refuse(text, expected - SHARE * remaining)

    def seconds(self, tokens: int, running: int, samples: int = 1) -> float:
        """What so many tokens of a new request would take beside `running` others."""
        load = max(self._sessions(), running) + samples
        likely = tokens * self._metrics.length_share.value
        return (likely + 1) * self._slowness.value * self._step_seconds(load)

    def retry_after(self) -> float:
        """Seconds in which one of the requests under way tends to end."""
        return _retry(1.0 / self._ends.value if self._ends.value > 0 else 1.0)

    def _refuse(self, text: str, excess: float) -> None:
        self._metrics.shed += 1
        raise ResourceExhausted(f"too much to do: {text}", _retry(excess))

    def _wait(self, waiting: int) -> float:
        """Seconds until a verifier has a place; 0 where one has, or nobody knows."""
        verifiers = self._verifiers()
        if not verifiers or not all(verifier.full for verifier in verifiers) or self._ends.value <= 0:
            return 0.0
        return (waiting + 1) / self._ends.value

    def _sessions(self) -> int:
        return sum(verifier.sessions for verifier in self._verifiers())

    def _step_seconds(self, load: float) -> float:
        """A step of each verifier if that many sessions share them all; without a word of theirs, in no unit."""
        verifiers = self._verifiers()
        each = max(1.0, load / max(1, len(verifiers)))
        known = [verifier.step_time for verifier in verifiers if verifier.step_time is not None]
        if not known:
            return each
        rows, sequences = round(each * self._rows.value), round(each)
        return sum(time.seconds(rows, sequences) for time in known) / len(known)

    def _counts(self) -> tuple[float, ...]:
        metrics = self._metrics
        ended = metrics.finished + metrics.failed
        return (self._clock(), ended, metrics.itl.count, metrics.itl.sum, metrics.rounds, metrics.draft_tokens)


def _retry(seconds: float) -> float:
    return min(max(seconds, RETRY_SECONDS[0]), RETRY_SECONDS[1])
