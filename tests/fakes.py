"""A verifier and a speculator that speak the real protocol on localhost, with faults to be injected.

The LLM they stand for says `standin.next_token`: a pure function of (last token, position).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from graftree.codec import tree_from_proto
from graftree.errors import GraftreeError
from graftree.models.standin import next_token
from graftree.rpc.options import SERVER_OPTIONS
from graftree.rpc.outbox import Outbox
from graftree.rpc.status import to_failure
from graftree.store.registry import PodRecord
from graftree.text.tokenizer import Tokenizer
from graftree.tree import node_id, root_id
from graftree.v1 import (
    common_pb2,
    speculation_pb2,
    speculation_pb2_grpc,
    verification_pb2,
    verification_pb2_grpc,
)

MODEL = "random:llama?vocab=512&eos=none"
VOCAB = 512
CONTEXT = 256

Say = Callable[[Sequence[int]], int]


def say(token_ids: Sequence[int]) -> int:
    """What the LLM says after `token_ids`."""
    return next_token(token_ids[-1], len(token_ids), VOCAB)


def plain(prompt: Sequence[int], count: int, model: Say = say) -> list[int]:
    """The reference: `count` tokens of plain decoding."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(tokens))
    return tokens[len(prompt) :]


@dataclass
class _Session:
    opening: Any
    token_ids: list[int]


