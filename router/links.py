"""`VerifierLink` and `SpeculatorLink`: one long stream to one pod, shared by all sessions that use it.

What sessions queue in one turn of the event loop travels in one message; what the pod sends is handed to its
session at once. Credits keep both sides from piling up messages that the other has no time for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import grpc

from graftree.errors import GraftreeError, Incompatible, Unavailable
from graftree.rpc.options import CHANNEL_OPTIONS
from graftree.rpc.status import from_failure, from_rpc
from graftree.security.tls import ClientTls
from graftree.step_time import StepTime
from graftree.store.registry import PodRecord
from graftree.v1 import speculation_pb2_grpc, verification_pb2_grpc
from graftree.v1.common_pb2 import PodLoad, SessionFailure, StreamHello
from graftree.v1.speculation_pb2 import DraftCommit, DraftOpen, SpeculateRequest, SpeculateResponse, TreeDelta
from graftree.v1.verification_pb2 import Verdict, VerifyOpen, VerifyRequest, VerifyResponse, VerifyStep
from router.metrics import Metrics
from router.pace import Pace

REVISION = 1
CREDITS = 64


class Member(Protocol):
    """A session's place on a link."""

    def failed(self, error: GraftreeError) -> None:
        """The pod gave this session up, or is gone. Called at most once."""


class VerifierMember(Member, Protocol):
    def answered(self, verdict: Verdict) -> None:
        """Raises InvalidArgument for a verdict that cannot be right."""


class SpeculatorMember(Member, Protocol):
    def drafted(self, delta: TreeDelta) -> None:
        """Raises InvalidTree for a delta that breaks an invariant."""


M = TypeVar("M", bound=Member)

# How grpc.aio says that a stream is over; CancelledError stands for the status CANCELLED too, whoever set it.
_BROKEN = (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError)


def _raise_if_cancelled(error: BaseException) -> None:
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


