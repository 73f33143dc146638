"""Calibration: promised and observed acceptance come to agree, quickly, and with little evidence nothing breaks."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.calibration import LEAST, MOST, Calibration, CalibrationSettings, Reliability, combine, exclusive
from graftree.errors import InvalidArgument

Truth = Callable[[int, float], float]


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def teach(calibration: Calibration, truth: Truth, count: int, seed: int = 0, depths: int = 4) -> None:
    """Observe `count` nodes of a speculator whose promise p at depth d comes true with chance truth(d, p)."""
    lots = random.Random(seed)
    for _ in range(count):
        depth, promised = lots.randint(1, depths), lots.betavariate(1, 1)
        calibration.observe(depth, promised, lots.random() < truth(depth, promised))


FAULTS: dict[str, Truth] = {
    "honest": lambda depth, p: p,
    "overconfident": lambda depth, p: sigmoid(0.5 * logit(min(max(p, 1e-6), 1 - 1e-6)) - 0.5),
    "timid": lambda depth, p: sigmoid(logit(min(max(p, 1e-6), 1 - 1e-6)) + 0.8),
    "half as often": lambda depth, p: 0.5 * p,
    "worse with depth": lambda depth, p: sigmoid(logit(min(max(p, 1e-6), 1 - 1e-6)) - 0.5 * depth),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_promises_come_to_agree_with_what_happens(fault: str) -> None:
    """After 2000 observations the chances of the next 2000 agree with the outcomes within 4 points, and are no worse
    than the promises were."""
    calibration = Calibration()
    teach(calibration, FAULTS[fault], 2000)
    ahead = Calibration(calibration)
    teach(ahead, FAULTS[fault], 2000, seed=1)
    assert ahead.calibrated.error() < 0.04
    assert ahead.calibrated.error() < ahead.raw.error() + 0.02


def test_depths_are_told_apart() -> None:
    """A promise that holds at depth 1 and fails at depth 4 is worth more at depth 1."""
    calibration = Calibration()
    teach(calibration, FAULTS["worse with depth"], 3000)
    assert calibration.chance(1, 0.5) > calibration.chance(4, 0.5) + 0.15
    assert calibration.chance(50, 0.5) == calibration.chance(8, 0.5)


def test_a_speculator_that_is_never_right_is_found_out() -> None:
    """Promises of 0.99 that fail are worth less than 0.1 after ten of them, less than 0.03 after forty; and more
    than 0.6 again after forty that hold."""
    calibration = Calibration()
    for _ in range(10):
        calibration.observe(1, 0.99, False)
    assert calibration.chance(1, 0.99) < 0.1
    for _ in range(30):
        calibration.observe(1, 0.99, False)
    assert calibration.chance(1, 0.99) < 0.03
    for _ in range(40):
        calibration.observe(1, 0.99, True)
    assert calibration.chance(1, 0.99) > 0.6


def test_without_evidence_promises_are_taken_at_their_word() -> None:
    """A new record is the identity between the limits, and keeps the order beyond them."""
    calibration = Calibration()
    for promised in (0.01, 0.3, 0.5, 0.99):
        assert calibration.chance(3, promised) == pytest.approx(promised)
    assert calibration.chance(1, 1.0) == pytest.approx(MOST)
    assert calibration.chance(1, 0.0) == 0.0
    assert calibration.chance(1, LEAST / 5) == pytest.approx(LEAST / 5)


def test_one_surprise_does_not_ruin_a_good_record() -> None:
    """After 200 promises of 0.95 that were kept as promised, one more miss costs less than 5 points."""
    calibration, lots = Calibration(), random.Random(2)
    for _ in range(200):
        calibration.observe(1, 0.95, lots.random() < 0.95)
    before = calibration.chance(1, 0.95)
    assert before == pytest.approx(0.95, abs=0.05)
    calibration.observe(1, 0.95, False)
    assert calibration.chance(1, 0.95) > before - 0.05


def test_a_session_begins_where_its_prior_stands() -> None:
    """Seeded, a record knows what others learnt, learns for itself alone, and needs less evidence than a new one."""
    prior = Calibration()
    teach(prior, FAULTS["half as often"], 1000)
    session = Calibration(prior)
    assert session.chance(1, 0.8) == pytest.approx(prior.chance(1, 0.8), abs=0.02)
    assert session.observations == 0
    known = prior.chance(1, 0.8)
    for _ in range(20):
        session.observe(1, 0.8, True)
    assert session.chance(1, 0.8) > known + 0.1
    assert prior.chance(1, 0.8) == known


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.floats(0, 1), st.booleans()), max_size=80),
    st.integers(0, 200),
    st.lists(st.floats(0, 1), min_size=2, max_size=6),
)
def test_chances_are_chances_and_keep_the_order(
    observed: list[tuple[int, float, bool]], depth: int, promised: list[float]
) -> None:
    """Whatever was observed, chances are in [0, MOST] and at one depth in the order of the promises."""
    calibration = Calibration()
    for entry in observed:
        calibration.observe(*entry)
    chances = [calibration.chance(depth, p) for p in sorted(promised)]
    assert all(0.0 <= chance <= MOST for chance in chances)
    assert all(one <= two + 1e-12 for one, two in itertools.pairwise(chances))


def test_agreement_is_worth_less_than_independence_and_more_than_nothing() -> None:
    """Two that say the same token: above either alone, below 1 - prod(1 - c), in any order; none is no chance."""
    assert combine([0.6]) == pytest.approx(0.6)
    assert 0.6 < combine([0.5, 0.6]) < 1 - 0.5 * 0.4
    assert combine([0.5, 0.6]) == combine([0.6, 0.5])
    assert combine([0.5, 0.6], own_evidence=1.0) == pytest.approx(1 - 0.5 * 0.4)
    assert combine([0.5, 0.6], own_evidence=0.0) == pytest.approx(0.6)
    assert combine([]) == 0.0


def test_siblings_exclude_each_other() -> None:
    """Chances that add to more than 1 are scaled to 1; others stay."""
    assert exclusive([0.9, 0.6]) == pytest.approx([0.6, 0.4])
    assert exclusive([0.5, 0.2]) == [0.5, 0.2]
    assert exclusive([]) == []


def test_reliability_bins_count_what_was_seen() -> None:
    """Every observation lands in its bin; the error is the mean gap; two records add up."""
    reliability, other = Reliability(), Reliability()
    for accepted in (True, False, True, True):
        reliability.observe(0.55, accepted)
    other.observe(1.0, True)
    other.observe(0.0, False)
    (only,) = reliability.bins()
    assert (only.low, only.high, only.count) == (0.5, 0.6, 4)
    assert only.predicted == pytest.approx(0.55)
    assert only.observed == pytest.approx(0.75)
    assert reliability.error() == pytest.approx(0.2)
    reliability.merge(other)
    assert [entry.count for entry in reliability.bins()] == [1, 4, 1]
    assert reliability.error() == pytest.approx(0.8 / 6)
    assert Reliability().error() == 0.0


@pytest.mark.parametrize("field", ["depths", "scale_prior", "fade", "session", "offset"])
def test_bad_settings_are_named(field: str) -> None:
    """A setting out of range is refused by name."""
    with pytest.raises(InvalidArgument, match=field):
        CalibrationSettings(**{field: -1})
