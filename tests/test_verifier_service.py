"""The verifier as its routers see it: a real gRPC stream to a pod, with a real registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from graftree import config as configuration
from graftree.config import VerifierConfig
from graftree.errors import GraftreeError, InvalidArgument
from graftree.models.standin import next_token
from graftree.rpc.options import CHANNEL_OPTIONS
from graftree.rpc.status import from_rpc
from graftree.sampling import GREEDY
from graftree.tree import TokenTree, root_id
from graftree.v1 import common_pb2, verification_pb2, verification_pb2_grpc
from tests.store_redis import server
from tests.verifier_harness import LLAMA, SALT, chain, greedy
from verifier_service import standin
from verifier_service.pod import VerifierPod

PROMPT = list(range(3, 20))
STANDIN = "standin:?step_ms=0&vocab=512&context=4096"


@asynccontextmanager
async def pod(**values: Any) -> AsyncIterator[VerifierPod]:
    values = {"model": LLAMA, "redis": server("valkey").url, "kv_tokens": 4096, "device": "cpu"} | values
    instance = VerifierPod(configuration.build(VerifierConfig, values))
    try:
        await instance.start()
        yield instance
    finally:
        await instance.stop(0)


class Connection:
    """A router's end of one stream. What arrives is kept in `verdicts`, `failures`, `loads` and `messages`."""

    def __init__(self, address: str) -> None:
        self.verdicts: list[verification_pb2.Verdict] = []
        self.failures: list[common_pb2.SessionFailure] = []
        self.loads: list[common_pb2.PodLoad] = []
        self.messages: list[verification_pb2.VerifyResponse] = []
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.call = verification_pb2_grpc.VerificationServiceStub(self._channel).Verify()
        self._heard = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, credits: int = 1000) -> Connection:
        hello = common_pb2.StreamHello(revision=1, pod_id="router")
        await self.send(hello=hello, credits=credits)
        self._task = asyncio.create_task(self._read())
        await self.until(lambda: bool(self.messages))
        return self

    async def send(self, **fields: Any) -> None:
        await self.call.write(verification_pb2.VerifyRequest(**fields))

    async def _read(self) -> None:
        async for message in self.call:
            self.messages.append(message)
            self.verdicts.extend(message.verdicts)
            self.failures.extend(message.failures)
            if message.HasField("load"):
                self.loads.append(message.load)
            self._heard.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    async def verdict(self) -> verification_pb2.Verdict:
        await self.until(lambda: bool(self.verdicts or self.failures))
        assert not self.failures
        return self.verdicts.pop(0)

    async def close(self) -> None:
        self.call.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()


@asynccontextmanager
async def connection(instance: VerifierPod, credits: int = 1000) -> AsyncIterator[Connection]:
    link = Connection(instance.address)
    try:
        yield await link.start(credits)
    finally:
        await link.close()


def opening(session_id: str, prompt: Sequence[int] = PROMPT, **fields: Any) -> verification_pb2.VerifyOpen:
    values = {"max_length": 200, "max_nodes": 16, "prompt_tokens": len(prompt), "sampling": GREEDY.to_proto()}
    return verification_pb2.VerifyOpen(session_id=session_id, salt=SALT, token_ids=prompt, **values | fields)


def stepping(
    session_id: str, number: int, committed: Sequence[int], guess: Sequence[int] = ()
) -> verification_pb2.VerifyStep:
    tree: TokenTree = chain(root_id(SALT, committed), guess)
    wire = common_pb2.TokenTree(root_id=tree.root_id, token_ids=tree.token_ids, parents=tree.parents)
    return verification_pb2.VerifyStep(session_id=session_id, step=number, committed_length=len(committed), tree=wire)


async def settle(instance: VerifierPod, sessions: int) -> None:
    """Wait until the engine has that many sessions."""
    await eventually(lambda: instance.record().sessions == sessions)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what the engine's thread does."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came")


