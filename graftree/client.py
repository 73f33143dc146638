"""`Client` and `AsyncClient`: generation over gRPC, whole or as a stream.

    with Client("127.0.0.1:8000") as client:
        result = client.generate("Once upon", max_new_tokens=32, temperature=0.8, seed=7)
        for chunk in client.stream("Once upon"):
            print(chunk.text, end="")

Keywords are those of `graftree.sdk.options.GenerateOptions`. Errors are the classes of `graftree.errors`, as the
service raised them: InvalidArgument with field, value and limit, ResourceExhausted with `retry_after_s`, and so on;
a `timeout` that runs out is DeadlineExceeded. An unknown keyword is a TypeError.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self, Unpack

import grpc

from graftree.errors import Cancelled
from graftree.rpc.aio import keep_running
from graftree.rpc.options import CHANNEL_OPTIONS
from graftree.rpc.status import from_rpc
from graftree.sdk.answer import Answer
from graftree.sdk.metadata import metadata
from graftree.sdk.options import GenerateOptions, build_request
from graftree.sdk.results import Chunk, ModelInfo, Result
from graftree.v1 import generation_pb2, generation_pb2_grpc


class _Generation:
    """What `Stream` and `AsyncStream` share: one call and what has come of it. A dropped call cancels itself."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._answer = Answer()
        self._cancelled = False

    @property
    def request_id(self) -> str:
        """Id of the generation; "" before its first event."""
        return self._answer.started.request_id if self._answer.started else ""

    @property
    def result(self) -> Result:
        """The whole generation. Raises: Unavailable before its end."""
        return self._answer.result()

    def cancel(self) -> None:
        """Give the generation up; router and pods drop it. Iteration then raises Cancelled. No-op after the end."""
        self._cancelled = True
        self._call.cancel()


class Stream(_Generation):
    """Chunks of one generation, in order. Leaving the `with` block, `close`, or dropping the stream cancels it."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            for event in self._call:
                if (chunk := self._answer.push(event)) is not None:
                    return chunk
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        self._answer.result()  # a stream that ended without its last event is an error, not an end
        raise StopIteration

    def close(self) -> None:
        """As `cancel`."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class AsyncStream(_Generation):
    """`Stream` for asyncio."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while (event := await self._call.read()) is not grpc.aio.EOF:
                if (chunk := self._answer.push(event)) is not None:
                    return chunk
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled and not (task and task.cancelling()):
                raise Cancelled("cancelled by the caller") from None
            raise
        self._answer.result()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """As `cancel`."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """A connection to a router; safe to share between threads.

    Args:
        target: HOST:PORT, or any other gRPC name.
        credentials: for TLS; None = plaintext.
        api_key: shown with each call; without TLS everybody on the way can read it.
    """

    def __init__(
        self, target: str, *, credentials: grpc.ChannelCredentials | None = None, api_key: str | None = None
    ) -> None:
        self.target = target
        self._api_key = api_key
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Result:
        """Generate and wait for the end."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Start to generate; the chunks come as they are verified, `Stream.result` holds the whole at the end."""
        request, timeout = build_request(prompt, options), options.get("timeout")
        return Stream(self._stub.Generate(request, timeout=timeout, metadata=metadata(self._api_key)))

    def model_info(self, timeout: float | None = None) -> ModelInfo:
        """What is served, and the pods in use now."""
        try:
            answer = self._stub.GetModelInfo(
                generation_pb2.GetModelInfoRequest(), timeout=timeout, metadata=metadata(self._api_key)
            )
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        return ModelInfo.from_proto(answer)

    def close(self) -> None:
        """Close the connection; what still runs on it is cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio: the same calls, to be awaited. Belongs to the event loop it is first used on."""

    def __init__(
        self, target: str, *, credentials: grpc.ChannelCredentials | None = None, api_key: str | None = None
    ) -> None:
        self.target = target
        self._credentials, self._api_key = credentials, api_key
        self._channel: grpc.aio.Channel | None = None

    def _stub(self) -> generation_pb2_grpc.GenerationServiceStub:
        if self._channel is None:  # not in __init__: a channel binds to the running loop
            keep_running()
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.target, options=CHANNEL_OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self.target, self._credentials, options=CHANNEL_OPTIONS)
        return generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Result:
        """Generate and wait for the end. Cancelling the task cancels the generation."""
        async with self.stream(prompt, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Start to generate; the chunks come as they are verified, `result` holds the whole at the end."""
        request, timeout = build_request(prompt, options), options.get("timeout")
        return AsyncStream(self._stub().Generate(request, timeout=timeout, metadata=metadata(self._api_key)))

    async def model_info(self, timeout: float | None = None) -> ModelInfo:
        """What is served, and the pods in use now."""
        try:
            answer = await self._stub().GetModelInfo(
                generation_pb2.GetModelInfoRequest(), timeout=timeout, metadata=metadata(self._api_key)
            )
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        return ModelInfo.from_proto(answer)

    async def close(self) -> None:
        """Close the connection; what still runs on it is cancelled."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
