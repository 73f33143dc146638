"""`OtelTracer`: spans through OpenTelemetry's SDK, to a collector or a file. Imported only where tracing is on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision as SamplingDecision
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, SamplingResult, StaticSampler, TraceIdRatioBased
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes

from graftree import __version__
from graftree.errors import ConfigError
from graftree.observe.tracing import Attribute, Kind, Span, Tracer, is_traceparent

_KINDS: dict[Kind, SpanKind] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "consumer": SpanKind.CONSUMER,
}
_FLUSH_MS = 2_000


class OtelTracer(Tracer):
    """See `Tracer`.

    Args:
        endpoint: as `trace_endpoint`.
        ratio: share of the traces begun here that are kept.

    Raises:
        ConfigError: the file of a file: endpoint cannot be written.
    """

    def __init__(self, endpoint: str, ratio: float, *, tier: str, pod_id: str) -> None:
        resource = Resource.create(
            {"service.name": f"graftree-{tier}", "service.instance.id": pod_id, "service.version": __version__}
        )
        self._provider = TracerProvider(sampler=_Sampler(ratio), resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor(endpoint))
        self._tracer = self._provider.get_tracer("graftree", __version__)

    def start(
        self,
        name: str,
        *,
        parent: str = "",
        kind: Kind = "internal",
        links: Sequence[Span] = (),
        **attributes: Attribute,
    ) -> Span:
        return _OtelSpan(
            self._tracer.start_span(
                name,
                context=_context(parent),
                kind=_KINDS[kind],
                links=[Link(link.context) for link in links if isinstance(link, _OtelSpan)],
                attributes=_named(attributes),
            )
        )

    def close(self) -> None:
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


class _OtelSpan(Span):
    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self.context = context = span.get_span_context()
        self.recording = span.is_recording()
        flags = int(context.trace_flags)
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def set(self, **attributes: Attribute) -> None:
        if self.recording:
            self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Attribute) -> None:
        if self.recording:
            self._span.add_event(name, _named(attributes))

    def end(self, error: BaseException | None = None) -> None:
        if error is not None and self._span.is_recording():
            # Which field it was, not what it held: a grammar or a stop string is the client's own text.
            self._span.set_status(Status(StatusCode.ERROR, getattr(error, "field", None)))
            self._span.set_attribute("error.type", getattr(error, "reason", type(error).__name__))
        if self._span.is_recording():
            self._span.end()


class _Sampler(Sampler):
    """A span below another is kept as that one is; one with links if any of them is; a first one by the ratio."""

    def __init__(self, ratio: float) -> None:
        self._by_parent = ParentBased(TraceIdRatioBased(ratio))
        self._keep, self._drop = (
            StaticSampler(SamplingDecision.RECORD_AND_SAMPLE),
            StaticSampler(SamplingDecision.DROP),
        )

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        sampler: Sampler = self._by_parent
        if links:
            sampler = self._keep if any(link.context.trace_flags.sampled for link in links) else self._drop
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"Graftree{{{self._by_parent.get_description()}}}"


class _FileExporter(SpanExporter):
    """One JSON object a line, in the SDK's own rendering."""

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError("trace_endpoint", f"file:{path}", f"a file that can be written: {error}") from None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._file.writelines(f"{span.to_json(indent=None)}\n" for span in spans)
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def processor(endpoint: str) -> SpanProcessor:
    """Where ended spans go."""
    if endpoint.startswith("file:"):
        return BatchSpanProcessor(_FileExporter(endpoint.removeprefix("file:")))
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http:")))


def _context(traceparent: str) -> Context:
    """The remote parent's, or one that begins a trace whatever the current span is."""
    if not is_traceparent(traceparent):
        return Context()
    _, trace_id, span_id, flags = traceparent.split("-")
    parent = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


def _named(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    return {f"graftree.{name}": value for name, value in attributes.items()}
