"""`Caller`: on whose behalf the router works."""

from __future__ import annotations

from dataclasses import dataclass

from graftree.errors import InvalidArgument
from router.checks import MAX_PRIORITY

SEPARATOR = ":"


@dataclass(frozen=True)
class Caller:
    """Who sent a request, and which trace it belongs to.

    Attributes:
        tenant: whose generations it may reach; empty = there are no tenants.
        traceparent: W3C trace context of the call; empty = none.
        max_priority: highest one that its requests may have.
    """

    tenant: str = ""
    traceparent: str = ""
    max_priority: int = MAX_PRIORITY

    def check_priority(self, priority: int) -> None:
        """Raises InvalidArgument where it may not ask for that much."""
        if priority > self.max_priority:
            raise InvalidArgument("priority", priority, f"at most {self.max_priority} with this API key")

    def scoped(self, request_id: str) -> str:
        """The id under which a request is known inside: another tenant's of the same name is another one."""
        return f"{self.tenant}{SEPARATOR}{request_id}" if self.tenant else request_id


def public_id(scoped: str) -> str:
    """The id as the client knows it."""
    return scoped.rpartition(SEPARATOR)[2]


NOBODY = Caller()
