"""`Gathering`: the next forward waits for sessions that come back soon where that saves more than it costs."""

from __future__ import annotations

import pytest

from verifier_service.gathering import LEAST_NS, Gathering

MS = 1_000_000


def gathering(turn: int, *sessions: str, forward: int = 20 * MS) -> Gathering:
    """Sessions that were away `turn` ns each time, and are away since 0."""
    made = Gathering()
    made.ran(forward)
    for number in range(-40, 0):
        for session in sessions:
            made.answered(session, number * 1000 * MS)
            made.returned(session, number * 1000 * MS + turn)
    for session in sessions:
        made.answered(session, 0)
    return made


@pytest.mark.parametrize(("ready", "away", "waits"), [(1, 1, True), (1, 3, True), (4, 1, True), (7, 1, False)])
def test_who_is_ready_loses_less_than_who_is_late(ready: int, away: int, waits: bool) -> None:
    """A wait of 3 ms costs each that is ready 3 ms, and saves each that is late 17 of a forward of 20."""
    made = gathering(3 * MS, *(f"s{index}" for index in range(away)))
    assert made.wait(ready, 0) == (pytest.approx(3 * MS, rel=1e-6) if waits else 0)


def test_a_wait_ends_as_time_passes_and_as_they_come() -> None:
    """What is left of the wait shrinks; who came back is waited for no more."""
    made = gathering(3 * MS, "a", "b")
    assert made.wait(1, 2 * MS) == pytest.approx(MS, rel=1e-6)
    made.returned("a", 2 * MS)
    assert made.wait(2, 2 * MS) == pytest.approx(MS, rel=1e-6)
    made.returned("b", 3 * MS)
    assert made.wait(3, 3 * MS) == 0


def test_who_is_late_is_given_up() -> None:
    """The later a session is, the longer it is expected to stay away, until a forward without it is better."""
    made = gathering(3 * MS, "a")
    assert made.wait(1, 3 * MS + 10) == LEAST_NS
    assert made.wait(1, 11 * MS) > 0
    assert made.wait(1, 14 * MS) == 0
    assert made.wait(1, 10_000 * MS) == 0


def test_only_those_worth_waiting_for_are_waited_for() -> None:
    """Of one that is back soon and one that takes most of a forward, only the first counts."""
    made = gathering(2 * MS, "soon")
    slow = gathering(18 * MS, "slow")
    assert slow.wait(3, 0) == 0
    for number in range(-40, 1):
        made.answered("slow", number * 1000 * MS)
        if number < 0:
            made.returned("slow", number * 1000 * MS + 18 * MS)
    made.answered("soon", 0)
    assert made.wait(3, 0) == pytest.approx(2 * MS, rel=1e-6)


def test_no_wait_is_longer_than_a_forward() -> None:
    """Sessions that are due one behind the other, and never come, together delay a forward by one at most."""
    made = Gathering()
    made.ran(20 * MS)
    for index in range(64):
        made.answered("x", 0)
        made.returned("x", (index + 1) * 9 * MS)
        made._turns[f"s{index}"] = (index + 1) * 9.0 * MS
        made.answered(f"s{index}", 0)
    now = 0
    while wait := made.wait(1, now):
        now += wait
    assert 9 * MS <= now <= 21 * MS
    made.began()
    assert made.wait(1, 0) > 0


def test_a_forward_out_of_the_ordinary_is_not_believed() -> None:
    """A machine that stood still for a minute does not make sessions wait for seconds, neither first nor later."""
    for history in ([20, 20, 60_000, 20], [60_000, 20, 20]):
        made = gathering(3 * MS, "a", forward=history[0] * MS)
        for milliseconds in history[1:]:
            made.ran(milliseconds * MS)
        now = 0
        while wait := made.wait(1, now):
            now += wait
        assert now <= 40 * MS


def test_nobody_is_waited_for_without_cause() -> None:
    """Not where nobody could run, nobody is away, no forward was seen, or whoever was away has gone."""
    made = gathering(3 * MS, "a")
    assert made.wait(0, 0) == 0
    made.gone("a")
    assert made.wait(1, 0) == 0
    new = Gathering()
    new.answered("a", 0)
    assert new.wait(1, 0) == 0


def test_a_session_that_is_gone_leaves_nothing_behind() -> None:
    """Sessions come and go for weeks: what was learnt of one goes with it."""
    made = gathering(3 * MS, *(f"s{index}" for index in range(50)))
    for index in range(50):
        made.gone(f"s{index}")
    assert not made._away
    assert not made._turns
