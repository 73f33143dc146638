"""Traces: one per request with spans of every tier, links from a shared step, and nothing where tracing is off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from graftree import Client, LocalStack
from graftree.config import RouterConfig, build
from graftree.errors import ConfigError, InvalidArgument
from graftree.observe import otel
from graftree.observe.tracing import NO_SPAN, NO_TRACER, is_traceparent, parent_of, tracer
from tests.observed import observed_stack

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACED = {"trace_endpoint": "http://127.0.0.1:1"}
SECRET = "a prompt that nobody else may read"

Spans = list[ReadableSpan]


@pytest.fixture(scope="module")
def memory() -> Iterator[InMemorySpanExporter]:
    """Where the spans of all tiers go instead of to a collector."""
    exporter, real = InMemorySpanExporter(), otel.processor
    patch = pytest.MonkeyPatch()
    patch.setattr(otel, "processor", lambda to: real(to) if to.startswith("file:") else SimpleSpanProcessor(exporter))
    yield exporter
    patch.undo()


@pytest.fixture(scope="module")
def stack(memory: InMemorySpanExporter) -> Iterator[LocalStack]:
    """A whole stack that traces every request."""
    with observed_stack(TRACED) as running:
        yield running


def after(memory: InMemorySpanExporter, client: Client, *requests: dict[str, Any]) -> Spans:
    """The spans that some requests leave, at the same time if they are several."""
    memory.clear()
    with ThreadPoolExecutor(max_workers=len(requests)) as pool:
        list(pool.map(lambda request: client.generate(**request), requests))
    pods_say_goodbye(client)
    return list(memory.get_finished_spans())


def pods_say_goodbye(client: Client) -> None:
    """A session's close travels behind its answer: wait until no pod has one."""
    while any(pod.sessions for pod in client.model_info().pods):
        pass
    client.generate("x", max_new_tokens=1, speculation=False)


def by_trace(spans: Spans) -> dict[int, Spans]:
    found: dict[int, Spans] = {}
    for span in spans:
        found.setdefault(span.context.trace_id, []).append(span)
    return found


def tier(span: ReadableSpan) -> str:
    return str(span.resource.attributes["service.name"]).removeprefix("graftree-")


def test_one_trace_per_request(memory: InMemorySpanExporter, stack: LocalStack) -> None:
    """Every tier's spans are in the request's one trace, each below the one that caused it."""
    with Client(stack.target) as client:
        spans = after(memory, client, {"prompt": SECRET, "max_new_tokens": 8, "ignore_eos": True})
    roots = [span for span in spans if span.name == "generate"]
    mine = max(by_trace(spans).values(), key=len)
    named = {span.name: span for span in mine}
    assert {(tier(span), span.name) for span in mine} == {
        ("router", "generate"),
        ("router", "session"),
        ("verifier", "verify"),
        ("speculator", "draft"),
    }
    assert named["generate"] in roots
    assert named["generate"].parent is None
    assert named["session"].parent.span_id == named["generate"].context.span_id
    for name in ("verify", "draft"):
        assert named[name].parent.span_id == named["session"].context.span_id
        assert named["session"].start_time <= named[name].start_time
    attributes = dict(named["session"].attributes or {})
    assert attributes["graftree.completion_tokens"] == 8
    assert named["generate"].attributes["graftree.prompt_tokens"] > 0


def test_a_shared_step_links_to_its_requests(memory: InMemorySpanExporter, stack: LocalStack) -> None:
    """A verify step belongs to no request: it has a trace of its own and a link to each session it served."""
    with Client(stack.target) as client:
        requests = [{"prompt": f"{i} {SECRET}", "max_new_tokens": 24, "ignore_eos": True} for i in range(4)]
        spans = after(memory, client, *requests)
    sessions = {span.context.span_id: span for span in spans if span.name == "verify"}
    steps = [span for span in spans if span.name == "verify step"]
    assert len(sessions) >= 4
    assert steps
    assert all(step.parent is None and tier(step) == "verifier" for step in steps)
    assert {link.context.span_id for step in steps for link in step.links} == set(sessions)
    assert max(len(step.links) for step in steps) > 1
    for step in steps:
        assert step.attributes["graftree.sessions"] >= len(step.links)
        for link in step.links:
            assert sessions[link.context.span_id].context.trace_id == link.context.trace_id


def test_samples_have_a_span_each(memory: InMemorySpanExporter, stack: LocalStack) -> None:
    """n samples are n sessions of one trace."""
    with Client(stack.target) as client:
        spans = after(memory, client, {"prompt": "x", "max_new_tokens": 4, "n": 3, "temperature": 1.0, "seed": 1})
    mine = max(by_trace(spans).values(), key=len)
    assert sorted(s.attributes["graftree.sample"] for s in mine if s.name == "session") == [0, 1, 2]
    assert sum(span.name == "verify" for span in mine) == 3


def test_the_callers_trace_goes_on(memory: InMemorySpanExporter, stack: LocalStack) -> None:
    """A client that traces itself finds its request in its own trace."""
    provider = TracerProvider()
    with Client(stack.target) as client:
        memory.clear()
        with provider.get_tracer("app").start_as_current_span("app") as span:
            client.generate("x", max_new_tokens=2)
            mine = span.get_span_context()
        root = next(span for span in memory.get_finished_spans() if span.name == "generate")
    assert root.context.trace_id == mine.trace_id
    assert root.parent is not None
    assert root.parent.span_id == mine.span_id
    assert not trace.get_current_span().get_span_context().is_valid


