"""`Pace` and `Rounds`: what a round takes, from the verifier's word and from what was seen."""

from __future__ import annotations

import pytest

from graftree.step_time import StepTime
from graftree.v1.verification_pb2 import Verdict
from router.pace import (
    AT_ONCE,
    ENOUGH,
    FIRST_GUESS,
    MOST_ROWS,
    MOST_SEQUENCES,
    RARELY,
    Others,
    Pace,
    Rounds,
    Sent,
)

STEPS = StepTime((1, 16, 64), (0.06, 0.06, 0.24), per_sequence=0.001, per_context_token=1e-6)
NONE: frozenset[str] = frozenset()
SSM = frozenset({"ssm"})


def verdict(seconds: float, *, sessions: int = 1) -> Verdict:
    message = Verdict(token_ids=[1], batch_sessions=sessions)
    message.timings.forward_ns = round(seconds * 1e9)
    return message


def play(
    rounds: Rounds,
    count: int,
    *,
    step: float = 0.06,
    overhead: float = 0.002,
    waited: float = 0.0,
    sessions: int = 1,
    roster: frozenset[str] = NONE,
    rows: int = 1,
    step_time: StepTime | None = STEPS,
    start: float = 0.0,
) -> float:
    """That many rounds on end; the time of the last one's end."""
    now = start
    for _ in range(count):
        rounds.sent(Sent(now, roster, rows, 1.5, 100, waited))
        rounds.answered(verdict(step, sessions=sessions), step_time, 2)
        now += step + overhead + waited
    return now


def test_overhead_is_what_step_and_wait_leave() -> None:
    """Round less step less wait, of the session; a new session begins with the verifier's average."""
    pace = Pace()
    rounds = Rounds(pace, "a")
    play(rounds, 20, overhead=0.004, waited=0.01)
    assert rounds.overhead.value == pytest.approx(0.004)
    assert rounds.rate == pytest.approx(2 / 0.074)
    assert Rounds(pace, "b").overhead.value == pytest.approx(0.004)


def test_the_first_step_has_the_prompt_in_it() -> None:
    """Its time says nothing about the others."""
    rounds = Rounds(Pace(), "a")
    play(rounds, 1, step=5.0)
    play(rounds, 10, start=5.0)
    assert rounds.overhead.value == pytest.approx(0.002, abs=1e-6)


def test_tables_follow_the_verifiers_word() -> None:
    """Seconds by rows at a load, kept while the word and the load stay as they are."""
    pace = Pace()
    table = pace.table(STEPS, 3, 1000)
    table.reach(20)
    context = 960  # to within an eighth
    assert table.seconds[16] == pytest.approx(STEPS.seconds(16, 3, context))
    assert pace.table(STEPS, 3, 1010) is table
    assert pace.table(STEPS, 4, 1000) is not table
    other = StepTime.flat(0.1)
    assert pace.table(other, 3, 1000).seconds[0] == pytest.approx(0.1)


def test_a_verifier_that_has_said_nothing() -> None:
    """A guess first, then what its steps took, whatever was in them."""
    pace = Pace()
    assert pace.table(None, 1, 10).seconds[0] == pytest.approx(FIRST_GUESS)
    play(Rounds(pace, "a"), 30, step=0.2, step_time=None)
    table = pace.table(None, 1, 10)
    table.reach(64)
    assert table.seconds[1] == table.seconds[64] == pytest.approx(0.2, rel=0.1)


def test_stretch_by_speculators_at_work() -> None:
    """Step times while a kind drafts against those without: known once enough were seen, and what it adds."""
    pace = Pace()
    rounds = Rounds(pace, "a")
    now = play(rounds, ENOUGH, roster=SSM, step=0.09)
    assert pace.stretch(SSM) is None  # the first step does not count
    now = play(rounds, 10, roster=SSM, step=0.09, start=now)
    assert pace.stretch(SSM) == pytest.approx(0.09 / STEPS.seconds(1, 1, 96), rel=1e-3)
    assert rounds.unseen(NONE) == AT_ONCE  # steps take longer than the verifier said
    assert rounds.contention(SSM, "ssm") == 0.0
    play(rounds, 10, step=0.06, start=now)
    assert rounds.contention(SSM, "ssm") == pytest.approx(0.5, abs=0.01)
    assert rounds.unseen(NONE) == 0
    assert rounds.unseen(SSM) == 10 // RARELY  # nothing costs the verifier anything now
    costs = rounds.costs(STEPS, 100, SSM)
    assert costs.alone
    assert costs.step(0) == pytest.approx(0.09, rel=1e-2)


