"""`Patience`: whether a step without a tree should wait for the first drafts, and for how long.

A commit that leaves nothing of the tree starts a race between the speculators and the step. What the first word of
the speculators was worth in such rounds, and how long after the commit it came, is known whether or not the step
waited for it. A wait is worth the tokens that the first word brings; it costs the tokens that the time, and the row
of what was waited for, would have given otherwise: to everybody who shares the step, since a verifier gathers its
sessions. Later words are not waited for: they come while the verifier works and are there for the round after.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from router.ema import Mean

MEMORY = 0.1  # weight of the newest round
SEEDED = 4  # rounds that what others saw counts for
SLACK = 1.5  # a wait lasts so many times as long as the first word usually takes
LEAST_SECONDS = 0.001
ENOUGH = 0.5  # of the tokens that were hoped for ends the wait


class Race:
    """How rounds go that a commit left without a tree.

    Attributes:
        seconds: from the commit to the first word, or to the next commit where there was none.
        tokens: that the first word was expected to bring.
    """

    __slots__ = ("seconds", "tokens")

    def __init__(self, seed: Race | None = None) -> None:
        self.seconds, self.tokens = Mean(MEMORY), Mean(MEMORY)
        if seed is not None:
            for own, known in ((self.seconds, seed.seconds), (self.tokens, seed.tokens)):
                own.value, own.count = known.value, min(known.count, SEEDED)

    def observe(self, seconds: float, tokens: float) -> None:
        """A round."""
        self.seconds.observe(seconds)
        self.tokens.observe(tokens)


class Wait(NamedTuple):
    """How long to wait, and for what.

    Attributes:
        seconds: at most.
        tokens: the wait is over when the tree's outlook is above this.
    """

    seconds: float
    tokens: float


class Patience:
    """One session's.

    Args:
        longest: no wait is longer, in seconds.
        seeds: what other sessions saw of each kind of speculator; taught in turn.
    """

    def __init__(self, longest: float, seeds: dict[str, Race]) -> None:
        self._longest = longest
        self._seeds = seeds
        self._races: dict[str, Race] = {}
        self._running: set[str] = set()  # kinds that have said nothing since a commit that left no tree
        self._known: set[str] = set()  # kinds that have read the prompt: they have said something
        self._begun = self._outlook = 0.0

    def committed(self, now: float, kinds: Collection[str], *, empty: bool) -> None:
        """The speculators are told of a commit: who was silent has lost; if the tree is empty all start anew."""
        for kind in list(self._running):
            self._end(kind, now, 0.0)
        self._running = self._known.intersection(kinds) if empty else set()
        self._begun, self._outlook = now, 0.0

    def heard(self, kind: str, now: float, outlook: float) -> None:
        """A kind's nodes came in; `outlook` is the tree's with them."""
        self._known.add(kind)
        if kind in self._running:
            self._end(kind, now, max(0.0, outlook - self._outlook))
        self._outlook = outlook

    def _end(self, kind: str, now: float, tokens: float) -> None:
        self._running.discard(kind)
        for race in (self._race(kind), self._seeds.setdefault(kind, Race())):
            race.observe(now - self._begun, tokens)

    def wait(self, kinds: Collection[str], *, rate: float, trust: float, row: float) -> Wait | None:
        """The wait before a step without a tree that is worth most; None = none pays, or nothing is known yet.

        Args:
            kinds: that are at work.
            rate: tokens per second that the time is worth to all who wait.
            trust: factor on the tokens that drafts promise.
            row: seconds that one more row costs.
        """
        best, chosen = 0.0, None
        tokens = 0.0
        for race in sorted((self._race(kind) for kind in kinds), key=lambda race: race.seconds.value):
            seconds = race.seconds.value
            if not race.seconds.count or seconds > self._longest:
                continue
            tokens += race.tokens.value  # those that are quicker have spoken by then
            net = trust * tokens - rate * (seconds + row)
            if net > best:
                best = net
                chosen = Wait(min(self._longest, max(LEAST_SECONDS, SLACK * seconds)), ENOUGH * tokens)
        return chosen

    def _race(self, kind: str) -> Race:
        race = self._races.get(kind)
        if race is None:
            race = self._races[kind] = Race(self._seeds.get(kind))
        return race
