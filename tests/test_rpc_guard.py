"""What a call brings that nobody expected: each kind by its own code, no words of this side, no harm to others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from graftree.errors import InvalidArgument, Unavailable
from graftree.rpc.guard import MAX_ENTRIES, GuardedServer
from graftree.rpc.options import SERVER_OPTIONS
from graftree.rpc.status import from_rpc
from graftree.v1.speculation_pb2 import SpeculateRequest

SECRET = "what nobody outside needs to know"
NOT_UTF8 = b"\x0a\x01\xff"


async def echo(request: StringValue, context: Any) -> StringValue:
    match request.value:
        case "ours":
            raise Unavailable("come again")
        case "none":
            raise NotImplementedError(SECRET)
        case "fault":
            raise ZeroDivisionError(SECRET)
        case "abort":
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
    return request


async def echoes(requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
    async for request in requests:
        yield await echo(request, context)


async def written(request: StringValue, context: Any) -> None:
    await context.write(request)
    await echo(request, context)


async def count(request: SpeculateRequest, context: Any) -> StringValue:
    return StringValue(value=str(len(request.closes)))


class Lab:
    """A guarded server and a channel to it."""

    async def __aenter__(self) -> Lab:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        read, write = StringValue.FromString, StringValue.SerializeToString
        handlers = {
            "One": grpc.unary_unary_rpc_method_handler(echo, read, write),
            "Many": grpc.stream_stream_rpc_method_handler(echoes, read, write),
            "Written": grpc.unary_stream_rpc_method_handler(written, read, write),
            "Count": grpc.unary_unary_rpc_method_handler(count, SpeculateRequest.FromString, write),
        }
        GuardedServer(self.server).add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.X", handlers),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(None)

    async def call(self, method: str, *bodies: bytes) -> tuple[list[bytes], grpc.StatusCode, str, Any]:
        """Answers, code, details and the error of a call with these messages."""

        async def send() -> AsyncIterator[bytes]:
            for body in bodies:
                yield body

        answers: list[bytes] = []
        call: Any = self.channel.stream_stream(f"/x.X/{method}")(send())
        try:
            async for answer in call:
                answers.append(answer)
        except grpc.RpcError as error:
            return answers, error.code(), error.details() or "", from_rpc(error)
        return answers, await call.code(), "", None


def said(text: str) -> bytes:
    return StringValue(value=text).SerializeToString()


@pytest.mark.parametrize("method", ["One", "Many", "Written"])
async def test_each_kind_has_its_code(method: str) -> None:
    """What does not parse, what is not there and what fails: three codes, and the exception's words stay here."""
    async with Lab() as lab:
        _, code, _, error = await lab.call(method, NOT_UTF8)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(error, InvalidArgument)
        assert error.field == "message"
        wanted = {"none": "UNIMPLEMENTED", "fault": "INTERNAL", "ours": "UNAVAILABLE", "abort": "NOT_FOUND"}
        for text, name in wanted.items():
            _, code, details, _ = await lab.call(method, said(text))
            assert code.name == name
            assert SECRET not in details
            assert "ZeroDivision" not in details
        answers, code, _, _ = await lab.call(method, said("well"))
        assert (answers, code) == ([said("well")], grpc.StatusCode.OK)


async def test_a_stream_is_answered_up_to_the_bad_message() -> None:
    """Messages before it count, none behind it does."""
    async with Lab() as lab:
        answers, code, _, _ = await lab.call("Many", said("a"), said("b"), NOT_UTF8, said("c"))
        assert (answers, code) == ([said("a"), said("b")], grpc.StatusCode.INVALID_ARGUMENT)


async def test_very_many_entries() -> None:
    """A list at the limit is served, one beyond it is refused by its name; numbers are not counted."""
    async with Lab() as lab:
        answers, _, _, _ = await lab.call("Count", SpeculateRequest(closes=["x"] * MAX_ENTRIES).SerializeToString())
        assert answers == [said(str(MAX_ENTRIES))]
        body = SpeculateRequest(closes=["x"] * (MAX_ENTRIES + 1)).SerializeToString()
        _, code, _, error = await lab.call("Count", body)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.field == "closes"


async def test_an_unknown_method() -> None:
    """As without the guard."""
    async with Lab() as lab:
        assert (await lab.call("Nothing", b""))[1] is grpc.StatusCode.UNIMPLEMENTED
