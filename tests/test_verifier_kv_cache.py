"""Verifiers that share KV blocks through Redis: what one computed another loads, and nothing but time changes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis as SyncRedis

from graftree.errors import ConfigError
from graftree.store.embedded import EmbeddedRedis
from graftree.store.kv_blocks import PREFIX
from tests.kv_lab import FULL, PROMPT, answer, go_on, kv, sharing, until, written
from tests.test_verifier_service import STANDIN, connection, opening, pod
from tests.verifier_harness import LLAMA, greedy
from verifier_service import kv_cache
from verifier_service.kv_counters import Dropped, Outcome
from verifier_service.pod import KV_REDIS, VerifierPod

BLOCKS = FULL // 16


@pytest.fixture(scope="module")
def shared() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
def redis(shared: EmbeddedRedis) -> EmbeddedRedis:
    """An empty one; nobody stops it."""
    with SyncRedis.from_url(shared.url) as admin:
        admin.flushall()
        admin.config_resetstat()
    return shared


@pytest.fixture
def own() -> Iterator[EmbeddedRedis]:
    """One that the test may stop."""
    with EmbeddedRedis() as running:
        yield running


def keys(redis: EmbeddedRedis, space: str = "none") -> list[bytes]:
    with SyncRedis.from_url(redis.url) as admin:
        return sorted(admin.keys(f"{PREFIX}:{space}:*"))


async def health(running: VerifierPod) -> int:
    async with grpc.aio.insecure_channel(running.address) as channel:
        request = health_pb2.HealthCheckRequest(service=KV_REDIS)
        reply = await health_pb2_grpc.HealthStub(channel).Check(request)
        return int(reply.status)


# What it is for.


async def test_a_second_verifier_loads_what_the_first_computed(redis: EmbeddedRedis) -> None:
    """The prompt's full blocks are computed once in all; the second computes five rows before the root, says the
    same, and finds the first one's answer there, too: the next turn of a chat."""
    async with sharing(redis) as first:
        said = await answer(first, PROMPT, 30)
        assert said == greedy(PROMPT, 30)
        assert first.counters.prefill_rows == len(PROMPT) - 1
        assert kv(first).counters.loads == {Outcome.MISS: 1}
        await written(first, (len(PROMPT) + 29) // 16)
    async with sharing(redis) as second:
        assert await answer(second, PROMPT, 10) == said[:10]
        assert second.counters.prefill_rows == len(PROMPT) - 1 - FULL
        assert second.counters.loaded_rows == FULL
        assert kv(second).counters.blocks_loaded == BLOCKS
        assert kv(second).counters.loads == {Outcome.LOADED: 1}
        longer = [*PROMPT, *said, 7, 7, 300]
        assert await answer(second, longer, 5) == greedy(longer, 5)
        # The prompt's blocks are in its pool by now; those of the answer are loaded.
        assert second.counters.loaded_rows == (len(longer) - 1) // 16 * 16
        assert second.counters.prefix_cache_hits == FULL
        assert kv(second).counters.refused == {}


async def test_blocks_are_written_once(redis: EmbeddedRedis) -> None:
    """What is there already is kept, not sent again: by another verifier, and in the next session."""
    async with sharing(redis) as first, sharing(redis) as second:
        await answer(first, PROMPT, 1)
        await written(first, BLOCKS)
        assert len(keys(redis)) == BLOCKS
        async with connection(second) as link:
            await link.send(opens=[opening("s", [9, *PROMPT])])
            await go_on(link, [9, *PROMPT], 1)
        await answer(second, PROMPT, 1)
        await until(lambda: kv(second).counters.blocks_kept == BLOCKS)
        assert kv(second).counters.blocks_written == BLOCKS  # of the other prompt
        await answer(first, PROMPT, 1)
        assert kv(first).counters.blocks_written == BLOCKS


async def test_open_sessions_of_both_at_once(redis: EmbeddedRedis) -> None:
    """Eight sessions load at once while others decode; every answer is plain decoding's, and no block is lost."""
    prompts = [[seed, *PROMPT] for seed in range(8)]
    async with sharing(redis) as first, sharing(redis) as second:
        for prompt in prompts:
            await answer(first, prompt, 1)
        await written(first, 8 * BLOCKS)
        free = second.runner.pool.free_blocks
        answers = await asyncio.gather(*(answer(second, prompt, 12) for prompt in prompts))
        assert answers == [greedy(prompt, 12) for prompt in prompts]
        assert second.counters.loaded_rows == 8 * FULL
        await until(lambda: second.runner.pool.free_blocks == free)
        assert second.counters.pool_faults == 0


async def test_a_length_from_which_loading_is_worth_it(redis: EmbeddedRedis) -> None:
    """kv_load_tokens: a text with fewer full blocks is computed without a question. By default, measured times
    decide: they are known before the first session, and told."""
    async with sharing(redis) as first, sharing(redis, kv_load_tokens=FULL + 1) as second:
        await answer(first, PROMPT, 1)
        await written(first, BLOCKS)
        assert await answer(second, PROMPT, 4) == greedy(PROMPT, 4)
        assert kv(second).counters.loads == {Outcome.SHORT: 1}
        assert second.counters.loaded_rows == 0
    async with sharing(redis, kv_load_tokens=0, step_time_seconds=1.0) as third:
        times = kv(third).choice.times
        assert times.latency is not None
        assert times.transfer is not None
        assert 0 < times.latency < 1 > times.transfer > 0
        readings = {export.name: export.read(third) for export in third.exports()}
        assert readings["graftree_kv_load_from_tokens"] == kv(third).choice.break_even_tokens
        assert len(keys(redis)) == BLOCKS  # those that were for measuring are gone


# What is not used.


Spoil = Callable[[Any, list[str]], object]

SPOILT: dict[str, tuple[Spoil, str]] = {
    "a changed bit": (lambda r, k: r.setrange(k[0], 3000, b"\1\2\3"), "checksum"),
    "cut short": (lambda r, k: r.set(k[0], r.get(k[0])[:-40]), "size"),
    "too long": (lambda r, k: r.append(k[0], b"x" * 100_000), "size"),
    "another text's": (lambda r, k: r.set(k[0], r.get(k[1])), "name"),
    "zeros": (lambda r, k: r.set(k[0], bytes(len(r.get(k[0])))), "header"),
    "another dtype's": (lambda r, k: r.setrange(k[0], 7, b"\3"), "dtype"),
    "another packing's": (lambda r, k: r.setrange(k[0], 6, b"\1"), "packing"),
    "a list": (lambda r, k: (r.delete(k[0]), r.lpush(k[0], "a")), "size"),
}


async def test_spoilt_blocks_are_refused(redis: EmbeddedRedis) -> None:
    """The first block of a text is not what it should be: it is counted by its reason and computed, with all behind
    it; then it is written anew, and the next verifier loads everything."""
    async with sharing(redis) as first, sharing(redis) as second, sharing(redis) as third:
        for index, (what, (spoil, reason)) in enumerate(SPOILT.items()):
            prompt = [index, *PROMPT]
            known = set(first.runner.pool._named)
            await answer(first, prompt, 1)
            await written(first, BLOCKS * (index + 1))
            names = [kv(first)._store.key(name) for name in first.runner.pool._named if name not in known]
            with SyncRedis.from_url(redis.url) as admin:
                spoil(admin, names)
            refused, rewritten = Counter(kv(second).counters.refused), kv(second).counters.blocks_written
            assert await answer(second, prompt, 6) == greedy(prompt, 6), what
            assert kv(second).counters.refused - refused == {reason: 1}, what
            assert second.counters.loaded_rows == 0, what
            await written(second, rewritten + 1)
            assert await answer(third, prompt, 6) == greedy(prompt, 6), what
            assert third.counters.loaded_rows == FULL * (index + 1), what
        assert kv(second).counters.loads == {Outcome.REFUSED: len(SPOILT)}
        assert kv(third).counters.refused == {}


async def test_a_block_in_the_middle(redis: EmbeddedRedis) -> None:
    """Blocks before a spoilt one, and before one that is gone, are used; the rest is computed."""
    async with sharing(redis) as first, sharing(redis) as second, sharing(redis) as third:
        await answer(first, PROMPT, 1)
        await written(first, BLOCKS)
        names = [kv(first)._store.key(name) for name in first.runner.pool._named]
        with SyncRedis.from_url(redis.url) as admin:
            admin.setrange(names[2], 3000, b"\1\2\3")
        assert await answer(second, PROMPT, 6) == greedy(PROMPT, 6)
        assert (second.counters.loaded_rows, kv(second).counters.loads) == (32, {Outcome.PART: 1})
        await written(second, 1)
        with SyncRedis.from_url(redis.url) as admin:
            admin.delete(names[3])
        assert await answer(third, PROMPT, 6) == greedy(PROMPT, 6)
        assert (third.counters.loaded_rows, kv(third).counters.loads) == (48, {Outcome.LOADED: 1})


@pytest.mark.parametrize(
    "other",
    [{"model": LLAMA.replace("seed=0", "seed=1")}, {"dtype": "bfloat16"}, {"block_size": 8}, {"kv_packing": "int8"}],
    ids=["weights", "dtype", "block size", "packing"],
)
async def test_others_have_other_names(redis: EmbeddedRedis, other: dict[str, Any]) -> None:
    """Verifiers of another model, dtype, block size or packing share the Redis and never see each other's blocks."""
    async with sharing(redis) as first:
        await answer(first, PROMPT, 1)
        await written(first, BLOCKS)
    async with sharing(redis, **other) as second:
        await answer(second, PROMPT, 3)
        assert kv(second).counters.loads == {Outcome.MISS: 1}
        assert kv(second).counters.refused == {}


async def test_tenants_never_meet(redis: EmbeddedRedis) -> None:
    """The same text of another tenant is not found there, by nobody's session either; its own is."""
    async with sharing(redis) as first, sharing(redis) as second:
        assert await answer(first, PROMPT, 4, tenant="acme") == greedy(PROMPT, 4)
        await written(first, BLOCKS)
        for tenant in ("other", "", "acm"):
            assert await answer(second, PROMPT, 4, tenant=tenant) == greedy(PROMPT, 4)
            assert second.counters.loaded_rows == 0
        assert await answer(second, PROMPT, 4, tenant="acme") == greedy(PROMPT, 4)
        assert second.counters.loaded_rows == FULL
        assert kv(second).counters.loads == {Outcome.MISS: 3, Outcome.LOADED: 1}


async def test_int8_is_small_and_its_own(redis: EmbeddedRedis) -> None:
    """Blocks of a quarter of the size under keys of their own; a second verifier of that packing loads them."""
    async with sharing(redis, kv_packing="int8") as first, sharing(redis, kv_packing="int8") as second:
        assert await answer(first, PROMPT, 4) == greedy(PROMPT, 4)  # its own rows are exact
        await written(first, BLOCKS)
        assert len(keys(redis, "int8")) == BLOCKS
        assert keys(redis) == []
        assert len(await answer(second, PROMPT, 4)) == 4
        assert second.counters.loaded_rows == FULL
        assert kv(first).counters.bytes_written < 0.3 * first.runner.kv.bytes_per_token * FULL  # type: ignore[attr-defined]


# When Redis fails.


class Nth:
    """Does something before the n-th call of a method."""

    def __init__(self, method: Callable[..., Any], number: int, act: Callable[[], object]) -> None:
        self._method, self._number, self._act = method, number, act
        self.calls = 0

    async def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self._number:
            self._act()
        return await self._method(*arguments)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round trip carries one block."""
    monkeypatch.setattr(kv_cache, "_BATCH_BYTES", 1)


@pytest.mark.usefixtures("one_by_one")
async def test_killed_in_mid_load(own: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis dies between two blocks: what came is used, the rest computed, the answer the same. The outage shows in
    health and metrics; nobody asks any more. When an empty Redis comes back, open sessions' blocks are written."""
    async with sharing(own) as first, sharing(own) as second:
        said = greedy(PROMPT, 12)
        await answer(first, PROMPT, 1)
        await written(first, BLOCKS)
        monkeypatch.setattr(kv(second)._store, "read", Nth(kv(second)._store.read, 3, own.stop))
        async with connection(second) as link:
            await link.send(opens=[opening("s", PROMPT)])
            assert await go_on(link, PROMPT, 5) == said[:5]
            assert second.counters.loaded_rows in (16, 32)
            assert kv(second).counters.loads == {Outcome.PART: 1}
            assert not kv(second).link.up
            assert await health(second) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await answer(second, [1, *PROMPT], 3) == greedy([1, *PROMPT], 3)
            assert kv(second).counters.loads[Outcome.AWAY] == 1
            assert kv(second).counters.dropped[Dropped.AWAY] + kv(second).counters.dropped[Dropped.FAILED] > 0
            own.start()
            await until(lambda: kv(second).link.up)
            await until(lambda: len(keys(own)) >= BLOCKS)
            assert await health(second) == health_pb2.HealthCheckResponse.SERVING
            assert await go_on(link, [*PROMPT, *said[:5]], 7, first=6) == said[5:]
        await until(lambda: kv(first).link.up)
        assert kv(second).link.outages == 1


@pytest.mark.usefixtures("one_by_one")
async def test_killed_in_mid_write(own: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis dies before the third block is written: nobody notices but the counters, and all are written later."""
    async with sharing(own) as running:
        monkeypatch.setattr(kv(running)._store, "write", Nth(kv(running)._store.write, 3, own.stop))
        async with connection(running) as link:
            await link.send(opens=[opening("s", PROMPT)])
            assert await go_on(link, PROMPT, 3) == greedy(PROMPT, 3)
            await until(lambda: not kv(running).link.up)
            assert kv(running).counters.blocks_written == 2
            assert sum(kv(running).counters.dropped.values()) == BLOCKS - 2
            own.start()
            await written(running, 2 + BLOCKS)
            assert len(keys(own)) == BLOCKS


async def test_emptied_behind_our_back(redis: EmbeddedRedis) -> None:
    """A Redis that lost everything without being away: the next block that is written shows it, and the open
    session's earlier ones are written again."""
    async with sharing(redis) as running, connection(running) as link:
        await link.send(opens=[opening("s", PROMPT)])
        said = await go_on(link, PROMPT, 3)
        await written(running, BLOCKS)
        with SyncRedis.from_url(redis.url) as admin:
            admin.flushall()
        said += await go_on(link, [*PROMPT, *said], 12, first=4)
        assert said == greedy(PROMPT, 15)
        await written(running, 2 * BLOCKS + 1)
        assert len(keys(redis)) == BLOCKS + 1
        assert kv(running).counters.emptied == 1
        assert kv(running).link.outages == 0


async def test_a_redis_that_stands_still(own: EmbeddedRedis) -> None:
    """SIGSTOP: the first session waits as long as is configured and computes; later ones do not wait at all."""
    async with sharing(own, kv_wait_seconds=0.3) as running:
        await answer(running, PROMPT, 1)
        await written(running, BLOCKS)
        assert own.pid is not None
        os.kill(own.pid, signal.SIGSTOP)
        try:
            begun = asyncio.get_running_loop().time()
            assert await answer(running, [2, *PROMPT], 3, wait=5) == greedy([2, *PROMPT], 3)
            assert asyncio.get_running_loop().time() - begun >= 0.3
            assert kv(running).counters.loads[Outcome.LATE] == 1
            assert not kv(running).link.up
            assert await answer(running, [3, *PROMPT], 3, wait=5) == greedy([3, *PROMPT], 3)
            assert kv(running).counters.loads[Outcome.AWAY] == 1
        finally:
            os.kill(own.pid, signal.SIGCONT)
        await until(lambda: kv(running).link.up)


async def test_not_there_at_the_start() -> None:
    """A verifier starts, serves and is ready without its KV Redis, and uses it from when it is there."""
    with EmbeddedRedis() as redis:
        redis.stop()
        async with sharing(redis) as running:
            assert running.ready
            assert await health(running) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await answer(running, PROMPT, 3) == greedy(PROMPT, 3)
            redis.start()
            await until(lambda: kv(running).link.up)
            assert await answer(running, PROMPT, 3) == greedy(PROMPT, 3)
            await written(running, BLOCKS)


async def test_a_full_redis(own: EmbeddedRedis) -> None:
    """One that evicts nothing and takes no more: blocks are dropped, it is not away, answers go on."""
    async with sharing(own) as running:
        with SyncRedis.from_url(own.url) as admin:
            admin.config_set("maxmemory", "1")
        assert await answer(running, PROMPT, 3) == greedy(PROMPT, 3)
        await until(lambda: kv(running).counters.dropped[Dropped.FAILED] == BLOCKS)
        assert kv(running).link.up


# The keys of the configuration.


async def test_a_full_queue_drops(own: EmbeddedRedis) -> None:
    """kv_queue_blocks: while Redis stands still, the engine goes on and what does not fit the queue is dropped."""
    async with sharing(own, kv_queue_blocks=2, kv_load_tokens=1000) as running:
        assert own.pid is not None
        os.kill(own.pid, signal.SIGSTOP)
        try:
            for seed in range(2):
                assert await answer(running, [seed, *PROMPT], 3, wait=5) == greedy([seed, *PROMPT], 3)
            await until(lambda: kv(running).counters.dropped[Dropped.QUEUE] >= BLOCKS)
        finally:
            os.kill(own.pid, signal.SIGCONT)
        assert kv(running).writer.waiting <= 2


async def test_blocks_have_an_end(redis: EmbeddedRedis) -> None:
    """kv_ttl_seconds: every key that a verifier leaves behind expires."""
    async with sharing(redis, kv_ttl_seconds=20) as running:
        await answer(running, PROMPT, 1)
        await written(running, BLOCKS)
    with SyncRedis.from_url(redis.url) as admin:
        lives = [admin.pttl(key) for key in admin.keys(f"{PREFIX}:*")]
    assert len(lives) == BLOCKS + 1
    assert all(0 < life <= 20_000 for life in lives)


async def test_user_and_password(own: EmbeddedRedis, tmp_path: Any) -> None:
    """kv_redis_username and kv_redis_password_file: the user of docs/security.md may do all that is needed."""
    from tests.test_security_redis import RULE

    assert RULE is not None
    with SyncRedis.from_url(own.url) as admin:
        admin.execute_command("ACL", "SETUSER", "graftree", *RULE[1].replace("PASSWORD", "hunter2").split())
        admin.execute_command("ACL", "SETUSER", "default", "off")
        secret = tmp_path / "password"
        secret.write_text("hunter2\n")
        identity = {"kv_redis_username": "graftree", "kv_redis_password_file": str(secret)}
        async with sharing(own, **identity) as first, sharing(own, **identity) as second:
            await answer(first, PROMPT, 1)
            await written(first, BLOCKS)
            await answer(second, PROMPT, 1)
            assert second.counters.loaded_rows == FULL
            assert kv(second).link.outages == 0


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"kv_redis": "http://x"}, "kv_redis"),
        ({"kv_redis": "redis://:hunter2@host:port"}, "kv_redis"),
        ({"kv_redis": "redis://127.0.0.1:1", "prefix_cache": False}, "kv_redis"),
        ({"kv_redis": "redis://127.0.0.1:1", "kv_redis_username": "x"}, "kv_redis_password_file"),
        ({"kv_redis": "redis://127.0.0.1:1", "kv_redis_password_file": "/nowhere"}, "kv_redis_password_file"),
        ({"kv_redis": "redis://127.0.0.1:1", "kv_packing": "int8", "deterministic": True}, "kv_packing"),
        ({"kv_packing": "int4"}, "kv_packing"),
        ({"kv_wait_seconds": 0}, "kv_wait_seconds"),
        ({"kv_queue_blocks": 0}, "kv_queue_blocks"),
        ({"kv_ttl_seconds": 0}, "kv_ttl_seconds"),
        ({"kv_load_tokens": -1}, "kv_load_tokens"),
    ],
)
async def test_a_mistake_names_its_key(values: dict[str, Any], key: str) -> None:
    """Trial 25: what is out of range or contradicts another key is a start-up error that repeats no secret."""
    with pytest.raises(ConfigError) as caught:
        async with pod(**values):
            pass
    assert caught.value.key == key
    assert "hunter2" not in str(caught.value)


async def test_a_model_without_kv(redis: EmbeddedRedis) -> None:
    """The stand-in has nothing to store, and serves without."""
    async with pod(model=STANDIN, kv_redis=redis.url) as running:
        assert running.kv_cache is None
        assert {e.read(running) for e in running.exports() if e.name.startswith("graftree_kv_blocks")} == {None}
