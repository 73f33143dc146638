"""A router in this process, over fake pods, a real Redis and real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

from graftree.client import AsyncClient
from graftree.config import RouterConfig
from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis
from graftree.store.registry import Registry
from router.pod import RouterPod
from tests.fakes import MODEL, FakeSpeculator, FakeVerifier
from tests.redis_servers import Watched
from tests.store_redis import client, server

PROMPT = [1, 2, 3]

AnyPod = FakeVerifier | FakeSpeculator


class Harness:
    """Pods that can be added and removed, and one router with a client."""

    def __init__(self, router: RouterPod, client: AsyncClient, registry: Registry) -> None:
        self.router, self.client, self._registry = router, client, registry

    @property
    def metrics(self) -> Any:
        return self.router.metrics

    async def add(self, *pods: AnyPod) -> None:
        """Start and register pods, and wait until the router has linked them or refused to."""
        await register(self._registry, *pods)
        await self.settled(*pods)

    async def settled(self, *pods: AnyPod) -> None:
        names = {pod.pod_id for pod in pods}
        while names - {info.pod_id for info in self.router.pods.infos() if info.state != "connecting"}:
            await self.router.pods.changed(self.router.pods.version)

    async def remove(self, pod: AnyPod) -> None:
        """As a SIGKILL looks: the stream breaks, the lease goes."""
        await self._registry.unregister(pod.pod_id)
        await pod.stop()

    @asynccontextmanager
    async def another(self, **config: Any) -> AsyncIterator[RouterPod]:
        """A second router beside the first."""
        values = self.router.config.model_dump(exclude={"pod_id", "port", "advertise"})
        router = RouterPod(RouterConfig(**{**values, **config}), random_source=Random(99))
        try:
            await router.start()
            yield router
        finally:
            await router.kill()

    def states(self) -> dict[str, str]:
        return {info.pod_id: info.state for info in self.router.pods.infos()}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that announces itself to nobody."""
    for _ in range(5_000):
        if condition():
            return
        await asyncio.sleep(0.0005)
    raise AssertionError("it did not happen")


async def register(registry: Registry, *pods: AnyPod) -> None:
    for pod in pods:
        if not pod.address:
            await pod.start()
        await registry.register(pod.record())


@asynccontextmanager
async def harness(
    *pods: AnyPod, random: Random | None = None, redis: EmbeddedRedis | Watched | None = None, **config: Any
) -> AsyncIterator[Harness]:
    """A router over `pods`, ready if one of them is a verifier that fits; `redis` is one of the test's own."""
    async with AsyncExitStack() as stack:
        url = server("valkey").url if redis is None else redis.url
        connection = await stack.enter_async_context(client("valkey") if redis is None else connect(url))
        registry = Registry(connection, lease_seconds=600)
        for pod in pods:
            stack.push_async_callback(pod.stop)
        await register(registry, *pods)
        values = {"model": MODEL, "redis": url, "connect_timeout_seconds": 1.0, **config}
        router = RouterPod(RouterConfig(**values), random_source=random or Random(0))
        stack.push_async_callback(router.kill)
        await router.start()
        client_ = AsyncClient(router.address, reconnect=None)  # errors are looked at, not overcome
        stack.push_async_callback(client_.close)
        started = Harness(router, client_, registry)
        await started.settled(*pods)
        yield started
