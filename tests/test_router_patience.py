"""`Patience`: a step without a tree waits for first drafts only where they are worth more than the time."""

from __future__ import annotations

import pytest

from router.patience import ENOUGH, SLACK, Patience, Race, Wait

KINDS = frozenset({"a"})


def rounds(patience: Patience, count: int, *words: tuple[str, float, float], first: float = 0.0) -> float:
    """Rounds of 100 ms from an empty tree.

    Args:
        words: kind, seconds after the commit, outlook of the tree by then.

    Returns:
        When the last one ended.
    """
    kinds = {kind for kind, *_ in words} or KINDS
    now = first
    for _ in range(count):
        patience.committed(now, kinds, empty=True)
        for kind, seconds, outlook in words:
            patience.heard(kind, now + seconds, outlook)
        now += 0.1
    patience.committed(now, kinds, empty=False)
    return now


def taught(*words: tuple[str, float, float], longest: float = 1.0) -> Patience:
    """After rounds that went this way, and a first word of each kind, which does not count."""
    patience = Patience(longest, {})
    for kind, *_ in words:
        patience.heard(kind, -1.0, 9.0)
    rounds(patience, 5, *words)
    return patience


def wait(
    patience: Patience, rate: float, *, kinds: frozenset[str] = KINDS, trust: float = 1.0, row: float = 0.0
) -> Wait | None:
    return patience.wait(kinds, rate=rate, trust=trust, row=row)


def test_without_evidence_nobody_waits() -> None:
    """A session that has seen no round, and has learnt from no other, sends its steps at once."""
    assert wait(Patience(1.0, {}), 1.0) is None


def test_waits_while_a_token_costs_less_than_it_is_worth() -> None:
    """0.8 tokens after 4 ms: worth it while 4 ms would give fewer tokens otherwise."""
    patience = taught(("a", 0.004, 0.8))
    slow, quick = wait(patience, 0.8 / 0.004 * 0.95), wait(patience, 0.8 / 0.004 * 1.05)
    assert slow == (pytest.approx(0.004 * SLACK), pytest.approx(0.8 * ENOUGH))
    assert quick is None


def test_distrust_and_rows_count() -> None:
    """Tokens that drafts only promise, and a row that takes time, make a wait not worth it."""
    patience = taught(("a", 0.004, 0.8))
    assert wait(patience, 100.0) is not None
    assert wait(patience, 100.0, trust=0.4) is None
    assert wait(patience, 100.0, row=0.005) is None


def test_the_longest_wait_is_a_limit() -> None:
    """Who usually comes later than the longest wait is not waited for at all."""
    assert wait(taught(("a", 0.02, 5.0), longest=0.01), 1.0) is None
    found = wait(taught(("a", 0.009, 5.0), longest=0.01), 1.0)
    assert found is not None
    assert found.seconds == 0.01


def test_a_later_kind_is_waited_for_where_its_own_word_pays() -> None:
    """The quick kind says little; the slow one is worth its time at a low rate of tokens, not at a high one."""
    both = frozenset({"quick", "slow"})
    patience = taught(("quick", 0.002, 0.1), ("slow", 0.010, 0.9))
    patient, hasty = wait(patience, 20.0, kinds=both), wait(patience, 100.0, kinds=both)
    assert patient == (pytest.approx(0.010 * SLACK), pytest.approx(0.9 * ENOUGH))
    assert hasty is None
    assert wait(patience, 20.0, kinds=frozenset({"quick"})) == (pytest.approx(0.002 * SLACK), pytest.approx(0.05))


def test_who_has_not_read_the_prompt_yet_teaches_nothing() -> None:
    """The first word of a session comes behind the prompt's prefill: it says nothing about later ones."""
    patience = Patience(1.0, {})
    patience.committed(0.0, KINDS, empty=True)
    patience.heard("a", 0.5, 0.9)
    assert wait(patience, 0.1) is None
    rounds(patience, 1, ("a", 0.004, 0.9), first=1.0)
    found = wait(patience, 10.0)
    assert found is not None
    assert found.seconds == pytest.approx(0.004 * SLACK)


def test_silence_is_evidence() -> None:
    """Rounds in which nothing came before the next commit count as nothing gained, as late as the commit."""
    patience = taught(("a", 0.004, 0.8))
    assert wait(patience, 20.0) is not None
    rounds(patience, 30, first=10.0)
    assert wait(patience, 20.0) is None


def test_rounds_with_a_tree_are_no_races() -> None:
    """Nodes that join a tree that outlived the commit say nothing about empty ones."""
    patience = taught(("a", 0.004, 0.8))
    before = wait(patience, 20.0)
    patience.committed(5.0, KINDS, empty=False)
    patience.heard("a", 5.5, 0.01)
    patience.committed(6.0, KINDS, empty=False)
    assert wait(patience, 20.0) == before


def test_sessions_learn_from_one_another() -> None:
    """A new session begins with what others saw of the same kind, and its own rounds soon count for more."""
    seeds: dict[str, Race] = {}
    first = Patience(1.0, seeds)
    first.heard("a", -1.0, 1.0)
    rounds(first, 8, ("a", 0.004, 0.9))
    second = Patience(1.0, seeds)
    assert wait(second, 20.0) is not None
    assert wait(second, 20.0, kinds=frozenset({"b"})) is None
    second.heard("a", 0.0, 1.0)
    rounds(second, 30, first=10.0)
    assert wait(second, 20.0) is None
    assert wait(Patience(1.0, seeds), 20.0) is None, "and it has taught the others"
