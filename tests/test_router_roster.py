"""`Roster`: who is dropped, when, and when it is tried again; given evidence, nothing measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby, pairwise

import pytest

from router.roster import CHALLENGE, CHALLENGED, FIRST_REST, LONGEST_REST, SILENCE, TENURE, TRIAL_SHARE, Roster

Worth = Callable[[int, frozenset[str]], Mapping[str, float]]


def play(roster: Roster, worth: Worth, rounds: int, *, first: int = 0) -> list[frozenset[str]]:
    """Who was at work in each round; those at work are heard at once."""
    seen = []
    for number in range(first, first + rounds):
        for kind in roster.kinds:
            roster.heard(kind)
        seen.append(roster.kinds)
        roster.round(worth(number, roster.kinds))
    return seen


def roster(*kinds: str) -> Roster:
    made = Roster()
    for kind in kinds:
        made.add(kind)
    return made


def spans(seen: list[frozenset[str]], kind: str) -> list[tuple[bool, int]]:
    """(at work?, rounds) one after the other."""
    return [(present, len(list(group))) for present, group in groupby(kind in kinds for kinds in seen)]


def test_who_pays_stays() -> None:
    """Kinds that bring more than they cost are never touched."""
    seen = play(roster("a", "b"), lambda *_: {"a": 0.5, "b": 0.001}, 300)
    assert set(seen) == {frozenset("ab")}


def test_who_costs_is_dropped_and_tried_later_and_later() -> None:
    """A kind that never pays is dropped after its tenure; trials are as short, rests get longer, up to a limit."""
    made = roster("good", "bad")
    seen = play(made, lambda *_: {"good": 0.5, "bad": -0.01}, 400)
    assert spans(seen, "good") == [(True, 400)]
    bad = spans(seen, "bad")
    assert [length for present, length in bad if present][:4] == [TENURE] * 4
    rests = [length for present, length in bad if not present][:4]
    assert rests == [FIRST_REST, 2 * FIRST_REST, LONGEST_REST, LONGEST_REST]
    assert made.dropped == 1
    assert made.readmitted == 0


def test_dear_trials_are_rarer() -> None:
    """Where trials cost more, the rest between them is as long as makes them cost TRIAL_SHARE of a token a round."""
    bad = spans(play(roster("bad"), lambda *_: {"bad": -0.1}, 400), "bad")
    rests = [length for present, length in bad if not present]
    assert rests[:3] == [FIRST_REST, *2 * [round(0.1 * TENURE / TRIAL_SHARE)]]


def test_a_speculator_without_cost_that_brings_nothing_is_dropped() -> None:
    """To stay, a kind must bring something: a score of 0 is not enough."""
    assert play(roster("mute"), lambda *_: {}, TENURE + 1)[-1] == frozenset()


def test_who_becomes_good_is_taken_back() -> None:
    """A kind that pays again is back within the longest rest and its tenure, and then stays."""
    made = roster("a")
    play(made, lambda *_: {"a": -0.2}, 200)
    seen = play(made, lambda *_: {"a": 0.4}, 200, first=200)
    assert spans(seen, "a")[-1][1] >= 200 - LONGEST_REST - TENURE
    assert made.readmitted == 1


def test_hysteresis() -> None:
    """A kind that just about pays is kept if it is there, and not taken back if it was dropped."""
    middling = 0.01
    there = roster("a")
    assert spans(play(there, lambda *_: {"a": middling}, 100), "a") == [(True, 100)]
    dropped = roster("a")
    play(dropped, lambda *_: {"a": -1.0}, TENURE + 1)
    trials = spans(play(dropped, lambda *_: {"a": middling}, 200), "a")
    assert max(length for present, length in trials if present) == TENURE
    assert dropped.readmitted == 0


def test_one_bad_round_is_forgiven() -> None:
    """The score is an average: a single loss among gains drops nobody."""
    seen = play(roster("a"), lambda number, _: {"a": -0.5 if number == 50 else 0.4}, 100)
    assert set(seen) == {frozenset("a")}


def test_a_good_speculator_that_turns_bad() -> None:
    """However good it was before, it is gone within 20 rounds."""
    made = roster("a")
    play(made, lambda *_: {"a": 2.0}, 300)
    seen = play(made, lambda *_: {"a": -0.3}, 20, first=300)
    assert seen[-1] == frozenset()


def test_of_two_that_say_the_same_one_stays() -> None:
    """Together neither brings anything alone; with one gone the other one does, and is kept."""

    def worth(number: int, kinds: frozenset[str]) -> dict[str, float]:
        return dict.fromkeys(kinds, -0.01 if len(kinds) == 2 else 0.8)

    made = roster("a", "b")
    seen = play(made, worth, 300)
    assert spans(seen, "b") == [(True, 300)]
    assert sum("a" in kinds for kinds in seen) < 100
    assert made.dropped == 1


def test_changes_come_one_at_a_time() -> None:
    """What one kind is worth depends on the others: after each change there is time to see."""
    seen = play(roster("a", "b", "c"), lambda *_: dict.fromkeys("abc", -0.1), 4 * TENURE)
    sizes = [len(kinds) for kinds in seen]
    assert sizes[:-1] != sizes[1:]
    assert all(before - after in (0, 1) for before, after in pairwise(sizes))
    assert [len(list(group)) for _, group in groupby(sizes)][:3] == [TENURE] * 3


def test_a_long_prefill_is_waited_for() -> None:
    """A kind is judged from its first word on; without one it is dropped in the end."""
    made = roster("slow")
    for _ in range(SILENCE - 1):
        made.round({})
    assert made.kinds == {"slow"}
    made.heard("slow")
    for _ in range(TENURE + 1):
        made.round({"slow": 0.3})
    assert made.kinds == {"slow"}
    silent = roster("silent")
    for _ in range(SILENCE):
        silent.round({})
    assert silent.kinds == frozenset()


def test_late_nodes_of_a_dropped_kind_change_nothing() -> None:
    """What was under way when it was dropped is no word of one that drafts."""
    made = roster("a")
    play(made, lambda *_: {"a": -1.0}, TENURE + 1)
    assert not made.active("a")
    made.heard("a")
    made.heard("unknown")
    assert not made.active("a")


def test_a_kind_that_leaves_is_forgotten() -> None:
    """Its pod is gone: it neither counts nor rests, and one that comes later begins anew."""
    made = roster("a", "b")
    play(made, lambda *_: {"a": -1.0, "b": 1.0}, TENURE + 1)
    assert made.kinds == {"b"}
    made.remove("a")
    made.remove("b")
    assert made.kinds == made.trials == frozenset()
    assert len(made) == 0
    assert made.active("a")
    made.add("a")
    assert made.kinds == {"a"}


@pytest.mark.parametrize("age", [CHALLENGE - 1, CHALLENGE])
def test_unknown_step_times_are_found_out(age: int) -> None:
    """Where nobody has seen for long how fast steps are without a kind, each rests once, for a few rounds."""
    seen_ages: dict[frozenset[str], int] = {}
    made = Roster(lambda kinds: seen_ages.get(kinds, age))
    made.add("a")
    made.add("b")
    seen = []
    for _ in range(100):
        for kind in made.kinds:
            made.heard(kind)
        seen.append(made.kinds)
        seen_ages[made.kinds] = 0
        made.round(dict.fromkeys(made.kinds, 0.5))
    for kind in "ab":
        rests = [length for present, length in spans(seen, kind) if not present]
        assert rests == ([CHALLENGED] if age == CHALLENGE else [])
    assert made.dropped == made.readmitted == 0
