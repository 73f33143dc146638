"""`VerificationServicer`: the bidirectional stream between a router and this verifier's engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
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
from verifier_service.intake import Intake
from verifier_service.session import Answer, Stream
from verifier_service.worker import Worker

log = structlog.get_logger(__name__)

REVISION = 1

Item: TypeAlias = Answer | common_pb2.PodLoad | verification_pb2.StepTime


class VerificationServicer(verification_pb2_grpc.VerificationServiceServicer):
    """One per pod; lives on the pod's event loop."""

    def __init__(self, hello: common_pb2.StreamHello, engine: Engine, worker: Worker, grammars: Grammars) -> None:
        """
        Args:
            hello: what every stream is answered first.
            engine: read for its load and step time only.
            worker: takes the streams' commands.
            grammars: the engine's.
        """
        self._hello, self._engine, self._worker, self._grammars = hello, engine, worker, grammars
        self._outboxes: set[Outbox[Item]] = set()
        self._told = engine.step_times.latest
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
        intake = Intake(stream, self._worker, self._grammars)
        reader = asyncio.create_task(self._read(first, request_iterator, intake, outbox))
        self._outboxes.add(outbox)
        try:
            first_words = _compose([self._engine.load(), *self._step_time()])
            first_words.hello.CopyFrom(self._hello)
            yield first_words
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
            intake.close()

    async def _read(
        self,
        first: verification_pb2.VerifyRequest,
        rest: AsyncIterator[verification_pb2.VerifyRequest],
        intake: Intake,
        outbox: Outbox[Item],
    ) -> None:
        """Take messages in until the router ends its side."""
        try:
            outbox.grant(first.credits)
            intake.take(first)
            async for request in rest:
                if request.HasField("hello"):
                    raise InvalidArgument("hello", request.hello.revision, "sent once, in the first message")
                if request.credits:
                    outbox.grant(request.credits)
                intake.take(request)
        finally:
            outbox.close()

    def load_changed(self) -> None:
        """Tell every router load and step time, now or when the last time is long enough ago."""
        self._ticker.changed()

    def _send_load(self) -> None:
        news: list[Item] = [self._engine.load()]
        if self._engine.step_times.latest != self._told:
            self._told = self._engine.step_times.latest
            news += self._step_time()
        for outbox in self._outboxes:
            outbox.put(*news)

    def _step_time(self) -> list[verification_pb2.StepTime]:
        latest = self._engine.step_times.latest
        return [] if latest is None else [latest.to_proto()]

    def close(self) -> None:
        """Send no load any more."""
        self._ticker.close()


def _compose(items: Sequence[Item]) -> verification_pb2.VerifyResponse:
    """One message of all that waited; of several loads or step times the last one."""
    response = verification_pb2.VerifyResponse()
    for item in items:
        if isinstance(item, verification_pb2.Verdict):
            response.verdicts.append(item)
        elif isinstance(item, common_pb2.SessionFailure):
            response.failures.append(item)
        elif isinstance(item, verification_pb2.StepTime):
            response.step_time.CopyFrom(item)
        else:
            response.load.CopyFrom(item)
    return response
