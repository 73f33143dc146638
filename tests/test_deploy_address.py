"""In a container a pod listens everywhere: what it tells the others is a name they can reach it by."""

from __future__ import annotations

import socket

import pytest

from graftree.config import SpeculatorConfig, build
from speculator_service.pod import SpeculatorPod


@pytest.mark.parametrize(
    ("host", "advertise", "expected"),
    [
        ("0.0.0.0", "", socket.gethostname()),
        ("0.0.0.0", "10.1.2.3:8200", "10.1.2.3"),
        ("127.0.0.1", "", "127.0.0.1"),
    ],
)
async def test_advertised_address(host: str, advertise: str, expected: str) -> None:
    """The machine's name where it listens on every address; otherwise the address itself, or what it is told."""
    values = {"host": host, "advertise": advertise, "redis": "redis://127.0.0.1:1/0", "drain_seconds": 0}
    pod = SpeculatorPod(build(SpeculatorConfig, values))
    await pod.start()
    try:
        name, _, port = pod.address.rpartition(":")
        assert name == expected
        assert int(port) > 0
    finally:
        await pod.stop()
