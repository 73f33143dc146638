"""bench.overload and bench.elastic in small: what they count is there and right, whatever the machine."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.autoscale import CAPACITY
from bench.elastic import VOCAB, Lab, Streams, judge, spoken
from bench.overload import Level, idle_server, refused_within
from bench.overload_load import Answer, Demand, burst, offer, probe
from bench.report import Report
from bench.vitals import descriptors, resident
from graftree.local_stack import LocalStack
from graftree.models.standin import next_token

DEMAND = Demand(tokens=8, deadline=1.5, step_ms=20.0, row_ms=20.0)


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """A stand-in of 20 ms a row, in this process."""
    with LocalStack(
        DEMAND.model,
        [],
        in_process=True,
        threads=1,
        router_options={"max_requests": 16, "tree_depth": 6, "replay_seconds": 2.0},
        speculator_options=CAPACITY | {"drain_seconds": 0.2},
    ) as running:
        yield running


def metrics(stack: LocalStack) -> Any:
    router: Any = stack.pods("router")[0]
    return router.instance.metrics


def test_the_capacity_of_a_stand_in() -> None:
    """As many sessions as still make the deadline together, over the deadline; here five, of 100 ms a step."""
    assert Demand(tokens=9, deadline=1.0, step_ms=20.0, row_ms=20.0).capacity == pytest.approx(5.0)


def test_goodput_counts_what_is_complete_in_time() -> None:
    """Answers that ended within the stretch, no others, and nothing of those that failed."""
    level = Level(1.0, began=10.0, until=20.0)
    level.answers = [Answer(12.0, 1.0, 30), Answer(9.0, 1.0, 30), Answer(15.0, 3.0, error="DeadlineExceeded")]
    level.answers.append(Answer(15.0, 0.01, error="ResourceExhausted", retry_after=0.5))
    assert level.goodput == pytest.approx(3.0)
    assert [answer.retry_after for answer in level.refusals] == [0.5]
    assert level.errors == {"DeadlineExceeded": 1, "ResourceExhausted": 1}


def test_ten_times_the_capacity(stack: LocalStack) -> None:
    """Whoever is let in is answered or late, the others are refused with a time to come again; in a burst likewise.
    Nobody is told CANCELLED."""
    level = Level(10 * DEMAND.capacity, 0.0, time.monotonic() + 2 + DEMAND.deadline)
    level.answers = asyncio.run(offer([stack.target], DEMAND, level.rate, level.until, Random(0)))
    assert {answer.tokens for answer in level.answers if not answer.error} <= {DEMAND.tokens}
    assert set(level.errors) <= {"ResourceExhausted", "DeadlineExceeded"}
    assert len(level.refusals) > len(level.answers) / 2
    answers = asyncio.run(burst([stack.target], 200, Random(1)))
    assert {answer.error for answer in answers} == {"", "ResourceExhausted"}
    refused = [answer for answer in (*level.refusals, *answers) if answer.error]
    assert min(answer.retry_after for answer in refused) > 0
    assert metrics(stack).refused > 0


async def test_the_probe(stack: LocalStack) -> None:
    """While others run it is refused with a time to come again; its other calls are answered by the router and by a
    server that does nothing else."""
    until = time.monotonic() + 2.5
    with idle_server() as idle:
        load = asyncio.create_task(offer([stack.target], DEMAND, 5 * DEMAND.capacity, until, Random(3)))
        await asyncio.sleep(1.0)
        seen = await probe(stack.target, idle, DEMAND, until, Random(4))
        await load
    assert min(len(seen.seconds[name]) for name in ("empty", "idle")) > 0
    assert len(seen.seconds["refused"]) + seen.let_in > 0
    assert seen.bare == 0


def test_the_routers_own_time_is_read_from_its_audit_log(tmp_path: Path) -> None:
    """Of refusals, of no others; without a log there is none."""
    lines = [{"code": "RESOURCE_EXHAUSTED", "seconds": 0.25}, {"code": "OK", "seconds": 9.0}]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    assert refused_within(tmp_path / "log") == [0.25]
    assert refused_within(tmp_path / "none") == []


async def test_pods_that_come_and_go(stack: LocalStack) -> None:
    """None, two, none: each is used, every answer is the formula's, and the figures say so."""
    streams = Streams(stack.target, 2, 24)
    running = asyncio.create_task(streams.run())
    stages = await Lab(stack, "standin?step_ms=5&hit_rate=0.8", 0.3).course(2)
    streams.over = True
    await running
    assert [stage.name for stage in stages] == ["0", "+1", "+2", "-1", "-0"]
    assert all(0 < stage.used < 10 for stage in stages[1:3])
    assert streams.answers >= 2
    assert (streams.changed, streams.errors) == (0, [])
    report = Report("elastic")
    judge(report, stages, streams)
    named = {figure.name: figure.value for figure in report.figures}
    assert named["answers that differ"] == named["requests failed"] == 0


def test_the_formula_is_the_stand_ins() -> None:
    """Another token is seen as one."""
    said = spoken([5, 7], 3)
    assert said[0] == next_token(7, 2, VOCAB)
    assert said[2] == next_token(said[1], 4, VOCAB)


def test_what_this_process_holds() -> None:
    """Memory and descriptors by the system's word; none of a process that is not there."""
    before = descriptors(os.getpid())
    with open(os.devnull, "rb"):
        assert descriptors(os.getpid()) == before + 1
    assert resident(os.getpid()) > 10
    assert resident(2**22 + 1) == descriptors(2**22 + 1) == 0
