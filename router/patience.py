"""`Patience`: whether a step should wait for drafts, and for how long.

Every commit starts a race between the speculators and the step. `Growth` learns how it goes on average: by how much
the expected acceptance of the merged tree has grown at each time after a commit, whether or not the step waited for
it. To wait until t is worth the growth by then; it costs the tokens that t seconds, and the rows of what has grown,
would have given otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# Times after a commit, in seconds, by the square root of two: 0.5 to 128 ms.
GRID = tuple(0.0005 * 2 ** (step / 2) for step in range(17))
MEMORY = 0.15  # weight of the newest round
# The wait ends with this share of the growth that was hoped for.
ENOUGH = 0.75
# Rows that carry an expected token, roughly: fewer where drafts are good, more where they are not.
ROWS_PER_TOKEN = 2.0


class Growth:
    """Mean growth of a tree's outlook by the times of `GRID`.

    Attributes:
        tokens: (len(GRID),) expected accepted tokens gained since the commit.
        counts: (len(GRID),) rounds that lasted so long.
    """

    __slots__ = ("counts", "tokens")

    def __init__(self, seed: Growth | None = None) -> None:
        self.tokens: list[float] = [0.0] * len(GRID) if seed is None else list(seed.tokens)
        # A seed counts as one round: it is soon outvoted.
        self.counts: list[int] = [0] * len(GRID) if seed is None else [min(count, 1) for count in seed.counts]

    def observe(self, events: Sequence[tuple[float, float]], seconds: float) -> None:
        """A round.

        Args:
            events: (seconds since the commit, tokens gained by then), in order of time.
            seconds: how long the round lasted: nothing is known of what would have come later.
        """
        place, gained = 0, 0.0
        for index, time in enumerate(GRID):
            if time > seconds:
                break
            while place < len(events) and events[place][0] <= time:
                gained = events[place][1]
                place += 1
            self.counts[index] += 1
            share = max(MEMORY, 1.0 / self.counts[index])
            self.tokens[index] += share * (gained - self.tokens[index])


class Wait(NamedTuple):
    """How long to wait, and for what.

    Attributes:
        seconds: at most.
        tokens: outlook of the tree that is good enough to go before.
    """

    seconds: float
    tokens: float


Key = tuple[frozenset[str], bool]  # speculators at work; whether the commit left any of the tree


class Patience:
    """One session's. Trees that a commit left empty grow otherwise than those of which a branch survived.

    Args:
        longest: no wait is longer, in seconds.
        seeds: what other sessions learnt; taught in turn.
    """

    def __init__(self, longest: float, seeds: dict[Key, Growth]) -> None:
        self._longest = longest
        self._seeds = seeds
        self._growths: dict[Key, Growth] = {}
        self._key: Key | None = None
        self._begun = self._outlook = 0.0
        self._events: list[tuple[float, float]] = []

    def committed(self, now: float, kinds: frozenset[str], outlook: float, *, survived: bool) -> None:
        """The speculators are told of a commit, which ends one race and starts the next.

        Args:
            outlook: expected acceptance of the tree as the commit left it.
            survived: whether it left any of it.
        """
        if self._key is not None:
            for growth in (self._growth(self._key), self._seeds.setdefault(self._key, Growth())):
                growth.observe(self._events, now - self._begun)
        self._key = (kinds, survived) if kinds else None
        self._begun, self._outlook, self._events = now, outlook, []

    def heard(self, now: float, outlook: float) -> None:
        """Drafts came in."""
        if self._key is not None and len(self._events) < len(GRID):
            self._events.append((now - self._begun, outlook - self._outlook))

    def wait(
        self,
        kinds: frozenset[str],
        outlook: float,
        *,
        survived: bool,
        rate: float,
        trust: float,
        rows: Callable[[int], float],
        penalty: float = 0.0,
    ) -> Wait | None:
        """The wait that is worth most, if any is worth something. Called before `committed`, with the same arguments.

        Args:
            rate: tokens per second that time is worth.
            trust: factor on the tokens that the tree promises.
            rows: seconds that so many more rows cost.
            penalty: seconds that any wait costs beside its own.
        """
        best, chosen = 0.0, None
        for time, tokens in zip(GRID, self._growth((kinds, survived)).tokens, strict=True):
            if time > self._longest:
                break
            worth = trust * tokens
            net = worth - rate * (time + penalty)
            if net > best:
                net -= rate * rows(max(1, round(ROWS_PER_TOKEN * worth)))
                if net > best:
                    best, chosen = net, Wait(time, outlook + ENOUGH * tokens)
        return chosen

    def _growth(self, key: Key) -> Growth:
        growth = self._growths.get(key)
        if growth is None:
            growth = self._growths[key] = Growth(self._seeds.get(key))
        return growth