class _FakePod:
    """One gRPC server with one bidirectional method; a message handler per stream."""

    tier = ""

    def __init__(self, pod_id: str, kind: str) -> None:
        self.pod_id, self.kind = pod_id, kind
        self.hello = common_pb2.StreamHello(
            revision=1,
            pod_id=pod_id,
            model_fingerprint="m",
            vocab_fingerprint=Tokenizer.load(MODEL).vocab_fingerprint,
            vocab_size=VOCAB,
            max_context=CONTEXT,
        )
        self.sessions: dict[str, _Session] = {}
        self.opened: list[Any] = []
        self.closed: list[str] = []
        self.max_batch = 0  # most items that one message carried
        self.streams = 0
        self.load: common_pb2.PodLoad | None = None
        self.silent = False  # say nothing at all, not even hello
        self._server: grpc.aio.Server | None = None
        self._outboxes: list[Outbox[Any]] = []
        self._heard = asyncio.Event()
        self.address = ""

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._register(self._server)
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
        self.sessions.clear()

    def record(self) -> PodRecord:
        return PodRecord(
            pod_id=self.pod_id,
            tier=self.tier,  # type: ignore[arg-type]
            kind=self.kind,
            address=self.address,
            model_fingerprint=self.hello.model_fingerprint,
            vocab_fingerprint=self.hello.vocab_fingerprint,
            max_sessions=100,
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; looked at after each message that arrives."""
        async with asyncio.timeout(10):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    def push(self, item: Any) -> None:
        """Send something unasked on every stream."""
        for outbox in self._outboxes:
            outbox.put(item)

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> None:
        self.streams += 1
        outbox: Outbox[Any] = Outbox(credits=0)
        self._outboxes.append(outbox)
        mine: set[str] = set()
        writer = asyncio.create_task(self._write(outbox, context))
        try:
            async for request in requests:
                if request.HasField("hello") and self.silent:
                    await asyncio.Event().wait()
                if request.HasField("hello"):
                    await context.write(self._response([self.hello]))
                outbox.grant(request.credits)
                self._take(request, outbox, mine)
                self._heard.set()
        finally:
            writer.cancel()
            self._outboxes.remove(outbox)
            for session_id in mine:
                self.sessions.pop(session_id, None)
            self._heard.set()

    async def _write(self, outbox: Outbox[Any], context: Any) -> None:
        while items := await outbox.take():
            await context.write(self._response(items))

    def _take(self, request: Any, outbox: Outbox[Any], mine: set[str]) -> None:
        for opening in request.opens:
            self.opened.append(opening)
            mine.add(opening.session_id)
            self.sessions[opening.session_id] = _Session(opening, list(opening.token_ids))
            self._open(opening, outbox)
        self._work(request, outbox)
        for session_id in request.closes:
            self.closed.append(session_id)
            self.sessions.pop(session_id, None)
            mine.discard(session_id)

    def _say(self, answer: Any, outbox: Outbox[Any]) -> None:
        if isinstance(answer, common_pb2.SessionFailure):
            self.sessions.pop(answer.session_id, None)
        if answer is not None:
            outbox.put(answer)

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def _response(self, items: Sequence[Any]) -> Any:
        raise NotImplementedError

    def _open(self, opening: Any, outbox: Outbox[Any]) -> None:
        raise NotImplementedError

    def _work(self, request: Any, outbox: Outbox[Any]) -> None:
        raise NotImplementedError


def _items(kind: type, items: Sequence[Any]) -> list[Any]:
    return [item for item in items if isinstance(item, kind)]


class FakeVerifier(_FakePod, verification_pb2_grpc.VerificationServiceServicer):
    """Target-only acceptance against `say`.

    `script(step, verdict)` may change a verdict, or return something else to send, or None to say nothing.
    `refuse` answers every open.
    """

    tier = "verifier"

    def __init__(self, pod_id: str = "verifier-0", model: Say = say) -> None:
        super().__init__(pod_id, "fake")
        self.model = model
        self.steps: list[verification_pb2.VerifyStep] = []
        self.script: Callable[[verification_pb2.VerifyStep, verification_pb2.Verdict], Any] = lambda _, verdict: (
            verdict
        )
        self.refuse: GraftreeError | None = None
        self.held: list[tuple[verification_pb2.VerifyStep, Outbox[Any]]] = []
        self.holding = False

    async def Verify(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        await self._stream(request_iterator, context)

    def release(self) -> None:
        """Answer the steps that were held back."""
        held, self.held = self.held, []
        for step, outbox in held:
            self._answer(step, outbox)

    def _register(self, server: grpc.aio.Server) -> None:
        verification_pb2_grpc.add_VerificationServiceServicer_to_server(self, server)

    def _response(self, items: Sequence[Any]) -> verification_pb2.VerifyResponse:
        hellos = _items(common_pb2.StreamHello, items)
        return verification_pb2.VerifyResponse(
            hello=hellos[0] if hellos else None,
            verdicts=_items(verification_pb2.Verdict, items),
            failures=_items(common_pb2.SessionFailure, items),
            load=next(iter(_items(common_pb2.PodLoad, items)), self.load),
        )

    def _open(self, opening: Any, outbox: Outbox[Any]) -> None:
        if self.refuse is not None:
            self._say(to_failure(opening.session_id, self.refuse), outbox)

    def _work(self, request: Any, outbox: Outbox[Any]) -> None:
        self.max_batch = max(self.max_batch, len(request.steps))
        for step in request.steps:
            self.steps.append(step)
            if self.holding:
                self.held.append((step, outbox))
            else:
                self._answer(step, outbox)

    def _answer(self, step: verification_pb2.VerifyStep, outbox: Outbox[Any]) -> None:
        session = self.sessions.get(step.session_id)
        if session is None or self.refuse is not None:
            return
        tree = tree_from_proto(step.tree)
        tree.validate(vocab_size=VOCAB)
        if step.HasField("tree"):
            assert tree.root_id == root_id(session.opening.salt, session.token_ids)
        assert step.committed_length == len(session.token_ids)
        children, node, run, accepted = tree.children(), -1, list[int](), list[int]()
        while True:
            run.append(self.model([*session.token_ids, *run]))
            child = children[node].get(run[-1])
            if child is None:
                break
            accepted.append(child)
            node = child
        session.token_ids.extend(run)
        verdict = verification_pb2.Verdict(
            session_id=step.session_id, step=step.step, token_ids=run, accepted_nodes=accepted, batch_sessions=1
        )
        if session.opening.log_probs:
            for token in run:
                verdict.log_probs.add(token_id=token, log_prob=-0.5, rank=1)
        answer = self.script(step, verdict)
        self._say(answer, outbox)


Draft = Callable[[Sequence[int]], list[tuple[tuple[int, ...], float]]]


def chain(depth: int, model: Say = say) -> Draft:
    """A draft that is right: one path of `depth`."""

    def draft(token_ids: Sequence[int]) -> list[tuple[tuple[int, ...], float]]:
        path = plain(token_ids, depth, model)
        return [(tuple(path[: level + 1]), -0.1) for level in range(depth)]

    return draft


def wrong(width: int) -> Draft:
    """A draft that is never right."""

    def draft(token_ids: Sequence[int]) -> list[tuple[tuple[int, ...], float]]:
        right = say(token_ids)
        return [(((right + 1 + index) % VOCAB,), -1.0 - index) for index in range(width)]

    return draft


class FakeSpeculator(_FakePod, speculation_pb2_grpc.SpeculationServiceServicer):
    """Answers every open and commit with one delta: the whole of `draft(committed tokens)`.

    `script(delta)` may change it, or return something else to send, or None.
    """

    tier = "speculator"

    def __init__(self, pod_id: str = "speculator-0", kind: str = "chain", draft: Draft | None = None) -> None:
        super().__init__(pod_id, kind)
        self.hello.model_fingerprint = ""
        self.draft = draft or chain(4)
        self.commits: list[speculation_pb2.DraftCommit] = []
        self.script: Callable[[speculation_pb2.TreeDelta], Any] = lambda delta: delta

    async def Speculate(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        await self._stream(request_iterator, context)

    def _register(self, server: grpc.aio.Server) -> None:
        speculation_pb2_grpc.add_SpeculationServiceServicer_to_server(self, server)

    def _response(self, items: Sequence[Any]) -> speculation_pb2.SpeculateResponse:
        hellos = _items(common_pb2.StreamHello, items)
        return speculation_pb2.SpeculateResponse(
            hello=hellos[0] if hellos else None,
            deltas=_items(speculation_pb2.TreeDelta, items),
            failures=_items(common_pb2.SessionFailure, items),
            load=next(iter(_items(common_pb2.PodLoad, items)), self.load),
        )

    def _open(self, opening: Any, outbox: Outbox[Any]) -> None:
        self._draft(opening.session_id, outbox)

    def _work(self, request: Any, outbox: Outbox[Any]) -> None:
        for commit in request.commits:
            self.commits.append(commit)
            session = self.sessions.get(commit.session_id)
            if session is None:
                continue
            assert commit.committed_length == len(session.token_ids)
            session.token_ids.extend(commit.token_ids)
            self._draft(commit.session_id, outbox)

    def _draft(self, session_id: str, outbox: Outbox[Any]) -> None:
        session = self.sessions[session_id]
        opening = session.opening
        nodes = [node for node in self.draft(session.token_ids) if len(node[0]) <= opening.max_depth]
        answer = self.script(delta_of(session_id, opening.salt, session.token_ids, nodes[: opening.max_nodes]))
        self._say(answer, outbox)


def delta_of(
    session_id: str, salt: int, token_ids: Sequence[int], nodes: Sequence[tuple[tuple[int, ...], float]]
) -> speculation_pb2.TreeDelta:
    """A delta with the nodes at these paths below the root of `token_ids`."""
    root = root_id(salt, token_ids)
    delta = speculation_pb2.TreeDelta(session_id=session_id, committed_length=len(token_ids), complete=True)
    for path, log_prob in nodes:
        parent = root
        for token in path[:-1]:
            parent = node_id(parent, token)
        delta.parent_ids.append(parent)
        delta.token_ids.append(path[-1])
        delta.log_probs.append(log_prob)
    return delta
