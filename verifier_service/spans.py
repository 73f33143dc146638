"""`Spans`: the engine's part of the requests' traces, and steps that serve many of them."""

from __future__ import annotations

from collections.abc import Sequence

from graftree.observe.tracing import NO_SPAN, NO_TRACER, Span, Tracer
from verifier_service.session import Session, Share


class Spans:
    """A session has a span below its request's; a step has one of its own that links to those of its sessions."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def opened(self, session: Session, traceparent: str) -> None:
        """A session begins."""
        session.span = self._tracer.start(
            "verify",
            parent=traceparent,
            kind="server",
            session_id=session.session_id,
            tokens_at_open=len(session.token_ids),
            tokens_in_cache=session.cached,
        )

    def closed(self, session: Session) -> None:
        """It is over, in whichever way."""
        session.span.set(tokens_at_close=len(session.token_ids))
        session.span.end()

    def step(self, shares: Sequence[Share]) -> Span:
        """A forward begins."""
        if self._tracer is NO_TRACER:
            return NO_SPAN
        served = [share.session.span for share in shares if share.session.span.recording]
        if not served:
            return NO_SPAN
        return self._tracer.start(
            "verify step", kind="consumer", links=served, sessions=len(shares), rows=sum(map(len, shares))
        )
