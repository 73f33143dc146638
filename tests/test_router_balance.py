"""Sessions spread over the speculators of a kind while they run, soon after one joins or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from graftree.client import AsyncClient
from tests.fakes import FakeSpeculator, FakeVerifier, chain, plain
from tests.router_harness import Harness, harness, until

SESSIONS, TOKENS = 6, 60


@asynccontextmanager
async def later(*pods: FakeSpeculator) -> AsyncIterator[None]:
    """Pods that a harness does not begin with."""
    try:
        yield
    finally:
        for pod in pods:
            await pod.stop()


def begin(client: AsyncClient) -> list[asyncio.Task[Any]]:
    """So many requests at once, each with its own prompt."""
    return [
        asyncio.create_task(client.generate(token_ids=[seed, 7], max_new_tokens=TOKENS)) for seed in range(SESSIONS)
    ]


async def rounds(verifier: FakeVerifier, count: int) -> None:
    """So many rounds of every session."""
    for _ in range(count):
        await until(lambda: len(verifier.held) >= SESSIONS)
        verifier.release()
        await asyncio.sleep(0.005)  # drafts come in the meantime


async def finish(verifier: FakeVerifier, requests: list[asyncio.Task[Any]]) -> None:
    """Every answer is plain decoding's."""
    verifier.holding = False
    verifier.release()
    for seed, result in enumerate(await asyncio.gather(*requests)):
        assert list(result.token_ids) == plain([seed, 7], TOKENS)


def members(stack: Harness) -> dict[str, int]:
    """Sessions of each speculator, as the router has them."""
    infos = stack.router.pods.infos()
    return {info.pod_id: info.sessions for info in infos if info.tier == "speculator"}


async def test_a_pod_that_joins_takes_its_share() -> None:
    """Six sessions on one pod; two more of its kind come, and then each has two. One goes without a word, and the
    others take what it had. No token is another one for it."""
    verifier, first = FakeVerifier(), FakeSpeculator("s0", "chain", chain(1))
    verifier.holding = True
    second, third = FakeSpeculator("s1", "chain", chain(1)), FakeSpeculator("s2", "chain", chain(1))
    async with later(second, third), harness(verifier, first, adaptive=False) as stack:
        requests = begin(stack.client)
        await rounds(verifier, 3)
        assert members(stack) == {"s0": 6}
        for pod in (second, third):
            await stack.add(pod)
            await rounds(verifier, 4)
        assert members(stack) == {"s0": 2, "s1": 2, "s2": 2}
        assert stack.metrics.moved_speculators == 5
        assert stack.metrics.lost_speculators == 0
        await stack.remove(second)
        await rounds(verifier, 4)
        assert sum(members(stack).values()) == 6
        assert max(members(stack).values()) <= 4
        await finish(verifier, requests)
        await first.until(lambda: not first.sessions)
        await third.until(lambda: not third.sessions)


async def test_a_new_pod_that_says_nothing_takes_nothing() -> None:
    """Sessions stay where drafts come from until the other pod's first word; a pod that never says one gets none."""
    verifier, first, mute = FakeVerifier(), FakeSpeculator("s0", "chain", chain(1)), FakeSpeculator("s1", "chain")
    mute.script = lambda delta: None
    verifier.holding = True
    async with later(mute), harness(verifier, first, adaptive=False) as stack:
        requests = begin(stack.client)
        await rounds(verifier, 3)
        await stack.add(mute)
        before = stack.metrics.accepted_tokens
        await rounds(verifier, 4)
        assert members(stack) == {"s0": 6, "s1": 3}
        assert stack.metrics.moved_speculators == 0
        assert stack.metrics.accepted_tokens > before
        await finish(verifier, requests)
        await mute.until(lambda: not mute.sessions)


async def test_chance_moves_nobody() -> None:
    """One session more or less is no reason to send a whole text again."""
    verifier = FakeVerifier()
    verifier.holding = True
    pods = [FakeSpeculator(f"s{index}", "chain", chain(1)) for index in range(4)]
    async with harness(verifier, *pods, adaptive=False) as stack:
        requests = begin(stack.client)
        await rounds(verifier, 6)
        assert sorted(members(stack).values()) == [1, 1, 2, 2]
        assert stack.metrics.moved_speculators == 0
        await finish(verifier, requests)
