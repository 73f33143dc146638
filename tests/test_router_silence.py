"""Pods that say nothing: who did not answer in time gets no new sessions, who answers no ping is lost."""

from __future__ import annotations

from random import Random

import pytest

from bench.chaos_proxy import WAYS, FaultProxy
from graftree.errors import LeaseLost, Unavailable
from graftree.rpc.options import CHANNEL_OPTIONS, SHORTEST_SILENCE_SECONDS, channel_options
from graftree.sdk.answer import Answer
from graftree.sdk.journey import Journey
from graftree.sdk.reconnect import Reconnect
from graftree.v1 import generation_pb2 as pb
from graftree.v1.common_pb2 import PodLoad
from tests.fakes import FakeVerifier, plain
from tests.router_harness import PROMPT, harness, until


async def test_a_verifier_that_did_not_answer_in_time() -> None:
    """Its session moves, and new ones go elsewhere although it has none left, until it says something."""
    silent, other = FakeVerifier("verifier-0"), FakeVerifier("verifier-1")
    silent.holding = True
    async with harness(silent, other, step_timeout_seconds=0.4) as stack:
        for _ in range(2):
            result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=5)
            assert list(result.token_ids) == plain(PROMPT, 5)
        assert len(silent.steps) == 1
        link = next(each for each in stack.router.pods.verifiers() if each.record.pod_id == "verifier-0")
        assert link.silent
        silent.push(PodLoad(max_sessions=4))
        await until(lambda: not link.silent)
        assert stack.router.pods.verifier() is link


async def test_a_verifier_that_is_cut_off() -> None:
    """No byte comes from it, and nobody ends the connection: its sessions go on elsewhere long before a step is given
    up, and it is linked again when the way is open."""
    far, near = FakeVerifier("verifier-0"), FakeVerifier("verifier-1")
    with FaultProxy() as proxy:
        await far.start()
        far.address = proxy.route("way", far.address)
        async with harness(far, near, lease_seconds=0.5, step_timeout_seconds=60) as stack:
            stream = stack.client.stream(token_ids=PROMPT, max_new_tokens=240)
            tokens = list((await anext(stream)).token_ids)
            assert far.steps
            assert not near.steps
            proxy.cut("way", WAYS, oldest=False)
            tokens += [token async for chunk in stream for token in chunk.token_ids]
            assert tokens == plain(PROMPT, 240)
            assert stack.states()["verifier-0"] == "connecting"
            proxy.mend("way", broken=True)
            await until(lambda: stack.states()["verifier-0"] == "ready")


def test_silence() -> None:
    """Half of it until the ping, half for the answer; no peer is pinged oftener than it likes."""
    for name in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert dict(channel_options(3.0))[name] == 1500
    assert channel_options(0.01) == channel_options(SHORTEST_SILENCE_SECONDS)
    assert dict(channel_options(3.0)).keys() == dict(CHANNEL_OPTIONS).keys()


def test_leases_that_were_lost_long_ago() -> None:
    """Two streams that take a generation from each other end soon; a stream that meets one failure after the other in
    a long life does not."""
    now = 0.0
    journey = Journey(
        pb.GenerateRequest(prompt="p"),
        targets=2,
        first=0,
        policy=Reconnect(attempts=99),
        rng=Random(0),
        clock=lambda: now,
        timeout=None,
    )
    for _ in range(9):
        journey.failed(LeaseLost("epoch 2"), Answer(), broken=False)
        journey.failed(Unavailable("x"), Answer(), broken=True)
        now += 6.0
    journey.failed(LeaseLost("epoch 2"), Answer(), broken=False)
    with pytest.raises(LeaseLost):
        journey.failed(LeaseLost("epoch 2"), Answer(), broken=False)
