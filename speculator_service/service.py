"""`SpeculationService`: the gRPC face of a speculator pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count

import grpc

from graftree.errors import Incompatible, InvalidArgument, Unavailable
from graftree.observe.tracing import NO_TRACER, Tracer
from graftree.rpc.status import abort
from graftree.rpc.ticker import LOAD_INTERVAL_SECONDS, Ticker
from graftree.v1 import common_pb2, speculation_pb2, speculation_pb2_grpc
from speculator_service.counters import Counters
from speculator_service.engine import Engine
from speculator_service.events import Event
from speculator_service.limits import Limits
from speculator_service.router_stream import RouterStream

REVISION = 1


class SpeculationService(speculation_pb2_grpc.SpeculationServiceServicer):
    """Serves any number of routers' streams with one engine.

    Args:
        hello: what this pod says first.
        limits: of sessions and trees.
        load: the pod's load now.
        tracer: of the sessions.
    """

    def __init__(
        self,
        hello: common_pb2.StreamHello,
        limits: Limits,
        load: Callable[[], common_pb2.PodLoad],
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.counters = Counters()
        self._hello, self._limits, self._load, self._tracer = hello, limits, load, tracer
        self._streams: dict[str, RouterStream] = {}
        self._numbers = count(1)
        self._engine: Engine | None = None
        self.draining = False
        self._empty = asyncio.Event()
        # A load that crossed a router's close counts a session too many there; the next one must come unasked.
        self._ticker = Ticker(self._tell_load, LOAD_INTERVAL_SECONDS)

    def attach(self, engine: Engine) -> None:
        """Use this engine; its events come to `deliver`."""
        self._engine = engine

    @property
    def sessions(self) -> int:
        """Sessions open on all streams."""
        return sum(len(stream) for stream in self._streams.values())

    def deliver(self, events: list[Event]) -> None:
        """Hand events of the engine to the streams whose sessions they are about."""
        for event in events:
            stream = self._streams.get(event.session_id.partition(":")[0])
            if stream is not None:
                stream.deliver(event)

    async def drain(self) -> None:
        """Take no new sessions, tell every router, and wait until they have closed theirs."""
        self.draining = True
        self._tell_load()
        self._left()
        await self._empty.wait()

    def close(self) -> None:
        """Send no load any more."""
        self._ticker.close()

    def _tell_load(self) -> None:
        for stream in self._streams.values():
            stream.tell_load()

    def _left(self) -> None:
        self._ticker.changed()
        if self.draining and not self.sessions:
            self._empty.set()

    async def Speculate(
        self,
        request_iterator: AsyncIterator[speculation_pb2.SpeculateRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """One router's stream; its sessions end with it, however it ends."""
        assert self._engine is not None
        first = await anext(request_iterator, None)
        if first is None:
            return
        try:
            self._check_hello(first)
        except (InvalidArgument, Incompatible, Unavailable) as error:
            await abort(context, error)
        name = str(next(self._numbers))
        stream = RouterStream(
            name,
            self._engine,
            self._limits,
            admits=self._admits,
            load=self._load,
            left=self._left,
            counters=self.counters,
            tracer=self._tracer,
        )
        self._streams[name] = stream
        try:
            await context.write(speculation_pb2.SpeculateResponse(hello=self._hello, load=self._load()))
            await stream.run(first, request_iterator, context.write)
        finally:
            del self._streams[name]
            stream.close()

    def _admits(self) -> bool:
        return not self.draining and self.sessions < self._limits.max_sessions

    def _check_hello(self, request: speculation_pb2.SpeculateRequest) -> None:
        if not request.HasField("hello"):
            raise InvalidArgument("hello", "absent", "the first message of a stream carries it")
        if request.hello.revision != REVISION:
            raise InvalidArgument("hello.revision", request.hello.revision, f"this pod speaks {REVISION}")
        theirs, ours = request.hello.vocab_fingerprint, self._hello.vocab_fingerprint
        if theirs and ours and theirs != ours:
            raise Incompatible(f"the router's vocabulary is {theirs[:12]}, this pod's is {ours[:12]}")
