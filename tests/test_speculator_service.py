"""SpeculationService over real gRPC: hello, credits, deltas, commits, failures, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from graftree.rpc.status import from_rpc
from graftree.tree import node_id, root_id
from graftree.v1 import common_pb2, speculation_pb2, speculation_pb2_grpc
from speculator_service.drafters.base import Drafter, DraftSession
from speculator_service.drafters.ngram import NgramDrafter
from speculator_service.engine import Engine
from speculator_service.events import Event, Grown
from speculator_service.limits import Limits
from speculator_service.service import SpeculationService
from tests.drafters import Crash, Flat

PROMPT = [1, 2, 3, 4, 1, 2, 3]
Request = speculation_pb2.SpeculateRequest


class Served:
    """A server with one drafter, and a channel to it."""

    channel: grpc.aio.Channel

    def __init__(self, drafter: Drafter, limits: Limits) -> None:
        hello = common_pb2.StreamHello(revision=1, pod_id="s1", vocab_fingerprint=drafter.vocab_fingerprint)
        self.service = SpeculationService(hello, limits, self._load)
        self.engine = Engine(drafter, batch_leaves=16, deliver=self._deliver)
        self.service.attach(self.engine)
        self._complete: set[tuple[str, int]] = set()
        self._news = asyncio.Event()

    def _load(self) -> common_pb2.PodLoad:
        return common_pb2.PodLoad(sessions=self.service.sessions, max_sessions=8)

    def _deliver(self, events: list[Event]) -> None:
        self.service.deliver(events)
        self._complete |= {
            (event.session_id.partition(":")[2], event.committed_length)
            for event in events
            if isinstance(event, Grown) and event.complete
        }
        self._news.set()

    async def grown(self, session_id: str, length: int = len(PROMPT)) -> None:
        """Wait until the session's tree behind `length` tokens is complete, sent or not."""
        while (session_id, length) not in self._complete:
            self._news.clear()
            await self._news.wait()

    async def connect(self, credits: int = 1000, **hello: Any) -> Stream:
        stream = Stream(speculation_pb2_grpc.SpeculationServiceStub(self.channel).Speculate())
        await stream.call.write(Request(hello=common_pb2.StreamHello(**{"revision": 1, **hello}), credits=credits))
        return stream


class Stream:
    """A router's side of a stream."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.deltas: list[speculation_pb2.TreeDelta] = []
        self.failures: list[common_pb2.SessionFailure] = []
        self.messages = 0

    async def send(self, **fields: Any) -> None:
        await self.call.write(Request(**fields))

    async def receive(self) -> speculation_pb2.SpeculateResponse:
        message = await asyncio.wait_for(self.call.read(), 20)
        assert message is not grpc.aio.EOF
        self.messages += 1
        self.deltas += message.deltas
        self.failures += message.failures
        return message

    async def until_complete(self, session_id: str) -> list[speculation_pb2.TreeDelta]:
        """Deltas of one session up to its tree being complete."""
        while True:
            own = [delta for delta in self.deltas if delta.session_id == session_id]
            if own and own[-1].complete:
                return own
            await self.receive()

    async def failure(self, session_id: str) -> common_pb2.SessionFailure:
        while True:
            for failure in self.failures:
                if failure.session_id == session_id:
                    return failure
            await self.receive()


@asynccontextmanager
async def serving(drafter: Drafter, **changes: Any) -> AsyncIterator[Served]:
    limits = Limits(**{"max_sessions": 8, "max_nodes": 16, "max_depth": 6, "branching": 4, **changes})
    served = Served(drafter, limits)
    served.engine.start()
    server = grpc.aio.server()
    speculation_pb2_grpc.add_SpeculationServiceServicer_to_server(served.service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            served.channel = channel
            yield served
    finally:
        await server.stop(None)
        await served.engine.stop()


def opening(session_id: str = "a", **changes: Any) -> speculation_pb2.DraftOpen:
    fields = {
        "salt": 9,
        "token_ids": PROMPT,
        "prompt_tokens": len(PROMPT),
        "sampling": common_pb2.SamplingParams(temperature=0.0),
        "max_nodes": 16,
        "max_depth": 6,
        "vocab_size": 100,
        "max_length": 500,
        **changes,
    }
    return speculation_pb2.DraftOpen(session_id=session_id, **fields)


def commit(
    token_ids: Sequence[int], length: int = len(PROMPT), session_id: str = "a", **fields: Any
) -> speculation_pb2.DraftCommit:
    return speculation_pb2.DraftCommit(session_id=session_id, token_ids=token_ids, committed_length=length, **fields)


async def test_hello_then_a_tree_that_content_addresses_name() -> None:
    """The pod answers hello with its own; deltas hang on the root's id and on nodes sent before."""
    async with serving(NgramDrafter()) as served:
        stream = await served.connect()
        first = await stream.receive()
        assert (first.hello.revision, first.hello.pod_id, first.load.max_sessions) == (1, "s1", 8)
        await stream.send(opens=[opening()])
        deltas = await stream.until_complete("a")
        known = {root_id(9, PROMPT): ()}
        for delta in deltas:
            assert delta.committed_length == len(PROMPT)
            for parent, token, log_prob in zip(delta.parent_ids, delta.token_ids, delta.log_probs, strict=True):
                assert log_prob <= 0
                known[node_id(parent, token)] = (*known[parent], token)
        # Behind "1 2 3" there was "4 1 2 3": the tree goes round.
        assert (4, 1, 2, 3, 4, 1) in known.values()