async def test_one_session_from_open_to_close() -> None:
    """hello and load first; verdicts are plain decoding's; blocks come back; the registry knows the pod."""
    truth = greedy(PROMPT, 9)
    async with pod() as instance, connection(instance) as link:
        first = link.messages[0]
        spec = instance.runner.spec
        assert first.hello.revision == 1
        assert (first.hello.vocab_size, first.hello.max_context) == (512, 256)
        assert first.hello.model_fingerprint == spec.fingerprint
        assert first.hello.vocab_fingerprint == spec.vocab_fingerprint
        assert first.load.free_blocks == first.load.total_blocks == 256
        (record,) = [entry for entry in await instance.registry.pods("verifier") if entry.address == instance.address]
        assert (record.model_fingerprint, record.max_context) == (spec.fingerprint, 256)
        await link.send(opens=[opening("a")], steps=[stepping("a", 1, PROMPT, truth[:3])])
        verdict = await link.verdict()
        assert list(verdict.token_ids) == truth[:4]
        assert (verdict.step, verdict.batch_sessions) == (1, 1)
        assert 0 < verdict.timings.forward_ns < verdict.timings.total_ns
        await link.send(steps=[stepping("a", 2, PROMPT + truth[:4], [0])])
        assert list((await link.verdict()).token_ids) == truth[4:5]
        await link.send(closes=["a"])
        await settle(instance, 0)
        await link.until(lambda: link.loads[-1].sessions == 0 and len(link.loads) > 1)
        assert link.loads[-1].free_blocks == 256


async def test_many_sessions_in_one_message() -> None:
    """16 opens and steps in one message: one verdict each, and they shared forwards."""
    prompts = [[index + 1, index + 2, 7] for index in range(16)]
    async with pod() as instance, connection(instance) as link:
        await link.send(
            opens=[opening(str(index), prompt) for index, prompt in enumerate(prompts)],
            steps=[stepping(str(index), 1, prompt) for index, prompt in enumerate(prompts)],
        )
        await link.until(lambda: len(link.verdicts) == 16)
        for verdict in link.verdicts:
            assert list(verdict.token_ids) == greedy(prompts[int(verdict.session_id)], 1)
            assert verdict.batch_sessions == 16
        assert instance.counters.forwards == 1


async def test_answers_wait_for_credits_and_travel_together() -> None:
    """Without a credit nothing but the hello is sent; one credit brings everything in one message."""
    async with pod() as instance, connection(instance, credits=0) as link:
        await link.send(
            opens=[opening("a"), opening("b")], steps=[stepping("a", 1, PROMPT), stepping("b", 1, PROMPT)]
        )
        await eventually(lambda: instance.counters.steps == 2)
        await asyncio.sleep(0.05)
        assert len(link.messages) == 1
        await link.send(credits=1)
        await link.until(lambda: len(link.verdicts) == 2)
        assert len(link.messages) == 2


@pytest.mark.parametrize("end", ["cancel", "half-close"])
async def test_a_stream_takes_its_sessions_with_it(end: str) -> None:
    """Sessions of a router that went away are gone; those of the other router are served on."""
    async with pod() as instance, connection(instance) as link, connection(instance) as other:
        free = instance.runner.pool.free_blocks
        await other.send(opens=[opening("a")], steps=[stepping("a", 1, PROMPT)])
        first = await other.verdict()
        await link.send(opens=[opening("a"), opening("b")], steps=[stepping("a", 1, PROMPT)])
        await settle(instance, 3)
        if end == "cancel":
            link.call.cancel()
        else:
            await link.call.done_writing()
        await settle(instance, 1)
        await other.send(steps=[stepping("a", 2, [*PROMPT, *first.token_ids])])
        assert list((await other.verdict()).token_ids) == greedy(PROMPT, 2)[1:]
        await other.send(closes=["a"])
        await settle(instance, 0)
        assert instance.runner.pool.free_blocks == free


