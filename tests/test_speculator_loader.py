"""Drafter specs, the standin drafter, and the pod around it all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from graftree.config import SpeculatorConfig
from graftree.errors import ConfigError
from graftree.models.standin import next_token
from graftree.sampling import SamplingParams
from graftree.store.embedded import EmbeddedRedis
from graftree.v1 import common_pb2, speculation_pb2, speculation_pb2_grpc
from speculator_service.drafters import loader
from speculator_service.drafters.base import DraftSession, Leaf
from speculator_service.drafters.ngram import NgramDrafter
from speculator_service.drafters.standin import StandinDrafter
from speculator_service.pod import SpeculatorPod
from tests.drafters import Flat, Scripted


def load(spec: str) -> object:
    return loader.load(SpeculatorConfig(drafter=spec))


def test_specs_with_options() -> None:
    """Built-in names and a user's class take their options from behind the question mark."""
    assert isinstance(load("ngram"), NgramDrafter)
    drafter = load("ngram?max_n=5&recent=7")
    assert isinstance(drafter, NgramDrafter)
    assert (drafter._max_n, drafter._recent) == (5, 7)
    assert isinstance(load("standin?step_ms=0"), StandinDrafter)
    flat = load("tests.drafters:Flat?width=2")
    assert isinstance(flat, Flat)
    assert flat._width == 2
    assert isinstance(load('tests.drafters:Scripted?trees={"": {"7": {}}}'), Scripted)


@pytest.mark.parametrize(
    "spec",
    [
        "nonsense",
        "ngram?max_n=0",
        "ngram?unknown=1",
        "ngram?max_n=1&max_n=2",
        "ngram?max_n",
        "standin?hit_rate=2",
        "standin?sleep=1",
        "no.such.module:Class",
        "tests.drafters:Nobody",
        "tests.drafters:SURE",
        "tests.drafters:Flat?width=x",
        ":Class",
        "tests.drafters:",
    ],
)
def test_a_bad_spec_names_the_key(spec: str) -> None:
    """Whatever is wrong with a spec: ConfigError of the key `drafter`, with the spec in it."""
    with pytest.raises(ConfigError) as caught:
        load(spec)
    assert caught.value.key == "drafter"
    assert caught.value.value == spec


def test_a_module_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a user's module raises while it is imported is told with its cause."""
    (tmp_path / "drafter_that_fails.py").write_text("missing_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported: NameError: name 'missing_name'"):
        load("drafter_that_fails:Drafter")


def test_standin_is_right_as_often_as_told() -> None:
    """A share hit_rate of the guesses equals the stand-in model's next token; each step sleeps once."""
    for rate in (0.0, 0.7, 1.0):
        slept: list[float] = []
        drafter = StandinDrafter("2", str(rate), sleep=slept.append)
        drafter.open(DraftSession("a", 0, (5,), 1, SamplingParams(temperature=0.0), 1000, 10_000, 16, 4))
        leaves = [Leaf("a", 0, 0, (token,), position) for token in range(50) for position in range(20)]
        answers = drafter.expand(leaves)
        hits = sum(
            answer[0].token_id == next_token(leaf.path[-1], leaf.position, 1000)  # type: ignore[index]
            for leaf, answer in zip(leaves, answers, strict=True)
        )
        assert hits / len(leaves) == pytest.approx(rate, abs=0.05)
        assert slept == [0.002]


async def test_a_pod_serves_registers_and_drains() -> None:
    """From start to stop: registered with its drafter's figures, a tree over gRPC, gone from the registry."""
    with EmbeddedRedis() as redis:
        pod = SpeculatorPod(SpeculatorConfig(drafter="ngram", redis=redis.url, pod_id="s1", max_sessions=3))
        await pod.start()
        try:
            (record,) = await pod.registry.pods("speculator")
            assert (record.pod_id, record.kind, record.address) == ("s1", "ngram", pod.address)
            assert (record.max_sessions, record.model_fingerprint) == (3, "")
            async with grpc.aio.insecure_channel(pod.address) as channel:
                call = speculation_pb2_grpc.SpeculationServiceStub(channel).Speculate()
                opened = speculation_pb2.DraftOpen(
                    session_id="a",
                    token_ids=[1, 2, 1],
                    prompt_tokens=3,
                    sampling=common_pb2.SamplingParams(temperature=0.0),
                    vocab_size=10,
                    max_length=50,
                )
                hello = common_pb2.StreamHello(revision=1)
                await call.write(speculation_pb2.SpeculateRequest(hello=hello, opens=[opened], credits=10))
                tokens: list[int] = []
                complete = False
                while not complete:
                    message = await asyncio.wait_for(call.read(), 20)
                    for delta in message.deltas:
                        tokens += delta.token_ids
                        complete = delta.complete
                assert set(tokens) == {1, 2}
                assert message.load.sessions == 1
                call.cancel()
        finally:
            await pod.stop()
        again = SpeculatorPod(SpeculatorConfig(drafter="ngram", redis=redis.url))
        await again.start()
        assert [record.pod_id for record in await again.registry.pods("speculator")] == [again.config.pod_id]
        await again.kill()


async def test_a_pod_with_a_bad_drafter_does_not_start() -> None:
    """The start fails with the configuration error, and stop after it is harmless."""
    pod = SpeculatorPod(SpeculatorConfig(drafter="nonsense", redis="redis://127.0.0.1:1/0"))
    with pytest.raises(ConfigError, match="drafter"):
        await pod.start()
    await pod.stop()
