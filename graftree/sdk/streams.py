"""`Stream` and `AsyncStream`: the chunks of one generation, over as many calls as it takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import grpc

from graftree.errors import Cancelled, Unavailable
from graftree.sdk.answer import Answer
from graftree.sdk.journey import Journey, failure
from graftree.sdk.results import Chunk, Result
from graftree.v1.generation_pb2 import GenerateResponse

Open = Callable[[Journey], Any]  # starts the call that a journey asks for


class _Generation:
    """One call after the other, and what has come of them. A call that nobody holds any more cancels itself."""

    def __init__(self, journey: Journey, open_: Open, stopped: threading.Event | asyncio.Event) -> None:
        self._journey, self._open, self._stopped = journey, open_, stopped
        self._answer = Answer(sampled=journey.sampled)
        self._cancelled = False
        self._call = open_(journey)

    @property
    def request_id(self) -> str:
        """Id of the generation; "" before its first event."""
        return self._answer.started.request_id if self._answer.started else ""

    @property
    def result(self) -> Result:
        """The whole generation. Raises: Unavailable before its end."""
        return self._answer.result()

    @property
    def reconnects(self) -> int:
        """Calls beyond the first one."""
        return self._journey.reconnects

    def cancel(self) -> None:
        """Give the generation up; router and pods drop it. Iteration then raises Cancelled. No-op after the end."""
        self._cancelled = True
        self._stopped.set()
        self._call.cancel()

    def _push(self, event: GenerateResponse) -> Chunk | None:
        chunk = self._answer.push(event)
        self._journey.heard(progress=chunk is not None)
        return chunk

    def _pause(self, error: grpc.RpcError | Unavailable) -> float | None:
        """Seconds until the next call, after one ended with `error`; None = nothing is missing.

        Raises:
            GraftreeError: there is no going on.
        """
        found, broken = failure(error) if isinstance(error, grpc.RpcError) else (error, True)
        if self._cancelled:
            raise found if isinstance(found, Cancelled) else Cancelled("cancelled by the caller")
        if broken and self._answer.complete:
            return None
        return self._journey.failed(found, self._answer, broken=broken)

    def _call_again(self) -> None:
        self._call = self._open(self._journey)
        if self._cancelled:  # by another thread, meanwhile
            self._call.cancel()


class Stream(_Generation):
    """Chunks of one generation, in order. Leaving the `with` block, `close`, or dropping the stream cancels it."""

    def __init__(self, journey: Journey, open_: Open) -> None:
        self._pausing = threading.Event()
        super().__init__(journey, open_, self._pausing)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while True:
            try:
                for event in self._call:
                    if (chunk := self._push(event)) is not None:
                        return chunk
                self._answer.result()  # a stream that ended without its last event is an error, not an end
                raise StopIteration
            except (grpc.RpcError, Unavailable) as error:
                ended = error
            pause = self._pause(ended)
            if pause is None:
                raise StopIteration
            self._pausing.wait(pause)
            self._call_again()

    def close(self) -> None:
        """As `cancel`."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class AsyncStream(_Generation):
    """`Stream` for asyncio."""

    def __init__(self, journey: Journey, open_: Open) -> None:
        self._pausing = asyncio.Event()
        super().__init__(journey, open_, self._pausing)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            try:
                while (event := await self._call.read()) is not grpc.aio.EOF:
                    if (chunk := self._push(event)) is not None:
                        return chunk
                self._answer.result()
                raise StopAsyncIteration
            except (grpc.RpcError, Unavailable) as error:
                ended = error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._cancelled and not (task and task.cancelling()):
                    raise Cancelled("cancelled by the caller") from None
                raise
            pause = self._pause(ended)
            if pause is None:
                raise StopAsyncIteration
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._pausing.wait()
            self._call_again()

    async def aclose(self) -> None:
        """As `cancel`."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