class Link(ABC, Generic[M]):
    """A stream to one pod.

    Args:
        record: where the pod is, from the registry.
        hello: this router's.
        connect_timeout: longest wait for the pod's hello, in seconds.

    Attributes:
        hello: the pod's own, once connected.
        load: its last word on itself.
        tls: of the connection; None = plaintext.
        options: of the channel.
        on_change: called when it becomes able or unable to take a session.
        members: wire id -> session.
    """

    def __init__(self, record: PodRecord, hello: StreamHello, connect_timeout: float, metrics: Metrics) -> None:
        self.record = record
        self.hello = StreamHello()
        self.load = PodLoad()
        self.members: dict[str, M] = {}
        self.metrics = metrics
        self.connected = False
        self.on_change: Callable[[], None] = lambda: None
        self._others = record.sessions  # sessions of other routers
        self._own_hello = hello
        self._connect_timeout = connect_timeout
        self.tls: ClientTls | None = None
        self.options = CHANNEL_OPTIONS
        self._rests_until = -math.inf  # event loop time
        self._queue: list[Any] = []
        self._queued = asyncio.Event()
        self._owed = 0  # credits to give back
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None

    @property
    def draining(self) -> bool:
        return self.load.draining or self.record.draining

    @property
    def silent(self) -> bool:
        """Whether it did not do in time what it was asked to, and has said nothing since."""
        return self._rests_until > asyncio.get_running_loop().time()

    def rest(self, seconds: float) -> None:
        """It is silent: for so long others come first, if it does not speak before."""
        self._rests_until = asyncio.get_running_loop().time() + seconds

    @property
    def sessions(self) -> int:
        """Sessions on the pod: ours as they are, those of other routers as it last said."""
        return len(self.members) + self._others

    @property
    def full(self) -> bool:
        limit = self.load.max_sessions or self.record.max_sessions
        return bool(limit) and self.sessions >= limit

    @abstractmethod
    def _start_call(self, channel: grpc.aio.Channel) -> Any: ...

    @abstractmethod
    def _message(self, items: Sequence[Any], credits: int) -> Any: ...

    @abstractmethod
    def _dispatch(self, message: Any) -> None:
        """Hand a message to its sessions."""

    @abstractmethod
    def _hello_message(self, hello: StreamHello, credits: int) -> Any: ...

    async def connect(self) -> None:
        """Open the stream and exchange hellos.

        Raises:
            Unavailable: no hello in time.
            Incompatible: another protocol revision.
            InvalidArgument: figures that cannot be right.
        """
        if self.tls is None:
            self._channel = grpc.aio.insecure_channel(self.record.address, options=self.options)
        else:
            self._channel = self.tls.channel(self.record.address, self.options)
        self._call = self._start_call(self._channel)
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self._call.write(self._hello_message(self._own_hello, CREDITS))
                first = await self._call.read()
        except TimeoutError:
            raise Unavailable(f"{self.record.address}: no hello within {self._connect_timeout} s") from None
        except _BROKEN as error:
            _raise_if_cancelled(error)
            raise await self._reason(error) from None
        if first is grpc.aio.EOF:
            raise await self._reason(None)
        if not first.HasField("hello") or first.hello.revision != REVISION:
            revision = first.hello.revision if first.HasField("hello") else "none"
            raise Incompatible(f"{self.record.address}: protocol revision {revision}, this router speaks {REVISION}")
        self.hello = first.hello
        self._take_figures(first)
        self.connected = True

    async def serve(self) -> None:
        """Carry messages until the stream ends; then every session on it has failed.

        Raises:
            Unavailable: the stream ended.
            InvalidArgument: the pod sent something that cannot be right.
        """
        writer = asyncio.create_task(self._write())
        error: GraftreeError = Unavailable(f"{self.record.pod_id}: link closed")
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._rests_until = -math.inf
                self._take_figures(message)
                self._dispatch(message)
                self._owed += 1
                if self._owed >= CREDITS // 2:
                    self._put(None)  # nothing to say but the credits
            error = await self._reason(None)
            raise error
        except _BROKEN as broken:
            _raise_if_cancelled(broken)
            error = await self._reason(broken)
            raise error from None
        except GraftreeError as offence:
            error = offence
            raise
        finally:
            self.connected = False
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            self._fail_all(Unavailable(f"{self.record.pod_id} is gone: {error}"))

    async def close(self) -> None:
        """End the stream. Sessions still on it fail."""
        self.connected = False
        self._fail_all(Unavailable(f"{self.record.pod_id}: link closed"))
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close()

    def leave(self, wire_id: str) -> None:
        """Forget a session here and, at once, on the pod."""
        with self._change():
            left = self.members.pop(wire_id, None) is not None
        if left and self.connected:
            self._put(wire_id)

    def take_record(self, record: PodRecord) -> None:
        """What the registry says now."""
        with self._change():
            self.record = record
            # A second old, so it may count sessions of ours that have ended: it can lower the figure, not raise it.
            self._others = min(self._others, max(0, record.sessions - len(self.members)))

    def _take_figures(self, message: Any) -> None:
        """What a message says about the pod itself."""
        if message.HasField("load"):
            self._take_load(message.load)

    def _take_load(self, load: PodLoad) -> None:
        with self._change():
            self.load = load
            self._others = max(0, load.sessions - len(self.members))

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Tells of what has become different inside."""
        before = (self.draining, self.full)
        yield
        if (self.draining, self.full) != before:
            self.on_change()

    def _fail_all(self, error: GraftreeError) -> None:
        members, self.members = self.members, {}
        for member in members.values():
            member.failed(error)

    def _failures(self, failures: Sequence[SessionFailure]) -> None:
        for failure in failures:
            member = self.members.pop(failure.session_id, None)
            if member is not None:
                member.failed(from_failure(failure))

    def _put(self, item: Any) -> None:
        self._queue.append(item)
        self._queued.set()

    async def _write(self) -> None:
        # Sessions whose answers came in one message have all queued their next step when this task wakes: waiting
        # for more, as `Outbox` does, would put the work of other tasks before them.
        with contextlib.suppress(*_BROKEN):  # the reader says why
            while True:
                await self._queued.wait()
                self._queued.clear()
                items, self._queue = self._queue, []
                credits, self._owed = self._owed, 0
                await self._call.write(self._message(items, credits))

    async def _reason(self, error: BaseException | None) -> GraftreeError:
        """Why the stream ended, as Unavailable unless the pod said something else."""
        if isinstance(error, grpc.RpcError):
            reason = from_rpc(error)
        else:
            code, details = await self._call.code(), await self._call.details()
            reason = Unavailable(f"stream ended: {code.name} {details or ''}".rstrip())
        return reason if isinstance(reason, Incompatible) else Unavailable(f"{self.record.address}: {reason}")


class VerifierLink(Link[VerifierMember]):
    """The stream to one verifier.

    Attributes:
        step_time: what a step takes there; None = it has not said.
        pace: what rounds take there.
    """

    step_time: StepTime | None = None

    def __init__(self, record: PodRecord, hello: StreamHello, connect_timeout: float, metrics: Metrics) -> None:
        super().__init__(record, hello, connect_timeout, metrics)
        self.pace = Pace()

    def join(self, member: VerifierMember, opening: VerifyOpen) -> None:
        self.members[opening.session_id] = member
        self._put(opening)

    def step(self, step: VerifyStep) -> None:
        self._put(step)

    def _start_call(self, channel: grpc.aio.Channel) -> Any:
        return verification_pb2_grpc.VerificationServiceStub(channel).Verify()

    def _hello_message(self, hello: StreamHello, credits: int) -> VerifyRequest:
        return VerifyRequest(hello=hello, credits=credits)

    def _message(self, items: Sequence[Any], credits: int) -> VerifyRequest:
        return VerifyRequest(
            opens=[item for item in items if isinstance(item, VerifyOpen)],
            steps=[item for item in items if isinstance(item, VerifyStep)],
            closes=[item for item in items if isinstance(item, str)],
            credits=credits,
        )

    def _take_figures(self, message: VerifyResponse) -> None:
        super()._take_figures(message)
        if message.HasField("step_time"):
            self.step_time = StepTime.from_proto(message.step_time)

    def _dispatch(self, message: VerifyResponse) -> None:
        for verdict in message.verdicts:
            member = self.members.get(verdict.session_id)
            if member is None:
                self.metrics.late_verdicts += 1
            else:
                member.answered(verdict)
        self._failures(message.failures)


class SpeculatorLink(Link[SpeculatorMember]):
    """The stream to one speculator."""

    def __init__(self, record: PodRecord, hello: StreamHello, connect_timeout: float, metrics: Metrics) -> None:
        super().__init__(record, hello, connect_timeout, metrics)
        self._moving: set[str] = set()  # members that draft here until another pod has begun to

    @property
    def staying(self) -> int:
        """Sessions of this router that are to remain here."""
        return len(self.members.keys() - self._moving)

    def moves(self, wire_id: str, *, away: bool) -> None:
        """A member is on its way to another pod, or no longer."""
        (self._moving.add if away else self._moving.discard)(wire_id)

    def leave(self, wire_id: str) -> None:
        """As `Link.leave`."""
        self._moving.discard(wire_id)
        super().leave(wire_id)

    def _failures(self, failures: Sequence[SessionFailure]) -> None:
        self._moving.difference_update(failure.session_id for failure in failures)
        super()._failures(failures)

    def join(self, member: SpeculatorMember, opening: DraftOpen) -> None:
        self.members[opening.session_id] = member
        self._put(opening)

    def commit(self, commit: DraftCommit) -> None:
        self._put(commit)

    def _start_call(self, channel: grpc.aio.Channel) -> Any:
        return speculation_pb2_grpc.SpeculationServiceStub(channel).Speculate()

    def _hello_message(self, hello: StreamHello, credits: int) -> SpeculateRequest:
        return SpeculateRequest(hello=hello, credits=credits)

    def _message(self, items: Sequence[Any], credits: int) -> SpeculateRequest:
        return SpeculateRequest(
            opens=[item for item in items if isinstance(item, DraftOpen)],
            commits=[item for item in items if isinstance(item, DraftCommit)],
            closes=[item for item in items if isinstance(item, str)],
            credits=credits,
        )

    def _dispatch(self, message: SpeculateResponse) -> None:
        for delta in message.deltas:
            member = self.members.get(delta.session_id)
            if member is None:
                self.metrics.late_deltas += 1
            else:
                member.drafted(delta)
        self._failures(message.failures)