@pytest.mark.parametrize("revision", [0, 2])
async def test_another_revision_is_refused(revision: int) -> None:
    """The first message must be a hello of revision 1; the stream ends with INVALID_ARGUMENT that says so."""
    async with pod(model=STANDIN) as instance:
        link = Connection(instance.address)
        await link.send(hello=common_pb2.StreamHello(revision=revision))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await link.call.read()
        error = from_rpc(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == "hello.revision"
        await link.close()


async def test_a_second_hello_ends_that_stream_only() -> None:
    """Trial 24: a router that breaks the protocol loses its stream and sessions; the other does not notice."""
    async with pod() as instance, connection(instance) as link, connection(instance) as other:
        await other.send(opens=[opening("a")])
        await link.send(opens=[opening("a")])
        await link.send(hello=common_pb2.StreamHello(revision=1))
        assert await link.call.code() == grpc.StatusCode.INVALID_ARGUMENT
        await settle(instance, 1)
        await other.send(steps=[stepping("a", 1, PROMPT)])
        assert list((await other.verdict()).token_ids) == greedy(PROMPT, 1)


async def test_failures_travel_back_as_what_they_are() -> None:
    """Trial 24: garbage for some sessions, an answer for the good one, on the same stream."""
    async with pod() as instance, connection(instance) as link:
        await link.send(
            opens=[opening("long", max_length=999), opening("ids", [1, 600]), opening("good")],
            steps=[stepping("nobody", 1, PROMPT), stepping("good", 1, PROMPT)],
        )
        await link.until(lambda: len(link.failures) == 3 and len(link.verdicts) == 1)
        reasons = {failure.session_id: failure.reason for failure in link.failures}
        assert reasons == {"long": "CONTEXT_TOO_LONG", "ids": "INVALID_ARGUMENT", "nobody": "NOT_FOUND"}


async def test_drain_waits_for_open_sessions() -> None:
    """A draining pod says so in-band, refuses new sessions, serves the open ones, and ends when they have."""
    async with pod(lease_seconds=1) as instance, connection(instance) as link:
        await link.send(opens=[opening("a")])
        await settle(instance, 1)
        stopping = asyncio.create_task(instance.stop(20))
        await link.until(lambda: link.loads[-1].draining)
        await link.send(opens=[opening("b")], steps=[stepping("a", 1, PROMPT)])
        await link.until(lambda: bool(link.failures and link.verdicts))
        assert link.failures[0].reason == "UNAVAILABLE"
        assert not stopping.done()
        await link.send(closes=["a"])
        await asyncio.wait_for(stopping, 20)


async def test_a_dead_engine_ends_the_pod() -> None:
    """What cannot happen in the engine's thread is not survived in silence: the pod says that it failed."""
    async with pod(model=STANDIN) as instance:

        def boom(engine: object) -> None:
            raise RuntimeError("boom")

        assert instance._worker is not None
        instance._worker.submit(boom)
        error = await asyncio.wait_for(instance.failed, 20)
        assert isinstance(error, GraftreeError)
        assert "boom" in str(error)


async def test_the_stand_in_model() -> None:
    """`standin:` says `next_token`, with and without drafts, through the same engine."""
    async with pod(model=STANDIN, kv_tokens=0) as instance, connection(instance) as link:
        assert link.messages[0].hello.max_context == 4096
        committed = [1, 2, 3]
        await link.send(opens=[opening("a", committed, max_length=4096)])
        for number in range(1, 6):
            want = list(committed)
            for _ in range(4):
                want.append(next_token(want[-1], len(want), 512))
            guess = want[len(committed) :][:3] if number % 2 else []
            await link.send(steps=[stepping("a", number, committed, guess)])
            verdict = await link.verdict()
            assert list(verdict.token_ids) == want[len(committed) :][: len(guess) + 1]
            committed += verdict.token_ids
        await link.send(closes=["a"])


@pytest.mark.parametrize(
    "uri",
    ["standin:?vocab=1", "standin:?speed=3", "standin:?step_ms=soon", "standin:x?vocab=9", "standin:?context=nan"],
)
def test_a_bad_stand_in_names_the_option(uri: str) -> None:
    """Trial 25: start-up errors say what would have been accepted."""
    with pytest.raises(InvalidArgument, match="model"):
        standin.StandInRunner.load(uri, kv_tokens=0, block_size=16)


def test_the_stand_in_takes_its_time() -> None:
    """It sleeps what is left of its step time, and not when computing took longer."""
    slept: list[float] = []
    now = iter([0.0, 0.004, 1.0, 1.5])
    spec = standin.StandInRunner.load(STANDIN, kv_tokens=0, block_size=16).spec
    runner = standin.StandInRunner(
        spec, step_ms=10, kv_tokens=64, block_size=16, clock=lambda: next(now), sleep=slept.append
    )
    runner.forward([])
    runner.forward([])
    assert slept == [pytest.approx(0.006)]
