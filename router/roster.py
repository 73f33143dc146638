"""`Roster`: which kinds of speculators draft for a session.

Each round every kind at work gets a score: the accepted tokens that only it brought, less the tokens that the time it
took would have given. Who does not pay for itself is dropped and tried again later, each time after twice as many
rounds; between dropping and taking back lies a margin, so chance does not make a kind come and go. A trial begins in
the shadow: the LLM's own tokens say whether its nodes are right, before any is verified or waited for. One change at
a time: what one speculator is worth depends on which others are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.ema import Mean

TENURE = 16  # rounds in which a kind that is at work is not judged: fewer say little
SHADOW = 3  # of these, on trial, the ones in which its nodes are compared with what the LLM says, and not verified
SILENCE = 48  # rounds a kind may take to its first word, a long prompt's prefill for instance
FIRST_REST, LONGEST_REST = 16, 64  # rounds without a kind before it is tried again
TRIAL_SHARE = 0.02  # tokens that trials may cost, a round in between; the rest is longer where they cost more
LONGEST_OF_ALL = 1024
ADMISSION = 0.03  # tokens a round that it must bring, net, to be taken back
CHALLENGE = 256  # rounds after which it is measured anew how fast steps are without a kind
CHALLENGED = 5  # rounds that takes
PATIENCE = 24  # first rounds of a session in which nothing is done for knowledge's sake
MEMORY = 0.2


@dataclass(slots=True)
class Standing:
    """One kind in the session.

    Attributes:
        active: it drafts.
        since: round of the last change that makes earlier scores say nothing.
        heard: it has said something since it became active.
        trial: it was dropped once and has not been taken back for good.
        rest: rounds of its next rest.
        until: round at which its rest ends.
    """

    since: int
    active: bool = True
    heard: bool = False
    trial: bool = False
    challenged: bool = False
    rest: int = FIRST_REST
    until: int = 0
    score: Mean = field(default_factory=lambda: Mean(MEMORY))

    def counts(self, number: int) -> bool:
        """Whether the score of a round says something about it."""
        return self.active and self.heard and number > self.since + (SHADOW if self.trial else 0)


class Roster:
    """One session's.

    Args:
        unseen: kinds -> rounds since exactly these were last at work, as far as the time of a step is concerned; all
            rounds there were, if they never were. What is not known of a roster without a kind is found out by
            doing without it for a while.

    Attributes:
        kinds: those at work.
        trials: of these, the ones that were dropped before and have not proved yet that they are worth having again.
        dropped, readmitted: how often one was, so far.
    """

    def __init__(self, unseen: Callable[[frozenset[str]], int] = lambda kinds: 0) -> None:
        self._standings: dict[str, Standing] = {}
        self._unseen = unseen
        self._round = 0
        self._settled = 0  # round from which on the next change may come
        self.kinds: frozenset[str] = frozenset()
        self.trials: frozenset[str] = frozenset()
        self.dropped = self.readmitted = 0

    def add(self, kind: str) -> None:
        """A speculator of this kind is there. Known kinds keep their standing."""
        if kind not in self._standings:
            self._standings[kind] = Standing(self._round)
            self.kinds |= {kind}

    def remove(self, kind: str) -> None:
        """No speculator of this kind is there any more; one that comes begins anew."""
        self._standings.pop(kind, None)
        self.kinds, self.trials = self.kinds - {kind}, self.trials - {kind}

    def heard(self, kind: str) -> None:
        """It has sent nodes."""
        standing = self._standings.get(kind)
        if standing is not None and standing.active and not standing.heard:
            standing.heard, standing.since = True, self._round

    def active(self, kind: str) -> bool:
        standing = self._standings.get(kind)
        return standing is None or standing.active

    def __len__(self) -> int:
        """Kinds known, at work or not."""
        return len(self._standings)

    @property
    def shadows(self) -> frozenset[str]:
        """Kinds on trial whose nodes are not to be verified yet."""
        if not self.trials:
            return self.trials
        return frozenset(kind for kind in self.trials if not self._standings[kind].counts(self._round))

    def round(self, scores: Mapping[str, float]) -> bool:
        """A verify step was answered.

        Args:
            scores: of the kinds at work, net tokens that each brought this round.

        Returns:
            Whether `kinds` has changed.
        """
        self._round += 1
        for kind, standing in self._standings.items():
            if standing.counts(self._round - 1):
                standing.score.observe(scores.get(kind, 0.0))
        if self._round < self._settled:
            return False
        return self._drop() or self._take_back() or self._challenge()

    def _judged(self) -> list[tuple[float, str, Standing]]:
        """Kinds at work that have had their time, worst first."""
        return sorted(
            (standing.score.value if standing.heard else -1.0, kind, standing)
            for kind, standing in sorted(self._standings.items())
            if standing.active and self._round >= standing.since + (TENURE if standing.heard else SILENCE)
        )

    def _drop(self) -> bool:
        for score, _, standing in self._judged():
            if standing.trial and standing.heard and score >= ADMISSION:
                standing.trial, standing.rest = False, FIRST_REST
                self.trials = frozenset()
                self.readmitted += 1
            elif score <= (ADMISSION if standing.trial else 0.0):
                rest = standing.rest
                if standing.trial:
                    rest = standing.rest = min(2 * standing.rest, LONGEST_REST)
                    cost = -score * (self._round - standing.since)
                    rest = max(rest, min(round(cost / TRIAL_SHARE), LONGEST_OF_ALL))
                else:
                    self.dropped += 1
                standing.trial, standing.challenged = True, False
                self._change(standing, active=False)
                standing.until = self._round + rest
                return True
        return False

    def _take_back(self) -> bool:
        resting = sorted((standing.until, kind) for kind, standing in self._standings.items() if not standing.active)
        if not resting or resting[0][0] > self._round:
            return False
        standing = self._standings[resting[0][1]]
        self._change(standing, active=True)
        standing.challenged = False
        return True

    def _challenge(self) -> bool:
        """Do without a kind for a few rounds where nobody knows what steps take without it."""
        kinds = self.kinds
        if self._round < PATIENCE:
            return False
        for _, kind, standing in self._judged():
            unseen = self._unseen(kinds - {kind})
            if not standing.trial and unseen >= CHALLENGE:
                standing.challenged, standing.until = True, self._round + CHALLENGED
                self._change(standing, active=False)
                return True
        return False

    def _change(self, standing: Standing, *, active: bool) -> None:
        standing.active = active
        self.kinds = frozenset(kind for kind, each in self._standings.items() if each.active)
        self.trials = frozenset(kind for kind in self.kinds if self._standings[kind].trial)
        # What the others bring alone, and what they cost, is another matter now.
        for other in self._standings.values():
            other.since, other.score = self._round, Mean(MEMORY)
        self._settled = self._round + (TENURE if active or not standing.challenged else CHALLENGED)
        standing.heard = False
