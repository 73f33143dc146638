"""What an orchestrator and a curious user ask every pod: standard health, distinct readiness, reflection."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from graftree import LocalStack

SERVICES = {
    "router": "graftree.v1.GenerationService",
    "speculator": "graftree.v1.SpeculationService",
    "verifier": "graftree.v1.VerificationService",
}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack("random:llama?layers=1", ["ngram"], in_process=True) as running:
        yield running


def health(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status


@pytest.mark.parametrize("tier", SERVICES)
def test_alive_and_ready(stack: LocalStack, tier: str) -> None:
    """A running pod is alive (the empty name) and ready (its service, and the name probes use)."""
    address = stack.pods(tier)[0].address  # type: ignore[arg-type]
    for service in ("", "readiness", SERVICES[tier]):
        assert health(address, service) == SERVING


@pytest.mark.parametrize("tier", SERVICES)
def test_reflection_lists_the_services(stack: LocalStack, tier: str) -> None:
    """grpcurl and its like find the tier's service, health and reflection itself."""
    with grpc.insecure_channel(stack.pods(tier)[0].address) as channel:  # type: ignore[arg-type]
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=5)
        names = {service.name for service in next(answers).list_services_response.service}
    assert {SERVICES[tier], "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


def test_a_router_without_a_verifier_is_alive_but_not_ready() -> None:
    """Readiness is distinct from liveness: it follows the verifiers, and comes back with one."""
    with LocalStack("random:llama?layers=1", [], in_process=True) as stack:
        router = stack.pods("router")[0].address
        stack.kill("verifier", 0)
        _until(router, NOT_SERVING)
        assert health(router, "") == SERVING
        stack.add("verifier")
        _until(router, SERVING)


def _until(address: str, wanted: int) -> None:
    deadline = time.monotonic() + 30
    while health(address, "readiness") != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.02)
