"""`Record`: how right one kind of speculator has been in a session; `Agreement`: what it means that several agree."""

from __future__ import annotations

import math
from collections.abc import Callable

from graftree.calibration import OWN_EVIDENCE, Calibration, combine

# Least promised chance that a test of it is noted: less probable siblings are many, and say little.
NOTED = 0.05
# Of the rounds in which a record observes, the share that also teaches the prior.
TAUGHT = 4


class Trust:
    """Acceptances that came against those that were expected, of late; 1 without evidence.

    Calibration is right over all nodes that are tested; those that are chosen for a step are the ones it thinks best
    of, so what it expects of them tends to be too much. This is the factor.

    Attributes:
        ratio: accepted / expected, drawn towards 1 by `PRIOR` expected tokens.
    """

    PRIOR = 1.5
    FADE = 0.75  # per round, with or without evidence: distrust does not outlive what it was founded on

    __slots__ = ("_accepted", "_expected", "ratio")

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0
        self.ratio = 1.0

    def observe(self, expected: float, accepted: float) -> None:
        """A round's step is answered; (0, 0) where it had no tree."""
        self._accepted = self._accepted * self.FADE + accepted
        self._expected = self._expected * self.FADE + expected
        self.ratio = min(1.25, (self._accepted + self.PRIOR) / (self._expected + self.PRIOR))


class Agreement:
    """How much of the evidence of a further speculator that names the same token is its own, learnt from outcomes.

    Stochastic gradient of the log likelihood in `graftree.calibration.combine`'s s, with miss = exp(a + s b):
    d log(1 - miss) / ds = -b miss / (1 - miss), d log(miss) / ds = b.

    Attributes:
        own_evidence: s.
    """

    RATE = 0.02
    RANGE = (0.0, 1.5)

    __slots__ = ("own_evidence",)

    def __init__(self, own_evidence: float = OWN_EVIDENCE) -> None:
        self.own_evidence = own_evidence

    def combine(self, chances: list[float]) -> float:
        """The chance of a node from the calibrated chances of those that name it."""
        if len(chances) == 2:  # the usual number, and combine's own value
            one, other = chances
            low, high = (one, other) if one < other else (other, one)
            return 1.0 - (1.0 - high) * (1.0 - low) ** self.own_evidence
        return combine(chances, self.own_evidence)

    def observe(self, chances: list[float], accepted: bool) -> None:
        """A node that several name was tested."""
        first, *others = sorted((min(chance, 0.999) for chance in chances), reverse=True)
        slope = sum(math.log1p(-chance) for chance in others)
        miss = (1.0 - first) * math.exp(self.own_evidence * slope)
        gradient = -slope * miss / (1.0 - miss) if accepted and miss < 1.0 else slope if not accepted else 0.0
        low, high = self.RANGE
        self.own_evidence = min(max(self.own_evidence + self.RATE * gradient, low), high)


class Record:
    """One kind of speculator in one session.

    Args:
        kind: of the speculator.
        prior: what other sessions' records taught; taught in turn.

    Attributes:
        trust: of the nodes that it alone brought into a step.
    """

    def __init__(self, kind: str, prior: Calibration | None = None) -> None:
        self.kind = kind
        self.trust = Trust()
        self._prior = prior
        self._calibration = Calibration(prior)
        self._curves: dict[int, Callable[[float], float]] = {}  # by depth, as the calibration stands now
        self._rounds = 0

    def chance(self, depth: int, promised: float) -> float:
        """As `Calibration.chance`."""
        curve = self._curves.get(depth)
        if curve is None:
            curve = self._curves[depth] = self._calibration.curve(depth)
        return curve(promised)

    def observe(self, depth: int, promised: float, accepted: bool) -> None:
        """A node was tested: as `Calibration.observe`."""
        if promised >= NOTED:
            self._curves.clear()
            self._calibration.observe(depth, promised, accepted)
            if self._prior is not None and self._rounds % TAUGHT == 0:
                self._prior.observe(depth, promised, accepted)

    def round(self) -> None:
        """What was observed since the last call belongs to one verify step."""
        self._rounds += 1

    def renew(self) -> None:
        """Forget this session's evidence: what the speculator was is not what it may be when it is tried again."""
        self._calibration, self.trust = Calibration(self._prior), Trust()
        self._curves.clear()