def test_another_word_keeps_the_seconds() -> None:
    """When the verifier corrects its model, what was seen relative to the old one is seen relative to the new one."""
    pace = Pace()
    play(Rounds(pace, "a"), 20, roster=SSM, step=0.09)
    before = pace.stretch(SSM)
    assert before is not None
    twice = StepTime(STEPS.rows, tuple(2 * seconds for seconds in STEPS.curve))
    pace.table(twice, 1, 100)
    assert pace.stretch(SSM) == pytest.approx(before / 2)


def test_with_others_step_times_say_nothing_about_speculators() -> None:
    """Steps that sessions share are not held against anybody's speculators, and nobody is asked to try."""
    pace = Pace()
    rounds = Rounds(pace, "a")
    play(rounds, 20, roster=SSM, step=0.09, sessions=4)
    assert pace.stretch(SSM) is None
    assert rounds.unseen(NONE) == 0
    costs = rounds.costs(STEPS, 100, SSM)
    assert not costs.alone
    assert costs.stretch == 1.0


def test_what_others_bring() -> None:
    """Rows, tokens and context of the sessions that share the step: those known here stand for those that are not."""
    pace = Pace()
    pace.brings("a", Others(9, 3.0, 100))
    pace.brings("b", Others(5, 2.0, 300))
    pace.brings("me", Others(1, 1.0, 50))
    assert pace.others("me", 3.0, Others(1, 1.0, 50)) == Others(14, 5.0, 400)
    assert pace.others("me", 5.0, Others(1, 1.0, 50)) == Others(28, 10.0, 800)
    assert pace.others("me", 1.0, Others(1, 1.0, 50)) == Others(0, 0.0, 0)
    pace.brings("a", Others(1, 1.0, 100))
    pace.leave("b")
    pace.leave("b")
    assert pace.others("me", 2.0, Others(1, 1.0, 50)) == Others(1, 1.0, 100)
    pace.leave("a")
    assert pace.others("me", 3.0, Others(4, 2.0, 50)) == Others(8, 4.0, 100)


def test_a_session_shares_its_step() -> None:
    """Costs of the next step count the others' rows, tokens and context; `close` takes a session out again."""
    pace = Pace()
    other, mine = Rounds(pace, "other"), Rounds(pace, "mine")
    other.sent(Sent(0.0, NONE, 9, 3.0, 200, 0.0))
    play(mine, 20, sessions=2)
    costs = mine.costs(STEPS, 100, NONE)
    assert (costs.rows, costs.tokens) == (10, 4.0)
    assert costs.step(6) == pytest.approx(STEPS.seconds(16, 2, 288))
    other.close()
    assert mine.costs(STEPS, 100, NONE).rows == 2  # nobody known: as itself


def test_what_others_bring_is_bounded() -> None:
    """However many sessions a verifier says it has, tables stay small; tokens shrink with the rows."""
    pace = Pace()
    found = pace.others("me", 2.0**31, Others(16, 2.0, 100))
    assert found.rows == MOST_ROWS
    assert found.tokens == pytest.approx(MOST_ROWS / 8)
    rounds = Rounds(pace, "a")
    play(rounds, 5, sessions=1 << 31)
    assert rounds.sequences.value <= MOST_SEQUENCES
    costs = rounds.costs(STEPS, 100, NONE)
    costs.step(16)
    assert len(costs.table.seconds) < 2 * MOST_ROWS


def test_loads_that_hardly_differ_share_a_table() -> None:
    """Sequences and context count to within an eighth: a table is not made anew for each."""
    pace = Pace()
    tables = {id(pace.table(STEPS, sequences, 10_000 + sequences)) for sequences in range(224, 256)}
    assert len(tables) <= 3
    assert pace.table(STEPS, 3, 0) is not pace.table(STEPS, 4, 0)
