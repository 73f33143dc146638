"""A task that is cancelled while it talks to Redis ends, whenever the cancellation comes."""

from __future__ import annotations

import asyncio
import random

from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis
from graftree.store.registry import Registry


async def test_a_cancellation_is_never_lost() -> None:
    """Loops that are cancelled at random moments of their first commands, connection included, all end."""
    lots = random.Random(5)
    with EmbeddedRedis() as server:
        for _ in range(150):
            redis = connect(server.url)
            registry = Registry(redis, lease_seconds=3)

            async def poll(registry: Registry = registry) -> None:
                while True:
                    await registry.pods()
                    await asyncio.sleep(60)

            task = asyncio.create_task(poll())
            await asyncio.sleep(lots.uniform(0, 0.004))
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=20)
            assert done
            assert task.cancelled()
            await redis.aclose()
