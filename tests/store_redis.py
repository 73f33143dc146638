"""The servers that the store's contract is tested on: fakeredis, Valkey, a cluster, and redis-server."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import fakeredis
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis
from graftree.store.sessions import SessionRecord
from tests.redis_servers import ClusterNode

KINDS = ["fakeredis", "valkey", "cluster"] + (["redis-server"] if shutil.which("redis-server") else [])


@cache
def server(kind: str) -> EmbeddedRedis | ClusterNode:
    """One per test process; ends with it."""
    if kind == "cluster":
        return ClusterNode().start()
    path = shutil.which("redis-server") if kind == "redis-server" else None
    return EmbeddedRedis(Path(path) if path else None).start()


def empty_servers() -> None:
    """Forget what the servers hold that were started."""
    if server.cache_info().currsize:
        with BlockingRedis.from_url(server("valkey").url) as redis:
            redis.flushall()


@asynccontextmanager
async def client(kind: str) -> AsyncIterator[Redis]:
    """A client of an empty server."""
    redis = fakeredis.FakeAsyncRedis() if kind == "fakeredis" else connect(server(kind).url)
    async with redis:
        await redis.flushall()
        await redis.script_flush()
        yield redis


def record(session_id: str = "s-1", **changes: object) -> SessionRecord:
    values: dict[str, object] = {
        "session_id": session_id,
        "model_fingerprint": "model",
        "prompt_token_ids": (1, 2, 3),
        "token_ids": (),
        "parameters": b"\x00parameters\xff",
        "seed": (1 << 64) - 1,
        "salt": 1 << 63,
        "epoch": 1,
        "owner": "router-a",
        "finished": False,
    }
    return SessionRecord(**{**values, **changes})  # type: ignore[arg-type]
