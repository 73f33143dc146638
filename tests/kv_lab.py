"""Verifiers that share a KV Redis, driven over their streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from graftree.store.embedded import EmbeddedRedis
from tests.test_verifier_service import connection, eventually, opening, pod, stepping
from verifier_service.kv_cache import KvCache
from verifier_service.pod import VerifierPod

PROMPT = [(11 * i + 5) % 512 for i in range(70)]  # four full blocks before the root, and five rows
FULL = 64


@asynccontextmanager
async def sharing(redis: EmbeddedRedis, **values: Any) -> AsyncIterator[VerifierPod]:
    """A verifier that loads whatever it can; the state's Redis is another one."""
    how = {"kv_load_tokens": 1, "kv_wait_seconds": 20.0, "step_time_seconds": 0, "threads": 1}
    async with pod(**{"kv_redis": redis.url} | how | values) as running:
        yield running


def kv(running: VerifierPod) -> KvCache:
    assert running.kv_cache is not None
    return running.kv_cache


async def answer(
    running: VerifierPod, prompt: Sequence[int], count: int, *, wait: float = 20.0, **fields: Any
) -> list[int]:
    """`count` tokens by plain steps of a session of its own, each within `wait` seconds."""
    async with connection(running) as link:
        await link.send(opens=[opening("s", prompt, **fields)])
        return await go_on(link, prompt, count, wait=wait)


async def go_on(link: Any, prompt: Sequence[int], count: int, *, wait: float = 20.0, first: int = 1) -> list[int]:
    """`count` tokens of the session that is open; its next step's number is `first`."""
    tokens: list[int] = []
    for number in range(first, first + count):
        await link.send(steps=[stepping("s", number, [*prompt, *tokens])])
        async with asyncio.timeout(wait):
            tokens += (await link.verdict()).token_ids
    return tokens


async def written(running: VerifierPod, blocks: int) -> None:
    """Wait until the KV Redis has had so many blocks from this verifier."""
    await eventually(lambda: kv(running).counters.blocks_written >= blocks)


async def until(condition: Callable[[], bool]) -> None:
    await eventually(condition)
