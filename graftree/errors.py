"""Every exception Graftree raises on purpose.

GraftreeError                       INTERNAL
 ├── ConfigError                    FAILED_PRECONDITION   a key of the configuration is unknown or out of range
 ├── InvalidArgument                INVALID_ARGUMENT      a field of a request: names field, value and limit
 │    ├── InvalidTree               INVALID_ARGUMENT      a token tree that breaks an invariant
 │    └── ContextTooLong            INVALID_ARGUMENT      more tokens than the model or the cache takes
 ├── NotFound                       NOT_FOUND             session, model or pod that nobody knows
 ├── AlreadyExists                  ALREADY_EXISTS        a request id in use for another request
 ├── Incompatible                   FAILED_PRECONDITION   a model or vocabulary that does not fit: says why
 ├── Stale                          ABORTED               a step, delta or commit for a root that has moved on
 │    └── LeaseLost                 ABORTED               another owner holds the session's epoch
 ├── Unauthenticated                UNAUTHENTICATED       no valid API key
 ├── ResourceExhausted              RESOURCE_EXHAUSTED    no KV blocks, sessions or queue places left
 ├── DeadlineExceeded               DEADLINE_EXCEEDED     the caller's own time limit passed
 ├── Cancelled                      CANCELLED             the client went away
 └── Unavailable                    UNAVAILABLE           a pod or Redis cannot be reached
      └── NoVerifier                UNAVAILABLE           no verifier is registered and ready

Each class carries the gRPC status it becomes at a service's edge (`graftree.rpc.status`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import grpc


class _Code:
    """A class attribute: the gRPC status of that name. Models and kernels run where grpc is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> grpc.StatusCode:
        import grpc

        return grpc.StatusCode[self._name]


class GraftreeError(Exception):
    """Root of the tree. `reason` is a stable UPPER_SNAKE word for google.rpc.ErrorInfo."""

    code: ClassVar[_Code] = _Code("INTERNAL")
    reason: ClassVar[str] = "INTERNAL"


class ConfigError(GraftreeError):
    """A configuration key that is unknown, malformed or out of range.

    Args:
        key: the key as the user wrote it (flag or GRAFTREE_* variable).
        value: what was given.
        limit: what would have been accepted, in words.
    """

    code = _Code("FAILED_PRECONDITION")
    reason = "CONFIG"

    def __init__(self, key: str, value: object, limit: str) -> None:
        super().__init__(f"{key}={value!r}: {limit}")
        self.key, self.value, self.limit = key, value, limit


class InvalidArgument(GraftreeError):
    """A request field outside its limit; becomes google.rpc.BadRequest at the edge.

    Args:
        field: path of the field in the message, e.g. ``sampling.temperature``.
        value: what was given (never a prompt's text: pass its length).
        limit: what would have been accepted, in words.
    """

    code = _Code("INVALID_ARGUMENT")
    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} = {value!r}: {limit}")
        self.field, self.value, self.limit = field, value, limit


class InvalidTree(InvalidArgument):
    """A token tree that breaks an invariant of `graftree.tree.TokenTree`."""

    reason = "INVALID_TREE"


class ContextTooLong(InvalidArgument):
    """More tokens than the model's context, the session's limit or the KV pool takes."""

    reason = "CONTEXT_TOO_LONG"


class NotFound(GraftreeError):
    code = _Code("NOT_FOUND")
    reason = "NOT_FOUND"


class AlreadyExists(GraftreeError):
    code = _Code("ALREADY_EXISTS")
    reason = "ALREADY_EXISTS"


class Incompatible(GraftreeError):
    code = _Code("FAILED_PRECONDITION")
    reason = "INCOMPATIBLE"


class Stale(GraftreeError):
    code = _Code("ABORTED")
    reason = "STALE"


class LeaseLost(Stale):
    """Args: `remaining_s` is what is left of the other owner's lease, where that is known."""

    reason = "LEASE_LOST"

    def __init__(self, message: str, remaining_s: float = 0.0) -> None:
        super().__init__(message)
        self.remaining_s = remaining_s


class Unauthenticated(GraftreeError):
    code = _Code("UNAUTHENTICATED")
    reason = "UNAUTHENTICATED"


class ResourceExhausted(GraftreeError):
    """Args: `retry_after_s` is sent as google.rpc.RetryInfo."""

    code = _Code("RESOURCE_EXHAUSTED")
    reason = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(GraftreeError):
    code = _Code("DEADLINE_EXCEEDED")
    reason = "DEADLINE_EXCEEDED"


class Cancelled(GraftreeError):
    code = _Code("CANCELLED")
    reason = "CANCELLED"


class Unavailable(GraftreeError):
    """Args: `retry_after_s` is sent as google.rpc.RetryInfo."""

    code = _Code("UNAVAILABLE")
    reason = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoVerifier(Unavailable):
    reason = "NO_VERIFIER"
