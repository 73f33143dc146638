"""`Client` and `AsyncClient`: generation over gRPC, whole or as a stream.

    with Client("127.0.0.1:8000") as client:
        result = client.generate("Once upon", max_new_tokens=32, temperature=0.8, seed=7)
        for chunk in client.stream("Once upon"):
            print(chunk.text, end="")

Keywords are those of `graftree.sdk.options.GenerateOptions`. Errors are the classes of `graftree.errors`, as the
service raised them: InvalidArgument with field, value and limit, ResourceExhausted with `retry_after_s`, and so on;
a `timeout` that runs out is DeadlineExceeded. An unknown keyword is a TypeError.

A client may know several routers. Where the one that serves a generation is lost, the client goes on with another at
the same token (`Reconnect`); figures of speculation and of time are then those of the last router.
"""

from __future__ import annotations

from typing import Any, Self, Unpack

import grpc

from graftree.rpc.aio import keep_running
from graftree.rpc.status import from_rpc
from graftree.sdk.options import GenerateOptions
from graftree.sdk.reconnect import Reconnect
from graftree.sdk.results import ModelInfo, Result
from graftree.sdk.routers import Routers
from graftree.sdk.streams import AsyncStream, Stream

__all__ = ["AsyncClient", "Client", "Reconnect"]


class Client(Routers):
    """Connections to routers; safe to share between threads. Keywords: see `graftree.sdk.routers.Routers`."""

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Result:
        """Generate and wait for the end."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Start to generate; the chunks come as they are verified, `Stream.result` holds the whole at the end."""
        return Stream(self._journey(prompt, options), self._open)

    def model_info(self, timeout: float | None = None) -> ModelInfo:
        """What is served, and the pods in use now, as the first router that answers says."""
        *others, last = self._stubs_in_turn()
        for stub in others:
            try:
                return ModelInfo.from_proto(self._ask(stub, timeout))
            except grpc.RpcError:
                continue
        try:
            return ModelInfo.from_proto(self._ask(last, timeout))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def close(self) -> None:
        """Close the connections; what still runs on them is cancelled."""
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _dial(self, target: str) -> Any:
        if self._credentials is None:
            return grpc.insecure_channel(target, options=self._channel_options)
        return grpc.secure_channel(target, self._credentials, options=self._channel_options)


class AsyncClient(Routers):
    """`Client` for asyncio: the same calls, to be awaited. Belongs to the event loop it is first used on."""

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Result:
        """Generate and wait for the end. Cancelling the task cancels the generation."""
        async with self.stream(prompt, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Start to generate; the chunks come as they are verified, `result` holds the whole at the end."""
        return AsyncStream(self._journey(prompt, options), self._open)

    async def model_info(self, timeout: float | None = None) -> ModelInfo:
        """What is served, and the pods in use now, as the first router that answers says."""
        *others, last = self._stubs_in_turn()
        for stub in others:
            try:
                return ModelInfo.from_proto(await self._ask(stub, timeout))
            except grpc.RpcError:
                continue
        try:
            return ModelInfo.from_proto(await self._ask(last, timeout))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def close(self) -> None:
        """Close the connections; what still runs on them is cancelled."""
        for channel in self._channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _dial(self, target: str) -> Any:
        keep_running()
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=self._channel_options)
        return grpc.aio.secure_channel(target, self._credentials, options=self._channel_options)
