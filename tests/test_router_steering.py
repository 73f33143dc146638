"""`AdaptiveSteering` in virtual time: what pays is used, what hurts is found out, and each again when it changes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from graftree.step_time import StepTime
from router.adaptive import AdaptiveSteering
from router.metrics import Metrics
from router.priors import Priors
from router.steering import FixedSteering, Steering
from tests.steering_lab import PROMPT, Lab, Round, Speculator, rate

# A CPU's: 8 rows cost what one does, 64 three times as much.
STEPS = StepTime((1, 8, 16, 32, 64), (0.060, 0.065, 0.082, 0.118, 0.200))
PLAIN = 1 / 0.061  # tokens per second: the step, and the lab's overhead

Make = Callable[[Priors, Metrics, Callable[[], float]], Steering]


def adaptive(most: int = 16, longest_wait: float = 0.05) -> Make:
    return lambda priors, metrics, clock: AdaptiveSteering(
        priors, metrics, most=most, longest_wait=longest_wait, clock=clock
    )


def fixed(most: int = 16, longest_wait: float = 0.003) -> Make:
    return lambda priors, metrics, clock: FixedSteering(priors, most=most, longest_wait=longest_wait, clock=clock)


def never(position: int) -> bool:
    return False


def often(share: float) -> Callable[[int], bool]:
    """Right at that share of the positions."""
    return lambda position: Random(position * 7919).random() < share


def wrong(**options: object) -> Speculator:
    """Sure of itself, wide and deep, and never right."""
    return Speculator("wrong", right=never, promise=0.97, **{"width": 4, "depth": 16, **options})  # type: ignore[arg-type]


def test_the_lab_is_plain_without_speculators() -> None:
    """Plain decoding takes a step and the overhead a token."""
    rounds = Lab(adaptive(), STEPS, []).rounds(20)
    assert rate(rounds) == pytest.approx(PLAIN)
    assert {each.nodes for each in rounds} == {0}


@pytest.mark.parametrize("most", [16, 64])
@pytest.mark.parametrize("latency", [0.0005, 0.006, 0.03])
def test_a_wrong_speculator_costs_nothing_after_20_rounds(most: int, latency: float) -> None:
    """However large trees may be and however quick it answers, throughput is 0.95 of plain from round 20 on."""
    rounds = Lab(adaptive(most), STEPS, [wrong(first=latency, level=latency)]).rounds(220)
    assert rate(rounds[20:]) >= 0.98 * PLAIN
    assert all(rate(rounds[start : start + 20]) >= 0.95 * PLAIN for start in range(20, 200, 20))
    assert rate(rounds[:20]) >= 0.85 * PLAIN


def test_fixed_steering_pays_for_it() -> None:
    """What adaptive steering saves: with 64 nodes of a wrong tree each step takes three times as long."""
    rounds = Lab(fixed(64, 0.05), STEPS, [wrong(first=0.001, level=0.001, depth=16)]).rounds(60)
    assert rate(rounds[20:]) < 0.95 * PLAIN


@pytest.mark.parametrize("most", [16, 64])
def test_wrong_then_good_then_wrong(most: int) -> None:
    """20 rounds after each turn to the worse it is plain decoding's speed; after a turn to the better it is used."""
    good_from, good_to = PROMPT + 120, PROMPT + 720

    def right(position: int) -> bool:
        return good_from <= position < good_to

    turncoat = Speculator("turncoat", first=0.006, level=0.006, right=right, promise=0.95, width=3)
    lab = Lab(adaptive(most), STEPS, [turncoat])
    first = lab.rounds(120)
    good: list[Round] = []
    while lab.length < good_to:
        good += lab.rounds(1)
    again = lab.rounds(200)
    assert rate(first[20:]) >= 0.95 * PLAIN
    assert rate(good) >= 2.0 * PLAIN
    assert rate(good[-40:]) >= 3.5 * PLAIN
    assert rate(again[20:40]) >= 0.95 * PLAIN
    assert rate(again[20:]) >= 0.97 * PLAIN
    assert lab.metrics.dropped_speculators == 2
    assert lab.metrics.readmitted_speculators == 1


def test_it_recovers_after_a_long_time() -> None:
    """A speculator that was wrong for 1500 rounds is in use within 100 rounds of becoming good."""
    turncoat = Speculator("turncoat", right=lambda position: position >= PROMPT + 1500, promise=0.95)
    lab = Lab(adaptive(), STEPS, [turncoat])
    while lab.length < PROMPT + 1500:
        lab.rounds(1)
    rounds = lab.rounds(140)
    assert rate(rounds[100:]) >= 2 * PLAIN


def test_waits_and_trees_beat_fixed_ones() -> None:
    """Four in five right, 6 ms a level: adaptive steering is ahead of fixed, and of itself without waits."""
    speeds = [
        rate(Lab(make, STEPS, [Speculator("good", 0.006, 0.006, often(0.8), 0.8)]).rounds(300)[20:])
        for make in (adaptive(), adaptive(longest_wait=0.0), fixed())
    ]
    assert speeds[0] > 1.9 * PLAIN
    assert speeds[0] > max(speeds[1:])


