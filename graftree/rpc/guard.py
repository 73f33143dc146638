"""`GuardedServer`: what a call brings or meets that nobody expected ends that call, by name, and tells nobody more.

gRPC answers a message that does not parse, or any exception of a method, with UNKNOWN, the exception's own words and
a trace in the log, for each such call. Here a message that does not parse is INVALID_ARGUMENT, a method that is not
there UNIMPLEMENTED, and everything else INTERNAL, without words that belong to this side. A message may be small and
yet make much work, two bytes an entry: there is a limit on those, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from graftree.errors import GraftreeError, InvalidArgument
from graftree.rpc.status import abort

MAX_ENTRIES = 16_384  # of one list in a message, lists of numbers aside; a router has far fewer sessions

Behaviour = Callable[[Any, Any], Any]

log = structlog.get_logger(__name__)


class GuardedServer:
    """Stands where a server is given its servicers.

    Args:
        server: takes them.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """As the server's."""
        self._server.add_generic_rpc_handlers(tuple(_Guard(handler) for handler in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Nothing: they would take precedence, and they are those of `add_generic_rpc_handlers`."""


class _Guard(grpc.GenericRpcHandler):
    def __init__(self, inner: grpc.GenericRpcHandler) -> None:
        self._inner = inner
        self._guarded: dict[str, Any] = {}

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call; None where the method is not known here."""
        method = handler_call_details.method
        if method not in self._guarded:
            handler = self._inner.service(handler_call_details)
            if handler is None:
                return None
            self._guarded[method] = _guarded(handler, method)
        return self._guarded[method]


class _Unparsed:
    """Stands for a message that could not be read."""

    def __init__(self, error: DecodeError) -> None:
        self.error = InvalidArgument("message", "bytes", f"a message of the method's type ({error})"[:300])


def _guarded(handler: Any, method: str) -> Any:
    kinds = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, build = kinds[handler.request_streaming, handler.response_streaming]
    reads = _Messages if handler.request_streaming else _message
    if inspect.isasyncgenfunction(behaviour):
        behaviour = _writing(behaviour)
    return build(_call(behaviour, reads, method), _reader(handler.request_deserializer), handler.response_serializer)


def _reader(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return _Unparsed(error)

    return read


def _message(request: Any) -> Any:
    if isinstance(request, _Unparsed):
        raise request.error
    cls: Any = type(request)
    for name in _lists(cls):
        if (count := len(getattr(request, name))) > MAX_ENTRIES:
            raise InvalidArgument(name, f"{count} entries", f"at most {MAX_ENTRIES} in one message")
    return request


@functools.cache
def _lists(cls: Any) -> tuple[str, ...]:
    """Names of the fields whose entries are work each."""
    kinds = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    fields = getattr(cls, "DESCRIPTOR", None)
    return tuple(each.name for each in fields.fields if each.is_repeated and each.type in kinds) if fields else ()


class _Messages:
    """The messages of a stream. No generator: nothing has to be closed."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        return _message(await anext(self._requests))


def _writing(generator: Behaviour) -> Behaviour:
    """A method that yields its answers as one that writes them: a write that fails is then seen here."""

    async def call(request: Any, context: Any) -> None:
        async with contextlib.aclosing(generator(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return call


def _call(behaviour: Behaviour, reads: Callable[[Any], Any], method: str) -> Behaviour:
    async def call(request: Any, context: Any) -> Any:
        try:
            try:
                return await behaviour(reads(request), context)
            except Exception as error:
                await _refuse(error, context, method)
        except grpc.aio.InternalError as error:  # a write or an answer failed: the caller has left
            raise asyncio.CancelledError from error

    return call


async def _refuse(error: Exception, context: Any, method: str) -> None:
    """End the call; what has ended it already goes on."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.InternalError):
        raise error
    if context.done():
        log.debug("a call failed behind its end", method=method, exc_info=error)
    elif isinstance(error, GraftreeError):
        await abort(context, error)
    elif isinstance(error, NotImplementedError):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method is not served here")
    else:
        log.error("a call failed", method=method, exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "the call failed")
