"""`VerificationServicer`: the bidirectional stream between a router and this verifier's engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TypeAlias

import grpc
import structlog

from graftree.errors import GraftreeError, InvalidArgument
from graftree.grammar import Grammars
from graftree.rpc.outbox import Outbox
from graftree.rpc.status import abort
from graftree.rpc.ticker import LOAD_INTERVAL_SECONDS, Ticker
from graftree.v1 import common_pb2, verification_pb2, verification_pb2_grpc
from verifier_service.engine import Engine
from verifier_service.session import Answer, Stream
from verifier_service.worker import Command, Worker

log = structlog.get_logger(__name__)

REVISION = 1

Item: TypeAlias = Answer | common_pb2.PodLoad


class VerificationServicer(verification_pb2_grpc.VerificationServiceServicer):
    """One per pod; lives on the pod's event loop."""

    def __init__(self, hello: common_pb2.StreamHello, engine: Engine, worker: Worker, grammars: Grammars) -> None:
        """
        Args:
            hello: what every stream is answered first.
            engine: read for its load only.
            worker: takes the streams' commands.
            grammars: the engine's.
        """
        self._hello, self._engine, self._worker, self._grammars = hello, engine, worker, grammars
        self._outboxes: set[Outbox[Item]] = set()
        self._ticker = Ticker(self._send_load, LOAD_INTERVAL_SECONDS)

    async def Verify(
        self, request_iterator: AsyncIterator[verification_pb2.VerifyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[verification_pb2.VerifyResponse]:
        """See protos/graftree/v1/verification.proto."""
        loop = asyncio.get_running_loop()
        outbox: Outbox[Item] = Outbox(credits=0)

        def sink(answers: Sequence[Answer]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(outbox.put, *answers)

        stream = Stream(sink)
        first = await anext(request_iterator, None)
        if first is None:
            return
        if first.hello.revision != REVISION:
            await abort(context, InvalidArgument("hello.revision", first.hello.revision, f"{REVISION}, sent first"))
        reader = asyncio.create_task(self._read(first, request_iterator, stream, outbox))
        self._outboxes.add(outbox)
        try:
            yield verification_pb2.VerifyResponse(hello=self._hello, load=self._engine.load())
            while items := await outbox.take():
                yield _compose(items)
            try:
                await reader
            except GraftreeError as error:
                await abort(context, error)
        finally:
            # A cancelled handler may be closed by GeneratorExit, so nothing here awaits.
            reader.cancel()
            self._outboxes.discard(outbox)
            self._worker.submit(partial(Engine.close_stream, stream=stream))

    async def _read(
        self,
        first: verification_pb2.VerifyRequest,
        rest: AsyncIterator[verification_pb2.VerifyRequest],
        stream: Stream,
        outbox: Outbox[Item],
    ) -> None:
        """Turn messages into commands until the router ends its side."""
        try:
            await self._compile(first)
            self._take(first, stream, outbox)
            async for request in rest:
                if request.HasField("hello"):
                    raise InvalidArgument("hello", request.hello.revision, "sent once, in the first message")
                await self._compile(request)
                self._take(request, stream, outbox)
        finally:
            outbox.close()

    async def _compile(self, request: verification_pb2.VerifyRequest) -> None:
        """On a thread, so that the engine finds it done. What is refused here is refused again there."""
        for message in request.opens:
            if message.HasField("structured_output"):
                with contextlib.suppress(GraftreeError):
                    await asyncio.to_thread(self._grammars.compile, message.structured_output)

    def _take(self, request: verification_pb2.VerifyRequest, stream: Stream, outbox: Outbox[Item]) -> None:
        now = time.monotonic_ns()
        if request.credits:
            outbox.grant(request.credits)
        commands: list[Command] = [partial(Engine.open, stream=stream, message=message) for message in request.opens]
        commands += [
            partial(Engine.step, stream=stream, message=message, arrived_ns=now) for message in request.steps
        ]
        commands += [partial(Engine.close, stream=stream, session_id=session_id) for session_id in request.closes]
        if commands:
            self._worker.submit(*commands)

    def load_changed(self) -> None:
        """Tell every router the load, now or when the last time is long enough ago."""
        self._ticker.changed()

    def _send_load(self) -> None:
        load = self._engine.load()
        for outbox in self._outboxes:
            outbox.put(load)

    def close(self) -> None:
        """Send no load any more."""
        self._ticker.close()


def _compose(items: Sequence[Item]) -> verification_pb2.VerifyResponse:
    """One message of all that waited; of several loads the last one."""
    response = verification_pb2.VerifyResponse()
    for item in items:
        if isinstance(item, verification_pb2.Verdict):
            response.verdicts.append(item)
        elif isinstance(item, common_pb2.SessionFailure):
            response.failures.append(item)
        else:
            response.load.CopyFrom(item)
    return response
