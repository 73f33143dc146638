"""What a client's calls carry beside the request: an API key, and the caller's own trace."""

from __future__ import annotations

import sys


def metadata(api_key: str | None) -> list[tuple[str, str]]:
    """Of one call.

    Args:
        api_key: None = none is sent.
    """
    found = [] if api_key is None else [("authorization", f"Bearer {api_key}")]
    if traceparent := _current_traceparent():
        found.append(("traceparent", traceparent))
    return found


def _current_traceparent() -> str:
    """W3C trace context of the caller's OpenTelemetry span; empty where the program does not trace."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
