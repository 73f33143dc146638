"""The arithmetic of bench.loop and bench.draft_ahead on answers made up for it, and both on a stack of stand-ins."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from bench import draft_ahead, loop, report
from bench.draft_ahead import Case
from bench.recording import Prompt
from graftree import LocalStack
from graftree.sdk.results import FinishReason, Result, SpeculationStats, Timings, Usage

MS = 1_000_000
STATS = SpeculationStats(
    num_spec_steps=5,
    num_draft_tokens=12,
    num_accepted_tokens=4,
    mean_acceptance_length=9 / 5,
    draft_acceptance_rate=1 / 3,
    acceptance_histogram=(3, 0, 2),
    num_stale_nodes=0,
    num_speculators=1,
    draft_histogram=(2, 0, 0, 0, 3),
    num_branch_hits=3,
)
TIMINGS = Timings(
    ttft_ns=50 * MS,
    decode_ns=40 * MS,
    total_ns=90 * MS,
    verify_queue_ns=4 * MS,
    verify_forward_ns=74 * MS,
    verify_sample_ns=2 * MS,
    verify_total_ns=82 * MS,
    commit_ns=8 * MS,
    draft_wait_ns=4 * MS,
)
FAST = Result(
    text="",
    token_ids=tuple(range(9)),
    finish_reason=FinishReason.LENGTH,
    usage=Usage(20, 9),
    speculation=STATS,
    timings=TIMINGS,
    log_probs=(),
    request_id="",
    model="",
    seed=0,
)
PLAIN = replace(
    FAST,
    speculation=replace(STATS, num_spec_steps=9, num_draft_tokens=0, draft_histogram=(9,), num_branch_hits=0),
    timings=replace(TIMINGS, decode_ns=80 * MS, total_ns=130 * MS, draft_wait_ns=0),
)


def test_rates_ratios_and_rounds() -> None:
    """Eight tokens behind the first, in four rounds of decoding."""
    row = dict(zip(loop.COLUMNS, loop.rates([loop.Pair("a", FAST, PLAIN, {})]), strict=True))
    assert row == {
        "plain/s": pytest.approx(100),
        "spec/s": pytest.approx(200),
        "ratio": pytest.approx(2),
        "median": pytest.approx(2),
        "whole": pytest.approx(130 / 90),
        "tau": pytest.approx(9 / 5),
        "nodes": pytest.approx(12 / 5),
        "hits": pytest.approx(3 / 5),
    }
    parts = dict(zip(loop.PARTS, loop.parts([FAST]), strict=True))
    assert parts["round"] == pytest.approx(10)
    assert parts["forward"] == pytest.approx(6)
    assert parts["wait"] == pytest.approx(1)
    assert sum(parts[name] for name in ("forward", "sample", "queue", "verifier", "wait", "rest")) == pytest.approx(
        10
    )
    shares = dict(zip(loop.BUCKETS, loop.histogram([FAST]), strict=True))
    assert (shares[0], shares[4]) == (0.25, 0.75)


def test_the_summary_names_what_is_missed() -> None:
    """A category that loses, a mean that falls short, and answers that differ."""
    slow = replace(FAST, timings=replace(TIMINGS, decode_ns=160 * MS), token_ids=(1,) * 9)
    out = loop.summary(
        [loop.Pair("good", FAST, PLAIN, {"router": 0.9}), loop.Pair("bad", slow, PLAIN, {"router": 0.0})]
    )
    figures = {figure.name: figure for figure in out.figures}
    assert figures["good: with speculation over plain"].met is True
    assert figures["bad: with speculation over plain"].met is False
    assert figures["mean of the categories"].value == pytest.approx(1.25)
    assert figures["mean of the categories"].met is False
    assert figures["same tokens both ways"].value == 1
    assert figures["CPU of the router tier"].value == pytest.approx(50)


def test_the_loop_runs_on_a_stack() -> None:
    """Each prompt twice, the same tokens both ways, drafts only where they were wanted."""
    options = argparse.Namespace(max_new_tokens=8, temperature=0.0)
    prompts = [Prompt(1, "a", (1, 2, 3)), Prompt(2, "b", (4, 5))]
    model = "standin:?step_ms=1&vocab=300&context=4096"
    with LocalStack(model, ["standin?step_ms=0&hit_rate=1"], in_process=True) as stack:
        pairs = loop.run(stack, prompts, options)
    assert [pair.category for pair in pairs] == ["a", "b"]
    for pair in pairs:
        assert pair.fast.token_ids == pair.plain.token_ids
        assert pair.plain.speculation.num_draft_tokens == 0
        assert sum(pair.fast.speculation.draft_histogram) == pair.fast.speculation.num_spec_steps


def case(hit_rate: float, round_ms: float) -> Case:
    return Case(20.0, 5.0, hit_rate, (round_ms,) * 3, STATS)


def test_overlapped_and_sequential_rounds() -> None:
    """A round drafts its own tokens meanwhile; one after the other the levels of its tree come first."""
    every = case(1.0, 21.0)
    assert every.overlapped_ms == 20.0
    assert every.sequential_ms == pytest.approx(20 + 12 / 5 * 5)
    row = dict(zip(draft_ahead.COLUMNS, draft_ahead.row(every), strict=True))
    assert row["ms/token"] == pytest.approx(21 / (9 / 5))
    out = report.Report("test")
    draft_ahead.figures(out, every)
    draft_ahead.figures(out, case(1.0, 40.0))
    draft_ahead.figures(out, case(0.5, 40.0))
    assert [figure.met for figure in out.figures] == [False, True, True, False, False, False, None]