def test_errors_show(memory: InMemorySpanExporter, stack: LocalStack) -> None:
    """A request that fails leaves a span that says so."""
    with Client(stack.target) as client:
        memory.clear()
        with pytest.raises(InvalidArgument):
            client.generate(token_ids=[10_000_000], max_new_tokens=2)
    root = next(span for span in memory.get_finished_spans() if span.name == "generate")
    assert not root.status.is_ok
    assert root.attributes["error.type"] == "INVALID_ARGUMENT"


def test_no_text_in_spans(memory: InMemorySpanExporter, stack: LocalStack) -> None:
    """Spans carry figures and ids, never what was said."""
    with Client(stack.target) as client:
        result = client.generate(SECRET, max_new_tokens=12, ignore_eos=True)
        spans = after(memory, client, {"prompt": SECRET, "max_new_tokens": 12, "ignore_eos": True})
    text = "\n".join(span.to_json() for span in spans)
    assert SECRET not in text
    assert len(result.text) < 4 or result.text not in text


# Parts.


def test_sampling() -> None:
    """The ratio decides for what begins here, the parent for what goes on, and any linked span for a shared step."""
    exporter = InMemorySpanExporter()
    never = otel.OtelTracer("file:/dev/null", 0.0, tier="router", pod_id="r")
    never._provider.add_span_processor(SimpleSpanProcessor(exporter))
    begun, kept = never.start("begun"), never.start("kept", parent=PARENT)
    dropped = never.start("dropped", parent=PARENT[:-1] + "0")
    assert [span.recording for span in (begun, kept, dropped)] == [False, True, False]
    assert not int(begun.traceparent[-2:], 16) & 1
    assert kept.trace_id == PARENT[3:35]
    assert never.start("step", links=[begun, dropped]).recording is False
    step = never.start("step", links=[begun, kept])
    assert step.recording
    for span in (begun, kept, step):
        span.set(tokens=1)
        span.event("it happened", where="here")
        span.end()
        span.end()
    assert [span.name for span in exporter.get_finished_spans()] == ["kept", "step"]
    assert dict(exporter.get_finished_spans()[0].attributes or {}) == {"graftree.tokens": 1}
    never.close()


def test_off_means_off() -> None:
    """Without an endpoint there is one span that is none; a context that came is handed on."""
    off = tracer(build(RouterConfig, {}), tier="router", pod_id="r")
    assert off is NO_TRACER
    assert off.start("x") is NO_SPAN
    assert off.start("x", parent="rubbish") is NO_SPAN
    handed = off.start("x", parent=PARENT)
    assert (handed.traceparent, handed.trace_id, handed.recording) == (PARENT, PARENT[3:35], False)
    handed.set(a=1)
    handed.event("b")
    handed.end(ValueError())
    off.close()


@pytest.mark.parametrize("text", ["", "x", PARENT.upper(), PARENT + "0", PARENT.replace("00-0", "ff-0"), "0" * 55])
def test_malformed_contexts_are_ignored(text: str) -> None:
    """What a client sends is only taken for a trace context if it is one."""
    assert not is_traceparent(text)
    assert parent_of([("traceparent", text)]) == ""
    assert parent_of([("other", "x"), ("traceparent", text), ("traceparent", PARENT)]) == PARENT
    assert parent_of(None) == ""


def test_to_a_file(tmp_path: Path) -> None:
    """file: writes one JSON object per span; a file that cannot be is an error that names its key."""
    path = tmp_path / "spans.jsonl"
    config = build(RouterConfig, {"trace_endpoint": f"file:{path}"})
    written = tracer(config, tier="router", pod_id="r-1")
    written.start("one").end()
    written.start("two", parent=PARENT).end(InvalidArgument("n", 0, "at least 1"))
    written.close()
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    assert [span["name"] for span in spans] == ["one", "two"]
    assert spans[0]["resource"]["attributes"]["service.instance.id"] == "r-1"
    assert spans[1]["status"]["status_code"] == "ERROR"
    with pytest.raises(ConfigError, match="trace_endpoint"):
        tracer(build(RouterConfig, {"trace_endpoint": f"file:{tmp_path}/no/file"}), tier="router", pod_id="r")


@pytest.mark.parametrize(
    ("key", "value"),
    [("trace_endpoint", "collector:4317"), ("trace_sample_ratio", "1.5"), ("trace_sample_ratio", "-0.1")],
)
def test_wrong_keys(key: str, value: str) -> None:
    """Values that are no endpoint and no share are refused by key."""
    with pytest.raises(ConfigError, match=key):
        build(RouterConfig, {key: value})


def test_opentelemetry_is_optional() -> None:
    """Without the packages everything runs, and asking for traces says which extra is missing."""
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'opentelemetry':\n"
        "            raise ImportError(f'no {name}')\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import router.pod, speculator_service.pod\n"
        "from graftree.config import RouterConfig, build\n"
        "from graftree.errors import ConfigError\n"
        "from graftree.observe.tracing import NO_TRACER, tracer\n"
        "assert tracer(build(RouterConfig, {}), tier='router', pod_id='r') is NO_TRACER\n"
        "try:\n"
        "    tracer(build(RouterConfig, {'trace_endpoint': 'http://c:4317'}), tier='router', pod_id='r')\n"
        "except ConfigError as error:\n"
        "    assert error.key == 'trace_endpoint' and 'graftree[tracing]' in error.limit, error\n"
        "else:\n"
        "    raise AssertionError('no error')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
