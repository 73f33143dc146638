"""Real processes, real signals: whatever dies or stands still under load, every answer is the undisturbed one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import grpc
import pytest

from bench.chaos import TINY, Course, rolling, stack_of, trouble
from bench.chaos_faults import Places, Troublemaker
from bench.chaos_history import History
from bench.chaos_load import Case, requests, undisturbed
from bench.chaos_proxy import FaultProxy
from graftree.errors import LeaseLost
from graftree.local_stack import LocalStack
from graftree.rpc.status import from_rpc
from graftree.sdk.options import build_request
from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis
from graftree.store.script import Script
from graftree.store.sessions import SessionStore
from graftree.v1 import generation_pb2 as pb
from graftree.v1 import generation_pb2_grpc

IDENTIFIER = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"


@dataclass
class Lab:
    """Two routers, two verifiers, a speculator, a Redis; requests and their undisturbed answers."""

    stack: LocalStack
    redis: EmbeddedRedis
    cases: list[Case]
    places: Places

    def maker(self, *kinds: tuple[str, str]) -> Troublemaker:
        return Troublemaker(self.places, kinds, Random(3), down_seconds=(0.1, 0.4))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with EmbeddedRedis() as redis, FaultProxy() as proxy, stack_of(TINY, ["ngram"], redis, proxy) as stack:
        yield Lab(stack, redis, undisturbed(stack.target, requests(6, 120, Random(0))), Places(stack, redis))


def check(course: Course, kinds: Sequence[tuple[str, str]]) -> None:
    """Nothing was lost, repeated or changed, no request failed, and there was trouble."""
    assert course.failed == []
    assert course.changed == 0
    assert course.history.wrong == []
    assert course.history.commits > 0
    assert len(course.streams) > 6
    assert {(fault.victim, fault.how) for fault in course.faults} >= set(kinds)


async def test_a_router_that_stood_still(lab: Lab) -> None:
    """A router is stopped longer than its lease while another one takes its generation. When it goes on, it writes
    nothing, and its client is told ABORTED; the other stream has every token once, and so has the record."""
    case = lab.cases[0]
    options = {**case.options, "request_id": IDENTIFIER, "max_new_tokens": 120}
    request = build_request(None, options)  # type: ignore[arg-type]
    first, second = lab.stack.targets
    async with grpc.aio.insecure_channel(first) as one, grpc.aio.insecure_channel(second) as other:
        stood = generation_pb2_grpc.GenerationServiceStub(one).Generate(request)
        seen: list[int] = []
        while len(seen) < 5:
            seen += (await stood.read()).chunk.token_ids
        lab.stack.pause("router", 0)
        request.resume_after.append(len(seen))
        tokens = list(seen)
        async for event in generation_pb2_grpc.GenerationServiceStub(other).Generate(request):
            tokens += event.chunk.token_ids
        assert tuple(tokens) == case.answer.token_ids
        await asyncio.sleep(0.1)
        lab.stack.resume("router", 0)
        with pytest.raises(LeaseLost) as lost:
            await _rest(stood, seen)
    assert lost.value.code is grpc.StatusCode.ABORTED
    assert tuple(seen) == case.answer.token_ids[: len(seen)]
    async with connect(lab.redis.url) as redis:
        record = await SessionStore(redis, ttl_seconds=60).load(IDENTIFIER)
    assert record is not None
    assert (record.epoch, record.finished, record.token_ids) == (2, True, case.answer.token_ids)


async def _rest(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse], seen: list[int]) -> None:
    """Read to the end. Raises what the router raised."""
    try:
        while (event := await call.read()) is not grpc.aio.EOF:
            seen += event.chunk.token_ids
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None


async def test_killed_under_load(lab: Lab) -> None:
    """SIGKILL to a router, a verifier, a speculator and Redis (which comes back empty), in any order."""
    kinds = [("router", "kill"), ("verifier", "kill"), ("speculator", "kill"), ("redis", "kill")]
    maker = lab.maker(*kinds)
    course = await trouble(lab.stack, maker, lab.cases, 6, Random(1), 30, until=lambda: len(maker.faults) >= 4)
    check(course, kinds)
    assert sum(stream.reconnects for stream in course.streams) > 0


async def test_a_rolling_restart(lab: Lab) -> None:
    """The routers are drained and replaced one after the other: no request fails (`bench.chaos` does all tiers)."""
    course = await rolling(lab.stack, lab.maker(), lab.cases, 4, Random(2), tiers=["router"])
    check(course, [("router", "drain")])


def test_the_history_finds_who_must_not_write() -> None:
    """An append by another epoch or owner than the session's, or outside a commit, is seen in the log of commands."""
    history = History("unused")
    commit = Script("session_commit").sha
    key = "graftree:v1:{s:s-1}"
    keys = [f"{key}:{part}" for part in ("record", "tokens", "log_probs")]

    def commits(epoch: int, owner: str) -> None:
        history.saw("unix", ["EVALSHA", commit, "3", *keys, str(epoch), owner, "0", "x"])
        history.saw("lua", ["HMGET", keys[0], "epoch", "owner", "finished"])
        history.saw("lua", ["APPEND", keys[1], "x"])

    history.saw("lua", ["HSET", keys[0], "nonce", "n", "epoch", "1", "owner", "a", "finished", "0"])
    commits(1, "a")
    history.saw("lua", ["HINCRBY", keys[0], "epoch", "1"])
    history.saw("lua", ["HSET", keys[0], "owner", "b", "lease", "9"])
    commits(2, "b")
    assert (history.commits, history.acquired, history.wrong) == (2, 1, [])
    commits(1, "a")
    history.saw("lua", ["APPEND", keys[1], "x"])
    assert history.wrong == [
        f"{key}: epoch 1 of a wrote, but it is epoch 2 of b",
        f"{key}: tokens came without a commit",
    ]
