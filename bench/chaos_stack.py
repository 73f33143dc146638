"""`ChaosStack`: a `LocalStack` of child processes whose tiers reach each other through a `FaultProxy`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from bench.chaos_proxy import FaultProxy
from graftree.local.pod import LocalPod, Tier
from graftree.local_stack import LocalStack

OWN = ("redis", "pod_id", "port", "advertise")  # of one process: whoever comes in its place has others


class ChaosStack(LocalStack):
    """Verifiers and speculators advertise a route; each router has a route of its own to Redis.

    Args:
        redis_socket: of the Redis in use.
        proxy: ends later than the stack.
    """

    def __init__(self, *arguments: Any, redis_socket: str, proxy: FaultProxy, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.proxy, self._redis_socket = proxy, redis_socket

    def _launch(self, tier: Tier, values: Mapping[str, Any]) -> LocalPod:
        name = route(tier, len(self._pods[tier]))
        if tier == "router":
            return super()._launch(
                tier, {**values, "redis": f"redis://{self.proxy.route(name, self._redis_socket)}/0"}
            )
        port = _free_port()
        address = self.proxy.route(name, f"127.0.0.1:{port}")
        return super()._launch(tier, {**values, "port": port, "advertise": address})

    def whole(self) -> None:
        """Wait until every router is linked to every pod again. Raises as `start`."""
        self._await_links()


def route(tier: Tier, index: int) -> str:
    """Name of the way to a pod, or of a router's way to Redis."""
    return f"redis of router {index}" if tier == "router" else f"{tier} {index}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