async def test_commit_re_roots() -> None:
    """After a commit only new nodes come, below the committed branch; the delta says the new length."""
    async with serving(Flat()) as served:
        stream = await served.connect()
        await stream.send(opens=[opening()])
        deltas = await stream.until_complete("a")
        known = {node_id(p, t) for delta in deltas for p, t in zip(delta.parent_ids, delta.token_ids, strict=True)}
        root = root_id(9, PROMPT)
        token = next(t for d in deltas for p, t in zip(d.parent_ids, d.token_ids, strict=True) if p == root)
        stream.deltas.clear()
        await stream.send(commits=[commit([token])])
        for delta in await stream.until_complete("a"):
            assert delta.committed_length == len(PROMPT) + 1
            for parent, child in zip(delta.parent_ids, delta.token_ids, strict=True):
                assert parent in known
                assert node_id(parent, child) not in known
                known.add(node_id(parent, child))


async def test_commits_carry_budget_and_pause() -> None:
    """A budget bounds the nodes that come behind its commit; nothing comes behind one that pauses, until the next."""
    async with serving(Flat()) as served:
        stream = await served.connect()
        await stream.send(opens=[opening()])
        await stream.until_complete("a")
        stream.deltas.clear()
        await stream.send(commits=[commit([99], budget_nodes=3)])
        deltas = await stream.until_complete("a")
        assert sum(len(delta.token_ids) for delta in deltas) == 3
        stream.deltas.clear()
        await stream.send(commits=[commit([98], len(PROMPT) + 1, paused=True)], opens=[opening("b")])
        await stream.until_complete("b")
        assert {delta.session_id for delta in stream.deltas} == {"b"}
        await stream.send(commits=[commit([97], len(PROMPT) + 2)])
        deltas = await stream.until_complete("a")
        assert deltas[-1].committed_length == len(PROMPT) + 3
        assert sum(len(delta.token_ids) for delta in deltas) > 3


async def test_without_credit_deltas_wait_and_travel_together() -> None:
    """No delta comes without credit; with one credit the whole tree comes in one message."""
    async with serving(Flat("2")) as served:
        stream = await served.connect(credits=0)
        await stream.receive()
        await stream.send(opens=[opening(), opening("b")])
        await served.grown("a")
        await served.grown("b")
        await stream.send(credits=1)
        message = await stream.receive()
        assert sorted(delta.session_id for delta in message.deltas) == ["a", "b"]
        assert all(delta.complete and len(delta.token_ids) == 16 for delta in message.deltas)


