"""`Record`, `Trust` and `Agreement`: what is believed of speculators follows what came of their words."""

from __future__ import annotations

from random import Random

import pytest

from graftree.calibration import OWN_EVIDENCE, Calibration, combine
from router.ema import Mean
from router.priors import Priors
from router.record import NOTED, TAUGHT, Agreement, Record, Trust


def test_mean_is_plain_while_young_and_then_fades() -> None:
    """The first observations count alike, later ones with the given share."""
    mean = Mean(0.25)
    for value in (1.0, 2.0, 3.0):
        mean.observe(value)
    assert mean.value == pytest.approx(2.0)
    for _ in range(40):
        mean.observe(8.0)
    assert mean.value == pytest.approx(8.0, abs=1e-3)
    mean.observe(0.0)
    assert mean.value == pytest.approx(6.0, abs=1e-2)


def test_the_curve_is_the_calibration() -> None:
    """What a record keeps at hand between observations is its calibration's chance, at every depth and promise."""
    lots, calibration = Random(1), Calibration()
    for _ in range(200):
        promised = lots.random()
        calibration.observe(lots.randint(1, 9), promised, lots.random() < promised**2)
    for depth in range(1, 12):
        curve = calibration.curve(depth)
        for promised in (0.0, 1e-9, 0.001, 0.0025, 0.1, 0.5, 0.99, 0.9975, 1.0):
            assert curve(promised) == pytest.approx(calibration.chance(depth, promised), rel=1e-12, abs=1e-15)


def test_a_record_follows_its_observations() -> None:
    """Chances change with every observation; promises too small to be noted change nothing."""
    record = Record("a")
    before = record.chance(1, 0.9)
    record.observe(1, 0.9, False)
    after = record.chance(1, 0.9)
    assert after < before
    record.observe(1, NOTED / 2, False)
    assert record.chance(1, 0.9) == after
    record.renew()
    assert record.chance(1, 0.9) == before


def test_sessions_share_what_they_learn() -> None:
    """A new record begins where the prior stands; one round in `TAUGHT` of each record teaches it."""
    priors = Priors()
    first = priors.record("a")
    for _ in range(10 * TAUGHT):
        first.observe(1, 0.9, False)
        first.round()
    assert priors.record("a").chance(1, 0.9) < 0.3
    assert priors.record("b").chance(1, 0.9) > 0.8
    once = Priors()
    taught = once.record("a")
    taught.round()  # not the first round: it teaches nothing until TAUGHT have passed
    untouched = once.record("a").chance(1, 0.9)
    taught.observe(1, 0.9, False)
    assert once.record("a").chance(1, 0.9) == untouched


def test_trust_is_accepted_over_expected() -> None:
    """1 without evidence, near the true ratio with it, and 1 again when nothing is expected for a while."""
    trust = Trust()
    assert trust.ratio == 1.0
    for _ in range(40):
        trust.observe(2.0, 1.0)
    assert trust.ratio == pytest.approx(0.5, abs=0.1)
    for _ in range(3):
        trust.observe(2.0, 0.0)
    assert trust.ratio < 0.35
    for _ in range(20):
        trust.observe(0.0, 0.0)
    assert trust.ratio == pytest.approx(1.0, abs=0.05)


def test_agreement_of_two_is_the_general_rule() -> None:
    """The short way for two is `combine`, whatever their order."""
    agreement = Agreement(0.3)
    assert agreement.combine([0.2, 0.7]) == pytest.approx(combine([0.7, 0.2], 0.3))
    assert agreement.combine([0.7, 0.2]) == agreement.combine([0.2, 0.7])
    assert agreement.combine([0.1, 0.7, 0.2]) == pytest.approx(combine([0.1, 0.7, 0.2], 0.3))


@pytest.mark.parametrize(("own", "low", "high"), [(0.0, 0.0, 0.25), (1.0, 0.75, 1.4)])
def test_agreement_learns_how_much_the_second_word_is_worth(own: float, low: float, high: float) -> None:
    """Copies of one another teach it 0, independent guessers 1."""
    lots, agreement = Random(2), Agreement()
    assert agreement.own_evidence == OWN_EVIDENCE
    kept = []
    for number in range(6000):
        chances = [lots.uniform(0.2, 0.8), lots.uniform(0.2, 0.8)]
        agreement.observe(chances, lots.random() < combine(chances, own))
        if number >= 3000:
            kept.append(agreement.own_evidence)
    assert low <= sum(kept) / len(kept) <= high


def test_agreement_survives_certainty() -> None:
    """Chances of 1 and outcomes that were impossible neither divide by 0 nor leave the range."""
    agreement = Agreement()
    for chances in ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0]):
        for accepted in (True, False):
            agreement.observe(chances, accepted)
    assert 0.0 <= agreement.own_evidence <= 1.5
