"""`Worth`: what kinds of speculators have been worth to a verifier's sessions, by how many share a step.

A session finds out for itself whether a speculator pays, but its first rounds say little, and under load each session
that tries one costs all the others. So what the last ones found is kept, and new sessions begin with it.
"""

from __future__ import annotations

import math

from router.ema import Mean

MEMORY = 0.02  # weight of the newest round
KNOWN = 32  # rounds from which on the mean says something
LOSS = -0.01  # tokens a round: a kind that costs less than this may stay, it says little and is no burden
MOST = 0.5  # tokens a round that a session believes in before it has seen them
EXPLORERS = 16  # of so many new sessions one tries all the same


class Worth:
    """Of one verifier, as the sessions of one router see it."""

    def __init__(self) -> None:
        self._scores: dict[tuple[str, int], Mean] = {}
        self._asked: dict[tuple[str, int], int] = {}

    def observe(self, kind: str, sequences: float, score: float) -> None:
        """A round of a session with this kind at work.

        Args:
            sequences: how many share a step.
            score: net tokens that the kind brought.
        """
        self._scores.setdefault((kind, _load(sequences)), Mean(MEMORY)).observe(score)

    def prior(self, kind: str, sequences: float) -> float | None:
        """What a session should believe of it; None = nothing is known."""
        mean = self._scores.get((kind, _load(sequences)))
        return min(mean.value, MOST) if mean is not None and mean.count >= KNOWN else None

    def loses(self, kind: str, sequences: float) -> bool:
        """Whether it is known to cost more than it brings at this load."""
        prior = self.prior(kind, sequences)
        return prior is not None and prior < LOSS

    def welcome(self, kind: str, sequences: float) -> bool:
        """Whether a new session should begin with it."""
        if not self.loses(kind, sequences):
            return True
        key = kind, _load(sequences)
        self._asked[key] = self._asked.get(key, 0) + 1
        return self._asked[key] % EXPLORERS == 0


def _load(sequences: float) -> int:
    """Loads that are told apart: by the factor of two."""
    return round(math.log2(max(1.0, sequences)))
