"""`Patience`: whether a step should wait for drafts, and for how long.

Every commit starts a race between the speculators and the step. `Growth` learns how it goes on average: by how much
the expected acceptance of the merged tree has grown at each time after a commit, whether or not the step waited for
it, and how often the next commit then leaves some of the tree. To wait until t is worth the growth by then. It costs
the tokens that t seconds, and the rows of what has grown, would have given otherwise; and what the next round finds:
speculators draft ahead while the verifier works, so much of what a step does not wait for is there for the one after
it, for nothing, while a tree that was waited for is mostly used up. What a round is worth whose tree has survived
follows as in a semi-Markov decision process of two states (Howard 1960: relative values at an average gain).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.ema import Mean

# Times after a commit, in seconds, by the square root of two: 0.5 to 128 ms.
GRID = tuple(0.0005 * 2 ** (step / 2) for step in range(17))
MEMORY = 0.15  # weight of the newest round
# The wait ends with this share of the growth that was hoped for.
ENOUGH = 0.75
# Rows that carry an expected token, roughly: fewer where drafts are good, more where they are not.
ROWS_PER_TOKEN = 2.0
# Times that a wait is told apart by, when it comes to what it leaves behind: every octave.
_CLASS = 2
# Rounds that it is worth to assume that a wait leaves as much behind as none.
_DOUBT = 4
# What rounds without a wait leave must have been seen so often, and once in so many rounds, before any wait.
_SEEN, _AGAIN = 3, 48
SLOW_MEMORY = 0.05  # of shares and rewards, which vary more


class Growth:
    """How rounds of one kind go.

    Attributes:
        tokens: (len(GRID),) expected accepted tokens gained since the commit, by the times of `GRID`.
        counts: (len(GRID),) rounds that lasted so long.
        survival: how often the next commit left some of the tree; [0] after no wait, then by the wait's length.
        reward, seconds: tokens and duration of the rounds.
        waits: rounds with a wait since the last one without.
    """

    __slots__ = ("counts", "reward", "seconds", "survival", "tokens", "waits")

    def __init__(self, seed: Growth | None = None) -> None:
        self.waits = 0
        self.survival = [Mean(SLOW_MEMORY) for _ in range(2 + (len(GRID) - 1) // _CLASS)]
        self.reward, self.seconds = Mean(SLOW_MEMORY), Mean(SLOW_MEMORY)
        if seed is not None:
            own, other = [*self.survival, self.reward, self.seconds], [*seed.survival, seed.reward, seed.seconds]
            for mean, known in zip(own, other, strict=True):
                mean.value, mean.count = known.value, min(known.count, 2 * _DOUBT)
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

    def loss(self, index: int) -> float:
        """How much less often a tree survives a round with a wait until GRID[index] than one without."""
        without, mean = self.survival[0], self.survival[1 + index // _CLASS]
        doubt = max(0.0, 1.0 - mean.count / (2 * _DOUBT))
        return (1.0 - doubt) * max(0.0, without.value - mean.value)

    def lead(self, rate: float) -> float:
        """Tokens that such a round is ahead of the average, and those after it as long as the tree survives.

        Args:
            rate: average tokens per second.
        """
        again = max((mean.value for mean in self.survival if mean.count), default=0.0)
        return max(0.0, self.reward.value - rate * self.seconds.value) / (1.0 - min(again, 0.9))


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
        self._class = self._planned = 0
        self._begun = self._outlook = 0.0
        self._events: list[tuple[float, float]] = []

    def committed(
        self, now: float, kinds: frozenset[str], outlook: float, *, survived: bool, tokens: int = 1
    ) -> None:
        """The speculators are told of a commit, which ends one race and starts the next.

        Args:
            tokens: of the commit.
            outlook: expected acceptance of the tree as the commit left it.
            survived: whether it left any of it.
        """
        if self._key is not None:
            for growth in (self._growth(self._key), self._seeds.setdefault(self._key, Growth())):
                growth.observe(self._events, now - self._begun)
                growth.survival[self._class].observe(survived)
                growth.reward.observe(tokens)
                growth.seconds.observe(now - self._begun)
                growth.waits = growth.waits + 1 if self._class else 0
        self._key = (kinds, survived) if kinds else None
        self._begun, self._outlook, self._events, self._class = now, outlook, [], 0

    def waited(self) -> None:
        """The step waits as `wait` said, in the round that the last `committed` began."""
        self._class = self._planned

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
        growth = self._growth((kinds, survived))
        if growth.survival[0].count < _SEEN or growth.waits >= _AGAIN:
            return None
        lead = self._growth((kinds, True)).lead(rate)
        for index, (time, tokens) in enumerate(zip(GRID, growth.tokens, strict=True)):
            if time > self._longest:
                break
            worth = trust * tokens
            net = worth - lead * growth.loss(index) - rate * (time + penalty)
            if net > best:
                net -= rate * rows(max(1, round(ROWS_PER_TOKEN * worth)))
                if net > best:
                    best, chosen = net, Wait(time, outlook + ENOUGH * tokens)
                    self._planned = 1 + index // _CLASS
        return chosen

    def _growth(self, key: Key) -> Growth:
        growth = self._growths.get(key)
        if growth is None:
            growth = self._growths[key] = Growth(self._seeds.get(key))
        return growth
