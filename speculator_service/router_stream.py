"""`RouterStream`: one router's sessions on this pod, and what waits to be sent to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from graftree.errors import GraftreeError, InvalidArgument, NotFound, ResourceExhausted
from graftree.observe.tracing import NO_TRACER, Span, Tracer
from graftree.rpc.outbox import Outbox
from graftree.rpc.status import to_failure
from graftree.v1 import common_pb2, speculation_pb2
from speculator_service.counters import Counters
from speculator_service.engine import Engine
from speculator_service.events import Close, Commit, Event, Failed, Grown, Open, Operation
from speculator_service.limits import Limits, check_tokens

R = TypeVar("R", speculation_pb2.DraftOpen, speculation_pb2.DraftCommit)
Writer = Callable[[speculation_pb2.SpeculateResponse], Awaitable[None]]


log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Session:
    vocab_size: int
    span: Span
    nodes: int = 0  # sent


class RouterStream:
    """Reads one router's requests into the engine and writes what the engine grows.

    Args:
        name: unique among the pod's streams; prefix of its sessions' keys in the engine.
        engine: grows the trees.
        limits: what is taken.
        admits: whether the pod takes one more session.
        load: the pod's load now.
        left: called when sessions have ended.
        counters: of the pod.
        tracer: of the sessions.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        limits: Limits,
        *,
        admits: Callable[[], bool],
        load: Callable[[], common_pb2.PodLoad],
        left: Callable[[], None],
        counters: Counters,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._name, self._engine, self._limits = name, engine, limits
        self._admits, self._load, self._left = admits, load, left
        self._counters, self._tracer = counters, tracer
        self._outbox: Outbox[Grown | common_pb2.SessionFailure | common_pb2.PodLoad] = Outbox(credits=0)
        self._sessions: dict[str, _Session] = {}  # open ones, by the router's id
        self._complained: set[str] = set()  # reasons logged, once each

    def __len__(self) -> int:
        """Sessions open."""
        return len(self._sessions)

    async def run(
        self,
        first: speculation_pb2.SpeculateRequest,
        requests: AsyncIterator[speculation_pb2.SpeculateRequest],
        write: Writer,
    ) -> None:
        """Serve until the router ends its side."""
        self._take_in(first)
        reading = asyncio.create_task(self._read(requests))
        try:
            while items := await self._outbox.take():
                response, has_deltas = self._compose(items)
                if not has_deltas:
                    self._outbox.grant(1)  # credits are for messages with deltas
                if response is not None:
                    await write(response)
            await reading
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    def close(self) -> None:
        """The stream is over: forget its sessions."""
        self._engine.submit([Close(self._key(session_id)) for session_id in self._sessions])
        for session_id in list(self._sessions):
            self._forget(session_id)
        self._outbox.close()
        self._left()

    def deliver(self, event: Event) -> None:
        """Queue an event of one of this stream's sessions."""
        session_id = event.session_id.partition(":")[2]
        if session_id not in self._sessions:
            return
        if isinstance(event, Failed):
            self._give_up(session_id, event.error)
        else:
            self._outbox.put(event)

    def tell_load(self) -> None:
        """Send the pod's load even though there is nothing else to say."""
        self._outbox.put(self._load())

    # In.

    async def _read(self, requests: AsyncIterator[speculation_pb2.SpeculateRequest]) -> None:
        try:
            async for request in requests:
                self._take_in(request)
        finally:
            self._outbox.close()

    def _take_in(self, request: speculation_pb2.SpeculateRequest) -> None:
        arrived = time.monotonic_ns()
        operations: list[Operation] = []
        for opened in request.opens:
            self._guard(self._open, opened, arrived, operations)
        for commit in request.commits:
            self._guard(self._commit, commit, arrived, operations)
        for session_id in request.closes:
            self._drop(session_id, operations)
        if request.credits:
            self._outbox.grant(request.credits)
        self._engine.submit(operations)

    def _guard(
        self,
        take_in: Callable[[R, int, list[Operation]], None],
        request: R,
        arrived_ns: int,
        operations: list[Operation],
    ) -> None:
        """One session's bad request is that session's failure."""
        try:
            take_in(request, arrived_ns, operations)
        except GraftreeError as error:
            self._drop(request.session_id, operations)
            self._give_up(request.session_id, error)

    def _drop(self, session_id: str, operations: list[Operation]) -> None:
        if self._forget(session_id):
            operations.append(Close(self._key(session_id)))
            self._left()

    def _open(self, request: speculation_pb2.DraftOpen, arrived_ns: int, operations: list[Operation]) -> None:
        self._drop(request.session_id, operations)  # opened anew
        if not self._admits():
            raise ResourceExhausted(
                f"no session left: this pod takes {self._limits.max_sessions}, none while draining"
            )
        session = self._limits.session(self._key(request.session_id), request)
        span = self._tracer.start("draft", parent=request.traceparent, kind="server", session_id=request.session_id)
        self._sessions[request.session_id] = _Session(request.vocab_size, span)
        self._counters.sessions_opened += 1
        tree = self._limits.tree(session, request.max_depth)
        operations.append(Open(session, tree, arrived_ns, self._limits.drawing(session, request)))

    def _commit(self, request: speculation_pb2.DraftCommit, arrived_ns: int, operations: list[Operation]) -> None:
        open_session = self._sessions.get(request.session_id)
        if open_session is None:
            raise NotFound("the session is not open on this stream")
        if not request.token_ids:
            raise InvalidArgument("commits.token_ids", 0, "at least one token")
        check_tokens(request.token_ids, open_session.vocab_size)
        key = self._key(request.session_id)
        self._counters.commits += 1
        operations.append(
            Commit(
                key,
                tuple(request.token_ids),
                request.committed_length,
                arrived_ns,
                budget=request.budget_nodes,
                paused=request.paused,
            )
        )

    def _give_up(self, session_id: str, error: GraftreeError) -> None:
        self._forget(session_id, error)
        self._counters.sessions_failed += 1
        self._left()
        self._outbox.put(to_failure(session_id, error))
        if error.reason not in self._complained:
            self._complained.add(error.reason)
            log.warning("a session is refused or given up", reason=error.reason, message=str(error))

    def _forget(self, session_id: str, error: GraftreeError | None = None) -> bool:
        """Close a session here. Returns whether it was open."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        session.span.set(nodes=session.nodes)
        session.span.end(error)
        return True

    def _key(self, session_id: str) -> str:
        return f"{self._name}:{session_id}"

    # Out.

    def _compose(
        self, items: list[Grown | common_pb2.SessionFailure | common_pb2.PodLoad]
    ) -> tuple[speculation_pb2.SpeculateResponse | None, bool]:
        """One message of what waited, and whether it carries deltas; None if all of it has become pointless."""
        failures = [item for item in items if isinstance(item, common_pb2.SessionFailure)]
        grown: dict[str, list[Grown]] = {}
        for item in items:
            if isinstance(item, Grown) and item.session_id.partition(":")[2] in self._sessions:
                grown.setdefault(item.session_id, []).append(item)
        deltas = [delta for parts in grown.values() if (delta := delta_of(parts)) is not None]
        for delta in deltas:
            self._sessions[delta.session_id].nodes += len(delta.token_ids)
            self._counters.nodes += len(delta.token_ids)
        self._counters.deltas += len(deltas)
        told = any(isinstance(item, common_pb2.PodLoad) for item in items)
        if not (deltas or failures or told):
            return None, False
        response = speculation_pb2.SpeculateResponse(deltas=deltas, failures=failures, load=self._load())
        return response, bool(deltas)


def delta_of(parts: list[Grown]) -> speculation_pb2.TreeDelta | None:
    """What one session grew since the last message, without the nodes that a commit has dropped since."""
    last = parts[-1]
    # The node that has become the root is no news: a commit named it. The engine's thread may commit meanwhile.
    nodes = [(node, node.parent) for part in parts for node in part.nodes if node.alive]
    grown = [(node, parent) for node, parent in nodes if parent is not None]
    proposed = [entry for part in parts for entry in part.proposed if entry[0].alive]
    if not grown and not proposed and not last.complete:
        return None
    delta = speculation_pb2.TreeDelta(
        session_id=last.session_id.partition(":")[2],
        parent_ids=[parent.id for _, parent in grown],
        token_ids=[node.token_id for node, _ in grown],
        log_probs=[node.log_prob for node, _ in grown],
        committed_length=last.committed_length,
        complete=last.complete,
        proposals=[
            speculation_pb2.TreeDelta.NodeProposals(node_id=node.id, proposals=message) for node, message in proposed
        ],
    )
    timings = delta.timings
    timings.queue_ns, timings.total_ns = last.queue_ns, last.total_ns
    timings.forward_ns = sum(part.forward_ns for part in parts)
    return delta
