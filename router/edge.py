"""`Edge`: who may call the public service, how much, and the line that says they did.

Without `api_keys` everybody may, and there is one tenant: nobody in particular.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from graftree.config import RouterConfig
from graftree.errors import GraftreeError, Unauthenticated
from graftree.observe.tracing import parent_of
from graftree.security.keys import ApiKey, KeyRing
from graftree.v1.generation_pb2 import GenerateResponse
from router.audit import AuditLog
from router.caller import NOBODY, Caller, public_id
from router.limits import Allowance

AUTHORIZATION = "authorization"
SCHEME = "bearer "


@dataclass
class Visit:
    """One call while it lasts.

    Attributes:
        caller: on whose behalf.
        key: the key it came with; None = there are none.
        request_id, prompt_tokens, completion_tokens: of what is streamed to it.
    """

    caller: Caller = NOBODY
    key: ApiKey | None = None
    request_id: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    allowance: Allowance | None = field(default=None, repr=False)

    @property
    def sees_pods(self) -> bool:
        """Whether it may know what stands behind this router."""
        return self.key is None or self.key.admin

    def passed(self, event: GenerateResponse) -> None:
        """Count an event that goes to the caller."""
        if event.HasField("chunk"):
            tokens = len(event.chunk.token_ids)
            self.completion_tokens += tokens
        elif event.HasField("started"):
            tokens = event.started.prompt_tokens
            self.prompt_tokens += tokens
            self.request_id = public_id(event.started.request_id)
        else:
            return
        if self.allowance is not None:
            self.allowance.charge(tokens)


class Edge:
    """Of one router.

    Args:
        clock: seconds, monotonic.

    Raises:
        ConfigError: names api_keys or audit_log.
    """

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.keys = KeyRing(config.api_keys) if config.api_keys else None
        self._audit = AuditLog(config.audit_log or ("-" if config.api_keys else ""))
        self._allowances: dict[str, Allowance] = {}

    @contextmanager
    def visit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[Visit]:
        """A call's stay.

        Raises:
            Unauthenticated: without a valid key.
            ResourceExhausted: the key's limit is reached.
        """
        began, visit, code = self._clock(), Visit(), "OK"
        try:
            self._admit(visit, context.invocation_metadata())
            yield visit
        except GraftreeError as error:
            code = error.reason
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except BaseException:
            code = "INTERNAL"
            raise
        finally:
            if visit.allowance is not None:
                visit.allowance.leave()
            self._audit.write(
                method=method,
                peer=context.peer(),
                key=visit.key.name if visit.key else "",
                tenant=visit.caller.tenant,
                request_id=visit.request_id,
                code=code,
                prompt_tokens=visit.prompt_tokens,
                completion_tokens=visit.completion_tokens,
                seconds=round(self._clock() - began, 6),
            )

    def _admit(self, visit: Visit, metadata: Any) -> None:
        traceparent = parent_of(metadata)
        if self.keys is None:
            visit.caller = Caller(traceparent=traceparent)
            return
        visit.key = key = self.keys.find(_bearer(metadata))
        visit.caller = Caller(key.tenant, traceparent, key.max_priority)
        allowance = self._allowances.get(key.name)
        if allowance is None:
            allowance = self._allowances[key.name] = Allowance(key, self._clock)
        allowance.follow(key)
        allowance.enter()
        visit.allowance = allowance

    def close(self) -> None:
        """Close the audit log."""
        self._audit.close()


def _bearer(metadata: Any) -> str:
    for name, value in metadata or ():
        if name == AUTHORIZATION and isinstance(value, str) and value[: len(SCHEME)].lower() == SCHEME:
            return value[len(SCHEME) :].strip()
    raise Unauthenticated("no valid API key: send it as authorization: Bearer <key>")
