"""Spans over the wire to a collector."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from graftree.config import VerifierConfig, build
from graftree.observe.tracing import tracer


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector and its address."""
    service, server = Collector(), grpc.server(ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def test_spans_reach_a_collector(collector: tuple[Collector, str]) -> None:
    """OTLP over gRPC: what ended before the pod did has arrived when the pod is gone, with the pod's name on it."""
    service, endpoint = collector
    config = build(VerifierConfig, {"trace_endpoint": endpoint})
    sending = tracer(config, tier="verifier", pod_id="v-1")
    sending.start("verify", kind="server", sessions=2).end()
    sending.close()
    (resource,) = service.requests[0].resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("graftree-verifier", "v-1")
    (span,) = resource.scope_spans[0].spans
    assert span.name == "verify"
    assert span.attributes[0].key == "graftree.sessions"


def test_a_collector_that_is_away_stops_nobody() -> None:
    """Spans are lost then, within seconds, and nothing else is."""
    config = build(VerifierConfig, {"trace_endpoint": "http://127.0.0.1:1"})
    lost = tracer(config, tier="verifier", pod_id="v-1")
    lost.start("verify").end()
    lost.close()