async def test_credits_are_never_exceeded() -> None:
    """As many messages with deltas as were granted, then silence until the next grant."""
    async with serving(Flat("2")) as served:
        stream = await served.connect(credits=1)
        await stream.receive()
        length = len(PROMPT)
        await stream.send(opens=[opening()])
        await stream.receive()
        await stream.send(commits=[commit([99], length)])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(reading := asyncio.ensure_future(stream.receive())), 0.1)
        await stream.send(credits=1)
        assert (await reading).deltas


async def test_nodes_that_died_while_they_waited_are_dropped() -> None:
    """Without credit a commit overtakes the deltas: what is sent then is below the new root."""
    async with serving(Flat("2")) as served:
        stream = await served.connect(credits=0)
        await stream.receive()
        await stream.send(opens=[opening()])
        await served.grown("a")
        await stream.send(commits=[commit([99])])
        await served.grown("a", len(PROMPT) + 1)
        await stream.send(credits=1)
        (delta,) = (await stream.receive()).deltas
        known = {root_id(9, [*PROMPT, 99])}
        for parent, token in zip(delta.parent_ids, delta.token_ids, strict=True):
            assert parent in known
            known.add(node_id(parent, token))


@pytest.mark.parametrize(
    ("changes", "reason", "word"),
    [
        ({"token_ids": []}, "INVALID_ARGUMENT", "token_ids"),
        ({"token_ids": [100]}, "INVALID_ARGUMENT", "token_ids"),
        ({"vocab_size": 0}, "INVALID_ARGUMENT", "vocab_size"),
        ({"prompt_tokens": 9}, "INVALID_ARGUMENT", "prompt_tokens"),
        ({"sampling": common_pb2.SamplingParams(temperature=-1)}, "INVALID_ARGUMENT", "sampling.temperature"),
        ({"token_ids": [1] * 33}, "CONTEXT_TOO_LONG", "33"),
    ],
)
async def test_a_bad_open_fails_its_session_alone(changes: dict[str, Any], reason: str, word: str) -> None:
    """The failure names reason, field and limit; a good session in the same message is served."""
    async with serving(Flat(), max_context=32) as served:
        stream = await served.connect()
        await stream.send(opens=[opening("bad", **changes), opening("good")])
        await stream.until_complete("good")
        failure = await stream.failure("bad")
        assert failure.reason == reason
        assert word in failure.message
        assert served.service.sessions == 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (commit([1], session_id="nobody"), "NOT_FOUND"),
        (commit([1], length=3), "STALE"),
        (commit([100]), "INVALID_ARGUMENT"),
        (commit([]), "INVALID_ARGUMENT"),
    ],
)
async def test_a_bad_commit_fails_its_session_alone(bad: speculation_pb2.DraftCommit, reason: str) -> None:
    """Unknown session, wrong committed length, ids outside the vocabulary, nothing at all: each by its name."""
    async with serving(Flat()) as served:
        stream = await served.connect()
        await stream.send(opens=[opening(), opening("good")])
        await stream.until_complete("a")
        stream.deltas.clear()
        await stream.send(commits=[bad, commit([5], session_id="good")])
        assert (await stream.failure(bad.session_id)).reason == reason
        await stream.until_complete("good")


async def test_one_session_too_many() -> None:
    """RESOURCE_EXHAUSTED with a time to retry; a close makes room."""
    async with serving(Flat(), max_sessions=2) as served:
        stream = await served.connect()
        await stream.send(opens=[opening("a"), opening("b"), opening("c")])
        failure = await stream.failure("c")
        assert failure.reason == "RESOURCE_EXHAUSTED"
        assert failure.retry_after_ms > 0
        await stream.send(closes=["a"])
        await stream.send(opens=[opening("c")])
        await stream.until_complete("c")


