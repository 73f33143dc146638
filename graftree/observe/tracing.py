"""`Tracer` and `Span`: one trace per request across the tiers, and nothing at all where tracing is off.

A trace's context travels as W3C traceparent text: in the metadata of Generate, and in the messages that open a
session on a pod, because one stream carries many sessions. A tier that does not trace hands on what it was given.

    generate (router) ── session (router), one per sample ──┬── verify (verifier)    ◄┄ link ┄ verify step, of many
                                                            └── draft (speculator)             requests at once

OpenTelemetry is imported only where `trace_endpoint` is set (the extra `tracing`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from graftree.config_parts import ObservedConfig
from graftree.errors import ConfigError

Kind = Literal["internal", "server", "consumer"]
Attribute = str | int | float | bool

METADATA_KEY = "traceparent"

# https://www.w3.org/TR/trace-context/#traceparent-header, version 00; ids of zeros are invalid.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


class Span(ABC):
    """A piece of a request's life. May be used from any thread.

    Attributes:
        traceparent: to be handed to whatever happens below it; empty = nobody traces.
        recording: whether anything of it is kept.
    """

    traceparent: str = ""
    recording: bool = False

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, or empty."""
        return self.traceparent[3:35]

    @abstractmethod
    def set(self, **attributes: Attribute) -> None:
        """Describe it further."""

    @abstractmethod
    def event(self, name: str, **attributes: Attribute) -> None:
        """Something happened now."""

    @abstractmethod
    def end(self, error: BaseException | None = None) -> None:
        """It is over; later calls do nothing."""


class Tracer(ABC):
    """Makes spans."""

    @abstractmethod
    def start(
        self,
        name: str,
        *,
        parent: str = "",
        kind: Kind = "internal",
        links: Sequence[Span] = (),
        **attributes: Attribute,
    ) -> Span:
        """Begin a span.

        Args:
            parent: traceparent of what it belongs to; empty or malformed = it begins a trace.
            links: spans of other traces that it serves; with them it is kept if any of them is.
        """

    @abstractmethod
    def close(self) -> None:
        """Send what is left. Blocks for seconds at most."""


class _NoSpan(Span):
    """Keeps nothing but the context it was given."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def set(self, **attributes: Attribute) -> None:
        pass

    def event(self, name: str, **attributes: Attribute) -> None:
        pass

    def end(self, error: BaseException | None = None) -> None:
        pass


class _NoTracer(Tracer):
    def start(
        self,
        name: str,
        *,
        parent: str = "",
        kind: Kind = "internal",
        links: Sequence[Span] = (),
        **attributes: Attribute,
    ) -> Span:
        return _NoSpan(parent) if is_traceparent(parent) else NO_SPAN

    def close(self) -> None:
        pass


NO_SPAN: Span = _NoSpan()
NO_TRACER: Tracer = _NoTracer()


def is_traceparent(text: str) -> bool:
    """Whether `text` names a trace."""
    return _TRACEPARENT.fullmatch(text) is not None


def parent_of(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """The traceparent among a call's metadata; empty where there is none, or none that is valid."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, str) and is_traceparent(value):
            return value
    return ""


def tracer(config: ObservedConfig, *, tier: str, pod_id: str) -> Tracer:
    """What a pod traces with.

    Raises:
        ConfigError: names trace_endpoint: OpenTelemetry is not installed, or the file cannot be written.
    """
    if not config.trace_endpoint:
        return NO_TRACER
    try:
        from graftree.observe.otel import OtelTracer
    except ImportError as error:
        limit = f"needs OpenTelemetry (pip install 'graftree[tracing]'): {error}"
        raise ConfigError("trace_endpoint", config.trace_endpoint, limit) from None
    return OtelTracer(config.trace_endpoint, config.trace_sample_ratio, tier=tier, pod_id=pod_id)
