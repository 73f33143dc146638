"""`Intake`: one router's messages as commands of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

from graftree.errors import GraftreeError
from graftree.grammar import Grammars
from graftree.v1 import verification_pb2
from verifier_service.engine import Engine
from verifier_service.session import Stream
from verifier_service.worker import Command, Worker


class Intake:
    """Hands commands over in the order they came, session by session.

    A session whose structured output is still being compiled waits for it, on a thread; the others go on.

    Args:
        stream: the router's.
        worker: takes the commands.
        grammars: the engine's, which finds there what was compiled here.
    """

    def __init__(self, stream: Stream, worker: Worker, grammars: Grammars) -> None:
        self._stream, self._worker, self._grammars = stream, worker, grammars
        self._held: dict[str, list[Command]] = {}
        self._compiling: set[asyncio.Task[None]] = set()

    def take(self, request: verification_pb2.VerifyRequest) -> None:
        """Opens, steps and closes of one message."""
        now = time.monotonic_ns()
        ready: list[Command] = []
        for opening in request.opens:
            if opening.HasField("structured_output") and opening.session_id not in self._held:
                self._held[opening.session_id] = []
                task = asyncio.create_task(self._compile(opening))
                self._compiling.add(task)
                task.add_done_callback(self._compiling.discard)
            self._put(opening.session_id, partial(Engine.open, stream=self._stream, message=opening), ready)
        for step in request.steps:
            command = partial(Engine.step, stream=self._stream, message=step, arrived_ns=now)
            self._put(step.session_id, command, ready)
        for session_id in request.closes:
            self._put(session_id, partial(Engine.close, stream=self._stream, session_id=session_id), ready)
        if ready:
            self._worker.submit(*ready)

    def close(self) -> None:
        """The stream is over: nothing more is handed over but its end."""
        self._held.clear()
        for task in self._compiling:
            task.cancel()
        self._worker.submit(partial(Engine.close_stream, stream=self._stream))

    def _put(self, session_id: str, command: Command, ready: list[Command]) -> None:
        self._held.get(session_id, ready).append(command)

    async def _compile(self, opening: verification_pb2.VerifyOpen) -> None:
        with contextlib.suppress(GraftreeError):  # what is refused here is refused again by the engine
            await asyncio.to_thread(self._grammars.compile, opening.structured_output)
        if commands := self._held.pop(opening.session_id, None):
            self._worker.submit(*commands)
