"""Step times: measured at start-up, followed as steps run, told to routers when they change."""

from __future__ import annotations

from typing import Any

import pytest

from graftree import config as configuration
from graftree.config import VerifierConfig
from graftree.models.load import load
from graftree.models.runner import TreeRunner
from graftree.step_time import Sample, StepTime
from graftree.v1.common_pb2 import StreamHello
from router.links import VerifierLink
from tests.test_verifier_service import STANDIN, connection, opening, pod, stepping
from tests.verifier_harness import LLAMA, Router, greedy, make_engine
from verifier_service import model
from verifier_service.step_times import StepTimes, measure


def build_runner(**values: Any) -> TreeRunner:
    return TreeRunner(load(LLAMA), **{"kv_tokens": 4096, "block_size": 16} | values)


def test_measuring_gives_a_model_and_all_blocks_back() -> None:
    """A measured model is positive and never falls; what fits a small pool and context is measured, no more."""
    for kv_tokens, step_tokens in ((4096, 512), (128, 16)):
        runner = build_runner(kv_tokens=kv_tokens)
        measured = measure(runner, seconds=20, step_tokens=step_tokens)
        assert measured is not None
        assert measured.rows[0] == 1
        assert max(measured.rows) <= step_tokens
        assert runner.pool.free_blocks == runner.pool.num_blocks
        runner.pool.check()


def test_measuring_ends_in_time() -> None:
    """No step is begun behind the limit; without any time nothing is known."""
    times = iter(float(second) for second in range(10_000))
    runner = build_runner()
    measured = measure(runner, seconds=6.5, step_tokens=512, clock=lambda: next(times))
    assert measured is not None
    assert runner.rows_computed == 1 + 16 + 64, "each step reads the clock twice, and one reading came before"
    assert measured.seconds(4) == pytest.approx(1, rel=1e-3)
    assert measure(runner, seconds=0.0, step_tokens=512) is None


def test_measuring_disturbs_no_answer() -> None:
    """What a session says afterwards is plain decoding's, from blocks that the measurement has used."""
    engine = make_engine()
    assert measure(engine._runner, seconds=5, step_tokens=512) is not None  # type: ignore[arg-type]
    assert Router(engine).open("a", [5, 6, 7]).generate(12) == greedy([5, 6, 7], 12)


def truth(rows: int, sequences: int, context: int) -> float:
    return 0.02 + 0.001 * max(0, rows - 8) + 0.001 * (sequences - 1) + 1e-6 * context


def test_a_machine_that_slows_down_is_told_once() -> None:
    """Half as fast again: after some steps one new model, right at all sizes; small changes are not told."""
    base = StepTime.fit([Sample(n, 1, c, truth(n, 1, c)) for n in (1, 2, 4, 8, 16, 32, 64) for c in (0, 500)])
    times = StepTimes(base)
    told = []
    for turn in range(200):
        rows, factor = (1, 17)[turn % 2], (1.05, 0.97)[turn % 2]
        times.observe(Sample(rows, 1, 100, truth(rows, 1, 100) * factor))
    assert times.latest is base
    for turn in range(200):
        rows = (1, 17)[turn % 2]
        times.observe(Sample(rows, 1, 100, truth(rows, 1, 100) * 1.5))
        if not told or told[-1] is not times.latest:
            told.append(times.latest)
    assert 1 < len(told) < 8
    assert times.latest is not None
    for rows in (1, 4, 17, 50):
        assert times.latest.seconds(rows, 1, 100) == pytest.approx(1.5 * truth(rows, 1, 100), rel=0.15)


def test_without_a_measurement_steps_teach_the_curve() -> None:
    """From nothing, and from steps of one size first: in the end each size's own time is told."""
    times = StepTimes(None)
    assert times.latest is None
    for rows in (1,) * 50 + (1, 8, 32, 16) * 100:
        times.observe(Sample(rows, 1, 0, truth(rows, 1, 0)))
    assert times.latest is not None
    for rows in (1, 8, 16, 32):
        assert times.latest.seconds(rows) == pytest.approx(truth(rows, 1, 0), rel=0.12)


def test_one_slow_step_is_not_the_machine() -> None:
    """A step that the machine was taken away from, a thousand times longer, hardly moves the estimate."""
    times = StepTimes(StepTime.flat(0.01))
    for _ in range(20):
        times.observe(Sample(8, 1, 0, 0.01))
    times.observe(Sample(8, 1, 0, 10.0))
    for _ in range(10):
        times.observe(Sample(8, 1, 0, 0.01))
    assert times.latest is not None
    assert times.latest.seconds(8) == pytest.approx(0.01, rel=0.3)


def test_step_time_seconds_zero_measures_nothing() -> None:
    """0 means what its help says; above 0 a runner's steps are measured."""
    values = {"model": LLAMA, "device": "cpu", "kv_tokens": 512}
    for seconds, known in ((0, False), (2, True)):
        config = configuration.build(VerifierConfig, values | {"step_time_seconds": seconds})
        assert (model.step_time(build_runner(), config) is not None) == known


async def test_the_stand_in_publishes_what_it_was_told() -> None:
    """The first message carries the configured curve, and the router's link reads it."""
    async with pod(model=f"{STANDIN}&step_ms=20&row_ms=0.5&free_rows=4".replace("step_ms=0&", "")) as instance:
        link = VerifierLink(instance.record(), StreamHello(revision=1, pod_id="router"), 5.0, metrics=None)  # type: ignore[arg-type]
        assert link.step_time is None
        await link.connect()
        assert link.step_time is not None
        seconds = [link.step_time.seconds(rows) for rows in (1, 4, 5, 24)]
        assert seconds == pytest.approx([0.02, 0.02, 0.0205, 0.03])
        await link.close()


async def test_a_change_is_told_on_open_streams() -> None:
    """Where nothing was measured the first step's time is the first word, on the stream that is open."""
    async with pod(step_time_seconds=0) as instance, connection(instance) as link:
        assert not link.messages[0].HasField("step_time")
        await link.send(opens=[opening("a", [1, 2, 3])], steps=[stepping("a", 1, [1, 2, 3])])
        await link.until(lambda: any(message.HasField("step_time") for message in link.messages))
        told = next(message.step_time for message in link.messages if message.HasField("step_time"))
        assert StepTime.from_proto(told).seconds(3) > 0
