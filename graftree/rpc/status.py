"""Between `graftree.errors` and gRPC: rich status out (google.rpc.Status), the same exception back in."""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from graftree import errors
from graftree.errors import GraftreeError, InvalidArgument, LeaseLost, ResourceExhausted, Unavailable
from graftree.v1 import common_pb2

DOMAIN = "graftree"
DETAILS_KEY = "grpc-status-details-bin"

_VALUE_LIMIT = 200  # characters of an offending value that travel


def _subclasses(cls: type[GraftreeError]) -> list[type[GraftreeError]]:
    return [cls, *(deeper for child in cls.__subclasses__() for deeper in _subclasses(child))]


_CLASSES = _subclasses(GraftreeError)
_BY_REASON = {cls.reason: cls for cls in _CLASSES}
# The first class of a code is the least special one: the list is in pre-order.
_BY_CODE = {cls.code: cls for cls in reversed(_CLASSES)} | {
    grpc.StatusCode.FAILED_PRECONDITION: errors.Incompatible,
}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def to_status(error: GraftreeError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, and BadRequest or RetryInfo where they apply."""
    details: list[any_pb2.Any] = []

    def pack(message: Message) -> None:
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)

    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if isinstance(error, InvalidArgument):
        info.metadata.update(field=error.field, value=repr(error.value)[:_VALUE_LIMIT], limit=error.limit)
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field,
            description=f"got {repr(error.value)[:_VALUE_LIMIT]}; {error.limit}",
            reason=error.reason,
        )
        pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted | Unavailable):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        pack(error_details_pb2.RetryInfo(retry_delay=delay))
    pack(info)
    return status_pb2.Status(code=error.code.value[0], message=str(error)[:2000], details=details)


async def abort(context: grpc.aio.ServicerContext, error: GraftreeError) -> NoReturn:
    """End a call with the rich status of `error`."""
    status = to_status(error)
    await context.abort(error.code, status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")


def from_rpc(error: grpc.RpcError) -> GraftreeError:
    """The exception a peer raised, rebuilt from what `abort` sent; plain statuses map by code."""
    code, message = error.code(), error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            return _from_status(code, status_pb2.Status.FromString(value))
    return _build(_BY_CODE.get(code, GraftreeError), f"{code.name}: {message}", {})


def _from_status(code: grpc.StatusCode, status: status_pb2.Status) -> GraftreeError:
    cls, metadata, retry = _BY_CODE.get(code, GraftreeError), {}, None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            cls, metadata = _BY_REASON.get(info.reason, cls), dict(info.metadata)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            hint = error_details_pb2.RetryInfo()
            detail.Unpack(hint)
            retry = hint.retry_delay.ToMilliseconds() / 1000
    return _build(cls, status.message, metadata, retry)


def _build(
    cls: type[GraftreeError], message: str, metadata: dict[str, str], retry_after_s: float | None = None
) -> GraftreeError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    if isinstance(error, InvalidArgument):
        error.field, error.value, error.limit = (metadata.get(key, "") for key in ("field", "value", "limit"))
    if isinstance(error, ResourceExhausted | Unavailable):
        error.retry_after_s = 1.0 if retry_after_s is None else retry_after_s
    if isinstance(error, LeaseLost):
        error.remaining_s = 0.0
    return error


def to_failure(session_id: str, error: GraftreeError) -> common_pb2.SessionFailure:
    """`error` as one session's failure on a pod stream."""
    failure = common_pb2.SessionFailure(
        session_id=session_id, code=error.code.value[0], reason=error.reason, message=str(error)[:2000]
    )
    if isinstance(error, ResourceExhausted):
        failure.retry_after_ms = round(error.retry_after_s * 1000)
    if isinstance(error, InvalidArgument):
        failure.field, failure.limit = error.field, error.limit
        failure.value = repr(error.value)[:_VALUE_LIMIT]
    return failure


def from_failure(failure: common_pb2.SessionFailure) -> GraftreeError:
    """The exception a pod reported for one session."""
    code = _BY_NUMBER.get(failure.code, grpc.StatusCode.UNKNOWN)
    cls = _BY_REASON.get(failure.reason) or _BY_CODE.get(code, GraftreeError)
    metadata = {"field": failure.field, "value": failure.value, "limit": failure.limit}
    return _build(cls, failure.message, metadata, failure.retry_after_ms / 1000 or None)