async def test_two_routers_may_use_the_same_session_id() -> None:
    """Sessions belong to their stream: a takeover does not meddle with the former owner's tree."""
    async with serving(Flat()) as served:
        one, two = await served.connect(), await served.connect()
        await one.send(opens=[opening()])
        await two.send(opens=[opening(salt=10)])
        first = await one.until_complete("a")
        second = await two.until_complete("a")
        assert first[0].parent_ids[0] == root_id(9, PROMPT)
        assert second[0].parent_ids[0] == root_id(10, PROMPT)
        assert served.service.sessions == 2


async def test_an_open_of_an_open_session_starts_it_anew() -> None:
    """The old tree is forgotten and the drafter told."""
    closed: list[str] = []

    class Spy(Flat):
        def close(self, session_id: str) -> None:
            closed.append(session_id)

    async with serving(Spy()) as served:
        stream = await served.connect()
        await stream.send(opens=[opening()])
        await stream.until_complete("a")
        stream.deltas.clear()
        await stream.send(opens=[opening(token_ids=[5, 6], prompt_tokens=2)])
        deltas = await stream.until_complete("a")
        assert deltas[0].parent_ids[0] == root_id(9, [5, 6])
        assert len(closed) == 1
        assert served.service.sessions == 1


@pytest.mark.parametrize("how", ["cancel", "half-close", "close-session"])
async def test_ends_release_everything(how: str) -> None:
    """However a stream or session ends, the drafter is told and the engine holds nothing of it."""
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()
    open_now: set[str] = set()

    class Spy(Flat):
        def open(self, session: DraftSession) -> None:
            open_now.add(session.session_id)

        def close(self, session_id: str) -> None:
            open_now.discard(session_id)
            if not open_now:
                loop.call_soon_threadsafe(closed.set)

    async with serving(Spy()) as served:
        stream = await served.connect()
        await stream.send(opens=[opening("a"), opening("b")])
        await stream.until_complete("b")
        if how == "cancel":
            stream.call.cancel()
        elif how == "half-close":
            await stream.call.done_writing()
        else:
            await stream.send(closes=["a", "b"])
        await asyncio.wait_for(closed.wait(), 20)
        assert served.service.sessions == 0
        assert not served.engine._growths


async def test_a_drafter_that_crashes_costs_trees_not_the_stream() -> None:
    """Each session is told, the stream lives on and serves the next open the same way."""
    async with serving(Crash("expand")) as served:
        stream = await served.connect()
        for name in ("a", "b"):
            await stream.send(opens=[opening(name)])
            failure = await stream.failure(name)
            assert failure.reason == "INTERNAL"
            assert "RuntimeError" in failure.message
        assert served.engine.faults == {"RuntimeError": 2}


@pytest.mark.parametrize("first", [Request(credits=1), Request(hello=common_pb2.StreamHello(revision=2))])
async def test_a_stream_begins_with_a_fitting_hello(first: speculation_pb2.SpeculateRequest) -> None:
    """Without hello, or with another revision, the stream is refused as INVALID_ARGUMENT naming the field."""
    async with serving(Flat()) as served:
        call = speculation_pb2_grpc.SpeculationServiceStub(served.channel).Speculate()
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "hello" in str(from_rpc(caught.value))


async def test_another_vocabulary_is_refused() -> None:
    """A router that names another vocabulary gets the reason."""

    class Other(Flat):
        vocab_fingerprint = "b" * 64

    async with serving(Other()) as served:
        stream = await served.connect(vocab_fingerprint="a" * 64)
        with pytest.raises(grpc.aio.AioRpcError, match="vocabulary") as caught:
            await asyncio.wait_for(stream.call.read(), 20)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_draining_tells_routers_and_takes_no_more() -> None:
    """Drain sends the load in-band, refuses opens, and ends when the last session is closed."""
    async with serving(Flat()) as served:
        stream = await served.connect()
        await stream.send(opens=[opening()])
        await stream.until_complete("a")
        draining = asyncio.create_task(served.service.drain())
        await stream.receive()
        await stream.send(opens=[opening("b")])
        assert (await stream.failure("b")).reason == "RESOURCE_EXHAUSTED"
        assert not draining.done()
        await stream.send(closes=["a"])
        await asyncio.wait_for(draining, 20)
