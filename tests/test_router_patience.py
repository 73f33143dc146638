"""`Patience`: waits for drafts only as long as what comes is worth more than the time."""

from __future__ import annotations

import pytest

from router.patience import GRID, Growth, Key, Patience, Wait

KINDS = frozenset({"a"})


def free(rows: int) -> float:
    return 0.0


def taught(*deltas: tuple[float, float], rounds: int = 5, seconds: float = 0.1, **options: float) -> Patience:
    """After rounds in which drafts brought the tree to these outlooks at these times."""
    patience = Patience(options.get("longest", 1.0), {})
    now = 0.0
    for _ in range(rounds):
        patience.committed(now, KINDS, 0.0, survived=False)
        for time, outlook in deltas:
            patience.heard(now + time, outlook)
        now += seconds
    patience.committed(now, KINDS, 0.0, survived=False)
    return patience


def wait(patience: Patience, rate: float, **options: float) -> Wait | None:
    return patience.wait(
        KINDS,
        0.0,
        survived=False,
        rate=rate,
        trust=options.get("trust", 1.0),
        rows=lambda rows: options.get("row", 0.0) * rows,
        penalty=options.get("penalty", 0.0),
    )


def test_without_evidence_nobody_waits() -> None:
    """A session that has seen no round, and has learnt from no other, sends its steps at once."""
    assert wait(Patience(1.0, {}), 1.0) is None


def test_growth_is_a_step_function_of_time() -> None:
    """Tokens gained by each time; nothing is said about times beyond the round's end."""
    growth = Growth()
    growth.observe([(0.003, 0.5), (0.01, 0.8)], 0.05)
    for time, tokens, count in zip(GRID, growth.tokens, growth.counts, strict=True):
        assert count == (time <= 0.05)
        assert tokens == (0.0 if time < 0.003 or time > 0.05 else 0.5 if time < 0.01 else 0.8)


def test_growth_averages_and_forgets() -> None:
    """A mean of the first rounds, later a fading one."""
    growth = Growth()
    for gained in (1.0, 0.0):
        growth.observe([(0.001, gained)], 1.0)
    assert growth.tokens[-1] == pytest.approx(0.5)
    for _ in range(40):
        growth.observe([(0.001, 2.0)], 1.0)
    assert growth.tokens[-1] == pytest.approx(2.0, abs=0.01)


def test_waits_while_a_token_costs_less_than_it_is_worth() -> None:
    """0.8 tokens after 4 ms: worth it while 4 ms would give fewer tokens otherwise."""
    patience = taught((0.0039, 0.8))
    slow, quick = wait(patience, 0.8 / 0.004 * 0.95), wait(patience, 0.8 / 0.004 * 1.05)
    assert slow is not None
    assert slow.seconds == pytest.approx(0.004)
    assert 0 < slow.tokens <= 0.8
    assert quick is None


def test_waits_for_as_long_as_more_comes_that_pays() -> None:
    """A second layer is waited for only where its own tokens are worth its own time."""
    patience = taught((0.0039, 0.8), (0.031, 1.2))
    patient, hasty = wait(patience, 10.0), wait(patience, 50.0)
    assert patient is not None
    assert hasty is not None
    assert patient.seconds == pytest.approx(0.032)
    assert hasty.seconds == pytest.approx(0.004)


def test_the_longest_wait_is_a_limit() -> None:
    """Whatever would come later is left alone."""
    assert wait(taught((0.02, 5.0), longest=0.01), 1.0) is None


def test_distrust_rows_and_penalties_count() -> None:
    """Tokens that the tree only promises, rows that cost time and steps that are missed make waits not worth it."""
    patience = taught((0.0039, 0.8))
    assert wait(patience, 100.0) is not None
    assert wait(patience, 100.0, trust=0.4) is None
    assert wait(patience, 100.0, row=0.003) is None
    assert wait(patience, 100.0, penalty=0.005) is None


def test_empty_trees_and_surviving_branches_are_told_apart() -> None:
    """Growth is measured from what the commit left."""
    patience = Patience(1.0, {})
    for now in range(4):
        patience.committed(now, KINDS, 1.5, survived=True)
        patience.heard(now + 0.001, 1.6)
    patience.committed(5, KINDS, 0.0, survived=False)
    assert wait(patience, 0.1) is None
    found = patience.wait(KINDS, 1.5, survived=True, rate=10.0, trust=1.0, rows=free)
    assert found is not None
    assert 1.5 < found.tokens < 1.6


def cycle(patience: Patience, first: float, *, keeps: bool, wait_first: bool, rounds: int = 20) -> float:
    """Rounds from an empty tree that leave a branch (or not, having waited), each followed by one that has it."""
    now = first
    for _ in range(rounds):
        patience.committed(now, KINDS, 0.0, survived=False, tokens=4 if keeps else 2)
        patience.heard(now + 0.009, 1.0)
        if wait_first:
            patience.waited()
        now += 0.06 + 0.01 * wait_first
        if keeps:
            patience.committed(now, KINDS, 3.0, survived=True, tokens=1)
            now += 0.06
    patience.committed(now, KINDS, 0.0, survived=False, tokens=4 if keeps else 2)
    return now


def test_what_drafting_ahead_brings_is_not_waited_for() -> None:
    """Where a round without a wait leaves a good branch behind, and one with a wait none, waiting is not worth it."""
    patience = Patience(1.0, {})
    now = cycle(patience, 0.0, keeps=False, wait_first=False)
    assert wait(patience, 30.0) is not None  # nothing is left either way
    patience = Patience(1.0, {})
    now = cycle(patience, 0.0, keeps=True, wait_first=False)
    assert wait(patience, 30.0) is not None  # nothing is known of waits yet: try
    for _ in range(3):  # one length of the wait after the other
        if wait(patience, 30.0) is not None:
            now = cycle(patience, now, keeps=False, wait_first=True)
    assert wait(patience, 30.0) is None


def test_rounds_without_waits_are_looked_at_again() -> None:
    """However well waiting goes, now and then a round does without, to see what it would leave."""
    patience = taught((0.0039, 0.8))
    assert wait(patience, 10.0) is not None
    for now in range(10, 10 + 60):
        patience.committed(now, KINDS, 0.0, survived=False)
        patience.heard(now + 0.0039, 0.8)
        patience.waited()
    assert wait(patience, 10.0) is None
    patience.committed(100, KINDS, 0.0, survived=False)
    patience.heard(100.0039, 0.8)
    patience.committed(101, KINDS, 0.0, survived=False)
    assert wait(patience, 10.0) is not None


def test_sessions_learn_from_one_another() -> None:
    """A new session begins with what others saw of the same speculators, and with nothing of others."""
    seeds: dict[Key, Growth] = {}
    first = Patience(1.0, seeds)
    for now in range(3):
        first.committed(now, KINDS, 0.0, survived=False)
        first.heard(now + 0.004, 0.9)
    first.committed(4, KINDS, 0.0, survived=False)
    second = Patience(1.0, seeds)
    assert wait(second, 10.0) is not None
    assert second.wait(frozenset({"b"}), 0.0, survived=False, rate=10.0, trust=1.0, rows=free) is None
    for now in range(10, 30):
        second.committed(now, KINDS, 0.0, survived=False)
    assert wait(second, 10.0) is None  # its own rounds brought nothing
