"""`Calibration`: from the chance a speculator promises for a node to the chance that comes true.

All chances here are conditional: that the LLM says the node's token, given that it said the node's path. A node is
*tested* when the LLM's pick at its parent is known; so every child of every node on the walk of a verify step is an
observation, taken or not, and the survival probability of a node is the product of the chances down its path.

Two mappings learn side by side, each fit for another fault:
  * a scale, accepted / promised, both fading: of promises that are all too high or too low by one factor, and quick
    to see through a speculator that is never right;
  * a line in log-odds space with an offset per depth (Platt, 1999, "Probabilistic outputs for support vector
    machines"), c = sigmoid(a + b logit(p) + o_depth): of promises that are too bold or too timid. Its parameters are
    Gaussian and move with each observation by an iterated extended Kalman update, so nothing is ever refitted.
The chance is their average, weighted by how well each has predicted of late (Bayesian model averaging with fading
evidence).

Chosen by simulation: sessions of 10 and of 100 verify steps, a speculator that is honest, over- or underconfident,
never right, right half as often as it says, worse with depth, that changes its nature every 40 steps, or says no more
than 0.6 in truth. Excess loss in mean over these, millinats an observation: no calibration 81 and 85, histogram bins
with a prior 63 and 26, the scale alone 26 and 16, the line alone 27 and 11, the average of both 22 and 9.

Pure Python; O(1) per observation and chance, a few microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from graftree.errors import InvalidArgument

LEAST, MOST = 0.0025, 0.9975  # a chance is never surer than this: one surprise must not cost everything
_ROUNDS = 6  # of Newton's method, which has converged by then


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """How quickly evidence counts.

    Attributes:
        depths: depths told apart; deeper ones share the last.
        scale_prior: promises, in sum, that the first opinion of the scale is worth.
        scale_fade: per observation, of the scale's evidence.
        offset, slope, depth: prior variances of the line's parameters a, b and o_d.
        drift: share of the prior variances that comes back with each observation, so the line follows the text.
        fade: per observation, of the evidence for either mapping.
        session: share of the prior variances by which a session may differ from the prior it is seeded with.
    """

    depths: int = 8
    scale_prior: float = 0.5
    scale_fade: float = 0.99
    offset: float = 4.0
    slope: float = 0.1
    depth: float = 0.1
    drift: float = 0.001
    fade: float = 0.98
    session: float = 0.25

    def __post_init__(self) -> None:
        """Raises InvalidArgument: names the field, the value and the limit."""
        for name in ("scale_prior", "offset", "slope", "depth"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InvalidArgument(name, getattr(self, name), "above 0")
        for name in ("scale_fade", "fade", "session", "drift"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidArgument(name, getattr(self, name), "from 0 to 1")
        if self.depths < 1:
            raise InvalidArgument("depths", self.depths, "at least 1")


class Calibration:
    """One speculator's record: in one session, or in all sessions of a pod as the prior of new ones.

    Args:
        prior: what other sessions have taught; the new record begins where it stands now and goes its own way. The
            owner lets the prior observe too.
        settings: frozen; by default the prior's.

    Attributes:
        raw, calibrated: reliability of what was promised, and of the chances made of it before each observation.
    """

    def __init__(self, prior: Calibration | None = None, *, settings: CalibrationSettings | None = None) -> None:
        if settings is None:
            settings = prior.settings if prior is not None else CalibrationSettings()
        self.settings: CalibrationSettings = settings
        self._scale: _Scale = _Scale(settings, prior._scale if prior is not None else None)
        self._line: _Line = _Line(settings, prior._line if prior is not None else None)
        self._lead: float = prior._lead if prior is not None else 0.0  # log odds of scale : line
        self._lead_prior = self._lead
        self.raw, self.calibrated = Reliability(), Reliability()

    @property
    def observations(self) -> int:
        """Nodes tested so far."""
        return self.raw.count

    def chance(self, depth: int, predicted: float) -> float:
        """The chance that a node is accepted once its parent is.

        Args:
            depth: of the node below the root at the verify step, 1 = child of the root.
            predicted: chance that the speculator promises, in [0, 1]; beyond [LEAST, MOST] it counts as the limit.

        Returns:
            In [LEAST, MOST], and at one depth in the order of `predicted`; but a promise below LEAST keeps its
            ratio to LEAST, so that improbable nodes stay in order, too.
        """
        clipped = min(max(predicted, LEAST), MOST)
        scaled, lined = self._scale.chance(clipped), self._line.chance(depth, clipped)
        chance = lined + _sigmoid(self._lead) * (scaled - lined)
        return chance if predicted >= LEAST else chance * max(predicted, 0.0) / LEAST

    def curve(self, depth: int) -> Callable[[float], float]:
        """`chance` at one depth as it stands now, for many promises: a third of the time each."""
        ratio, lead = self._scale.ratio, _sigmoid(self._lead)
        offset, slope = self._line.at(depth)
        exp, log = math.exp, math.log

        def chance(predicted: float) -> float:
            p = MOST if predicted > MOST else LEAST if predicted < LEAST else predicted
            scaled, lined = ratio * p, 1.0 / (1.0 + exp(-offset - slope * log(p / (1.0 - p))))
            scaled = MOST if scaled > MOST else LEAST if scaled < LEAST else scaled
            lined = MOST if lined > MOST else LEAST if lined < LEAST else lined
            found = lined + lead * (scaled - lined)
            return found if predicted >= LEAST else found * max(predicted, 0.0) / LEAST

        return chance

    def observe(self, depth: int, predicted: float, accepted: bool) -> None:
        """A node was tested. Arguments as of `chance`; `accepted`: the LLM picked its token."""
        clipped = min(max(predicted, LEAST), MOST)
        scaled, lined = self._scale.chance(clipped), self._line.chance(depth, clipped)
        self.raw.observe(predicted, accepted)
        self.calibrated.observe(lined + _sigmoid(self._lead) * (scaled - lined), accepted)
        won = math.log(scaled / lined) if accepted else math.log((1.0 - scaled) / (1.0 - lined))
        self._lead = self._lead_prior + (self._lead - self._lead_prior) * self.settings.fade + won
        self._scale.observe(clipped, accepted)
        self._line.observe(depth, clipped, accepted)


class _Scale:
    """c = ratio p, with ratio = accepted / promised."""

    RANGE = (0.005, 3.0)

    __slots__ = ("_accepted", "_fade", "_first", "_prior", "_promised")

    def __init__(self, settings: CalibrationSettings, seed: _Scale | None) -> None:
        self._prior, self._fade = settings.scale_prior, settings.scale_fade
        self._first = seed.ratio if seed is not None else 1.0
        self._promised = self._accepted = 0.0

    @property
    def ratio(self) -> float:
        low, high = self.RANGE
        first = self._prior * self._first
        return min(max((self._accepted + first) / (self._promised + self._prior), low), high)

    def chance(self, predicted: float) -> float:
        return min(max(self.ratio * predicted, LEAST), MOST)

    def observe(self, predicted: float, accepted: bool) -> None:
        self._promised = self._promised * self._fade + predicted
        self._accepted = self._accepted * self._fade + accepted


class _Line:
    """logit c = a + b logit(p) + o_depth, with the covariance of (a, b) and the variance of each o_depth."""

    SLOPES = (0.05, 2.5)  # above 0, so that the order of a speculator's own nodes stays

    __slots__ = ("_a", "_aa", "_ab", "_b", "_bb", "_offsets", "_settings", "_variances")

    def __init__(self, settings: CalibrationSettings, seed: _Line | None) -> None:
        self._settings, depths = settings, settings.depths
        self._a, self._b = 0.0, 1.0
        self._aa, self._ab, self._bb = settings.offset, 0.0, settings.slope
        self._offsets = [0.0] * depths
        self._variances = [settings.depth] * depths
        if seed is not None:
            share = settings.session
            self._a, self._b = seed._a, seed._b
            self._aa = min(seed._aa + share * settings.offset, settings.offset)
            self._bb = min(seed._bb + share * settings.slope, settings.slope)
            for index in range(min(depths, len(seed._offsets))):
                self._offsets[index] = seed._offsets[index]
                self._variances[index] = min(seed._variances[index] + share * settings.depth, settings.depth)

    def _index(self, depth: int) -> int:
        return min(max(depth, 1), len(self._offsets)) - 1

    def at(self, depth: int) -> tuple[float, float]:
        """Offset and slope of the line at a depth."""
        return self._a + self._offsets[self._index(depth)], self._b

    def chance(self, depth: int, predicted: float) -> float:
        logit = math.log(predicted / (1.0 - predicted))
        return min(max(_sigmoid(self._a + self._b * logit + self._offsets[self._index(depth)]), LEAST), MOST)

    def observe(self, depth: int, predicted: float, accepted: bool) -> None:
        settings, index = self._settings, self._index(depth)
        logit = math.log(predicted / (1.0 - predicted))
        self._aa = min(self._aa + settings.drift * settings.offset, settings.offset)
        self._bb = min(self._bb + settings.drift * settings.slope, settings.slope)
        own = min(self._variances[index] + settings.drift * settings.depth, settings.depth)
        # Gradient (1, logit, 1) of the log odds; with the covariance, how much each parameter moves.
        move_a, move_b = self._aa + self._ab * logit, self._ab + self._bb * logit
        variance = move_a + move_b * logit + own
        before = self._a + self._b * logit + self._offsets[index]
        after = _most_probable(before, variance, accepted)
        chance = _sigmoid(after)
        surprise = accepted - chance
        self._a += move_a * surprise
        self._b = min(max(self._b + move_b * surprise, self.SLOPES[0]), self.SLOPES[1])
        self._offsets[index] += own * surprise
        weight = chance * (1.0 - chance)
        gain = weight / (1.0 + weight * variance)
        self._aa -= gain * move_a * move_a
        self._ab -= gain * move_a * move_b
        self._bb -= gain * move_b * move_b
        self._variances[index] = own - gain * own * own


def _most_probable(mean: float, variance: float, accepted: bool) -> float:
    """Mode of the log odds, Gaussian before, given the outcome: solves x = mean + variance (accepted - sigmoid(x)).

    The plain extended Kalman step overshoots where a promise was near 0 or 1; this one never does.
    """
    low, high = (mean, mean + variance) if accepted else (mean - variance, mean)
    x = mean
    for _ in range(_ROUNDS):
        chance = _sigmoid(x)
        step = (x - mean - variance * (accepted - chance)) / (1.0 + variance * chance * (1.0 - chance))
        x = min(max(x - step, low), high)
    return x


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -36.0 else math.exp(max(x, -700.0))


# Of the evidence of every further speculator that names the same token, the share that is its own.
OWN_EVIDENCE = 0.5


def combine(chances: Iterable[float], own_evidence: float = OWN_EVIDENCE) -> float:
    """The chance of a node that several speculators name, from the calibrated chance of each.

    The best chance counts whole, what the others add only in part: miss = (1 - c_1) prod_(i > 1) (1 - c_i)^s with c_1
    the largest. s = 1 is 1 - prod(1 - c), right for guessers that fail independently; speculators trained on the
    same LLM, or looking at the same text, fail together, and s = 0 (the maximum) is right for copies of one another.

    Args:
        chances: each in [0, 1]; their order does not matter.
        own_evidence: s.

    Returns:
        0.0 for no chances.
    """
    ordered = sorted(chances, reverse=True)
    if not ordered:
        return 0.0
    miss = 1.0 - min(ordered[0], 1.0)
    for chance in ordered[1:]:
        miss *= (1.0 - min(chance, 1.0)) ** own_evidence
    return 1.0 - miss


def exclusive(chances: Sequence[float]) -> list[float]:
    """Chances of siblings, scaled down where they add to more than 1: at most one of them can be taken."""
    total = math.fsum(chances)
    return [chance / total for chance in chances] if total > 1.0 else list(chances)


@dataclass(frozen=True, slots=True)
class Bin:
    """Nodes whose promised chance fell between `low` and `high`: how many, the mean promise, the share accepted."""

    low: float
    high: float
    count: int
    predicted: float
    observed: float


class Reliability:
    """Promised against observed acceptance, for a reliability plot. Counts everything, forgets nothing.

    Args:
        bins: of equal width over [0, 1].
    """

    __slots__ = ("_accepted", "_counts", "_promised")

    def __init__(self, bins: int = 10) -> None:
        self._counts, self._promised, self._accepted = [0] * bins, [0.0] * bins, [0] * bins

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, predicted: float, accepted: bool) -> None:
        predicted = min(max(predicted, 0.0), 1.0)
        index = min(int(predicted * len(self._counts)), len(self._counts) - 1)
        self._counts[index] += 1
        self._promised[index] += predicted
        self._accepted[index] += accepted

    def merge(self, other: Reliability) -> None:
        """Add what another one counted, over as many bins."""
        for index, count in enumerate(other._counts):
            self._counts[index] += count
            self._promised[index] += other._promised[index]
            self._accepted[index] += other._accepted[index]

    def bins(self) -> list[Bin]:
        """The bins that hold something, from improbable to sure."""
        size = len(self._counts)
        return [
            Bin(index / size, (index + 1) / size, count, self._promised[index] / count, self._accepted[index] / count)
            for index, count in enumerate(self._counts)
            if count
        ]

    def error(self) -> float:
        """Expected calibration error: mean |promised - observed| over the bins, weighted by count (0 if empty)."""
        gaps = sum(abs(self._promised[i] - self._accepted[i]) for i in range(len(self._counts)))
        return gaps / self.count if self.count else 0.0
