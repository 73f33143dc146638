"""`Worth`: what sessions under load find out about speculators, for those that come after them."""

from __future__ import annotations

from router.roster import FIRST_REST, Roster
from router.worth import EXPLORERS, KNOWN, Worth


def judged(score: float, rounds: int = KNOWN, sequences: float = 16.0) -> Worth:
    worth = Worth()
    for _ in range(rounds):
        worth.observe("ssm", sequences, score)
    return worth


def test_a_kind_that_loses_is_not_welcome() -> None:
    """To one session in so many only, so that a turn to the better is seen."""
    worth = judged(-0.1)
    assert worth.loses("ssm", 16.0)
    assert sum(worth.welcome("ssm", 16.0) for _ in range(4 * EXPLORERS)) == 4
    for _ in range(200):
        worth.observe("ssm", 16.0, 0.2)
    assert worth.welcome("ssm", 16.0)


def test_little_is_no_loss() -> None:
    """A kind that pays, one that costs next to nothing, one that few rounds have seen, and one never seen."""
    assert not judged(0.1).loses("ssm", 16.0)
    assert not judged(-0.002).loses("ssm", 16.0)
    assert not judged(-0.1, rounds=KNOWN - 1).loses("ssm", 16.0)
    assert Worth().welcome("ssm", 16.0)


def test_loads_are_told_apart() -> None:
    """By the factor of two: what loses with 16 in a step may pay with 4."""
    worth = judged(-0.1)
    assert worth.loses("ssm", 14.0)
    assert not worth.loses("ssm", 4.0)
    assert not worth.loses("ngram", 16.0)


def test_a_reluctant_rest_is_longer_and_ends_with_the_reluctance() -> None:
    """A kind that begins resting comes back after its rest, or as many times later as trying it is dear, as it then
    stands."""
    factor = 4.0
    roster = Roster(reluctance=lambda kind: factor)
    roster.add("ssm", resting=True)
    assert (roster.kinds, len(roster)) == (frozenset(), 1)
    for _ in range(2 * FIRST_REST):
        assert not roster.round({})
    factor = 1.0
    assert roster.round({})
    assert roster.kinds == roster.trials == {"ssm"}