def test_no_wait_where_drafting_keeps_up() -> None:
    """Where every branch hits and drafts keep ahead there are whole trees without a wait."""
    quick = Speculator("quick", 0.004, 0.004, lambda position: True, 0.95, depth=32)
    rounds = Lab(adaptive(), STEPS, [quick]).rounds(200)
    assert sum(each.waited for each in rounds[100:]) / 100 < 0.004
    assert rate(rounds[100:]) > 6 * PLAIN


def test_a_speculator_that_slows_the_verifier_down() -> None:
    """Drafting may take its time from the verifier: seen in step times, and weighed against the tokens."""
    slow = Speculator("slow", 0.006, 0.006, often(0.5), 0.5, slows=2.0)
    rounds = Lab(adaptive(), STEPS, [slow]).rounds(400)
    assert rate(rounds[20:]) >= 0.9 * PLAIN
    assert sum("slow" in each.kinds for each in rounds[20:]) < 60
    worth_it = Speculator("worth it", 0.006, 0.006, often(0.9), 0.9, slows=1.3)
    rounds = Lab(adaptive(), STEPS, [worth_it]).rounds(300)
    assert rate(rounds[20:]) >= 1.8 * PLAIN


def test_of_two_speculators_that_pay_both_stay() -> None:
    """Each right where the other one is not: the second one's marginal tokens pay, and both are kept."""
    even = Speculator("even", 0.001, 0.001, lambda position: position // 8 % 2 == 0, 0.5)
    odd = Speculator("odd", 0.001, 0.001, lambda position: position // 8 % 2 == 1, 0.5)
    rounds = Lab(adaptive(), STEPS, [even, odd]).rounds(300)
    assert sum(each.kinds == {"even", "odd"} for each in rounds[20:]) > 230
    alone = Lab(adaptive(), STEPS, [Speculator("even", 0.001, 0.001, lambda p: p // 8 % 2 == 0, 0.5)]).rounds(300)
    assert rate(rounds[20:]) > 1.3 * rate(alone[20:])


def test_of_two_that_say_the_same_one_is_dropped() -> None:
    """The second one's marginal tokens are none, whatever it would bring alone: the slower one goes."""
    quick = Speculator("quick", 0.001, 0.001, often(0.8), 0.8)
    slow = Speculator("slow", 0.006, 0.006, often(0.8), 0.8)
    rounds = Lab(adaptive(), STEPS, [quick, slow]).rounds(300)
    assert sum("slow" in each.kinds for each in rounds[40:]) < 60
    assert sum("quick" in each.kinds for each in rounds[40:]) > 240


def test_a_wrong_one_beside_a_good_one() -> None:
    """The good one keeps what it would have alone."""
    good = Speculator("good", 0.001, 0.001, often(0.8), 0.8)
    alone = Lab(adaptive(), STEPS, [good]).rounds(300)
    both = Lab(adaptive(), STEPS, [Speculator("good", 0.001, 0.001, often(0.8), 0.8), wrong()]).rounds(300)
    assert rate(both[40:]) >= 0.95 * rate(alone[40:])
    assert sum("wrong" in each.kinds for each in both[20:]) < 80


def test_load_takes_nodes_away() -> None:
    """The more sessions share a step, the fewer nodes each of them gets; at the end it decodes plainly."""
    nodes = []
    for others in (0, 7, 63):
        good = Speculator("good", 0.001, 0.001, often(0.7), 0.7)
        rounds = Lab(adaptive(), STEPS, [good], others=others).rounds(100)
        nodes.append(sum(each.nodes for each in rounds[20:]) / 80)
    assert nodes[0] > 1.5 * nodes[1] > 0
    assert nodes[2] < 0.2


def test_new_sessions_begin_with_what_others_learnt() -> None:
    """A second session takes trees from its first rounds on, and does not try again what the first one tried."""
    priors = Priors()
    first = Lab(adaptive(), STEPS, [Speculator("good", 0.006, 0.006, often(0.8), 0.8)], priors=priors)
    first.rounds(300)
    second = Lab(
        adaptive(), STEPS, [Speculator("good", 0.006, 0.006, often(0.8), 0.8)], priors=priors, link=first.link
    )
    assert rate(second.rounds(12)[2:]) > 1.5 * PLAIN
    beaten = Priors()
    Lab(adaptive(64), STEPS, [wrong()], priors=beaten).rounds(100)
    assert rate(Lab(adaptive(64), STEPS, [wrong()], priors=beaten).rounds(10)) >= 0.97 * PLAIN


def test_runs_repeat() -> None:
    """Steering draws nothing: the same evidence gives the same decisions."""

    def play() -> list[Round]:
        speculators = [Speculator("good", 0.006, 0.006, often(0.6), 0.7, width=2), wrong()]
        return Lab(adaptive(), STEPS, speculators).rounds(100)

    assert play() == play()
