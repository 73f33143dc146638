"""The registry's contract, on every server it is used with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from graftree.errors import GraftreeError, Incompatible, InvalidArgument, ResourceExhausted
from graftree.store import registry as registry_module
from graftree.store.registry import KEYS, PodRecord, Registry
from tests.store_redis import KINDS, client

PODS, LEASES = KEYS
VERIFIER = PodRecord("v-1", "verifier", "random:llama", "127.0.0.1:1", "model-a", "vocab-a", 512, 256, 8, 3, True)
SPECULATOR = PodRecord("s-1", "speculator", "model:random:llama", "127.0.0.1:2", "model-s", "vocab-a", 512, 64)
NGRAM = PodRecord("s-2", "speculator", "ngram", "127.0.0.1:3")
ROUTER = PodRecord("r-1", "router", "random:llama", "127.0.0.1:4", "", "vocab-a", 512)


@pytest.fixture(params=KINDS)
async def redis(request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    async with client(request.param) as redis:
        yield redis


@pytest.fixture
def registry(redis: Redis) -> Registry:
    return Registry(redis, lease_seconds=10)


async def test_register_and_list(registry: Registry) -> None:
    """Pods come back whole, by tier and id whatever the order they came in; a tier can be asked for."""
    for pod in (VERIFIER, NGRAM, SPECULATOR, ROUTER):
        await registry.register(pod)
    assert await registry.pods() == [ROUTER, SPECULATOR, NGRAM, VERIFIER]
    assert await registry.pods("speculator") == [SPECULATOR, NGRAM]
    assert await registry.pods("verifier") == [VERIFIER]
    assert registry.malformed == 0


async def test_renew_replaces_the_record(registry: Registry) -> None:
    """A renewal carries the pod's present load."""
    await registry.register(VERIFIER)
    await registry.renew(replace(VERIFIER, sessions=7, draining=False))
    assert await registry.pods() == [replace(VERIFIER, sessions=7, draining=False)]


async def test_renew_after_an_empty_restart(registry: Registry, redis: Redis) -> None:
    """A Redis that lost everything fills again with the next renewals."""
    await registry.register(VERIFIER)
    await redis.flushall()
    await redis.script_flush()
    assert await registry.pods() == []
    await registry.renew(VERIFIER)
    assert await registry.pods() == [VERIFIER]


async def test_unregister(registry: Registry, redis: Redis) -> None:
    """A pod that says goodbye is gone at once, and leaves nothing; saying it twice is harmless."""
    await registry.register(VERIFIER)
    await registry.unregister("v-1")
    await registry.unregister("v-1")
    assert await registry.pods() == []
    assert await redis.keys("*") == []


async def test_leases_end(redis: Redis) -> None:
    """A pod that stops renewing is gone, and pruned, by Redis' clock; one that goes on stays."""
    short, long = Registry(redis, lease_seconds=0.05), Registry(redis, lease_seconds=60)
    await long.register(VERIFIER)
    await short.register(SPECULATOR)
    for _ in range(2000):
        if await long.pods() == [VERIFIER]:
            break
        await asyncio.sleep(0.01)
    assert await short.pods() == [VERIFIER]
    assert await redis.hkeys(PODS) == [b"v-1"]
    assert await redis.zcard(LEASES) == 1


async def test_keys_expire(redis: Redis) -> None:
    """Both keys have a time to live, at least as long as the longest lease, also after a pod with a short one."""
    await Registry(redis, lease_seconds=60).register(VERIFIER)
    await Registry(redis, lease_seconds=0.05).register(SPECULATOR)
    for key in KEYS:
        assert 60_000 < await redis.pttl(key) <= 240_000


async def test_lease_by_the_servers_clock(registry: Registry, redis: Redis) -> None:
    """The lease's end is Redis' TIME plus its length."""
    seconds, micros = await redis.time()
    await registry.register(VERIFIER)
    end = await redis.zscore(LEASES, "v-1")
    after_seconds, after_micros = await redis.time()
    assert end is not None
    assert seconds * 1000 + micros // 1000 + 10_000 <= end <= after_seconds * 1000 + after_micros // 1000 + 10_000


async def test_another_model_is_refused(registry: Registry) -> None:
    """A verifier whose model is not the live verifiers' is refused; the text names both models and both pods."""
    await registry.register(VERIFIER)
    with pytest.raises(Incompatible) as refused:
        await registry.register(replace(VERIFIER, pod_id="v-2", model_fingerprint="model-b"))
    for word in ("v-1", "v-2", "model-a", "model-b"):
        assert word in str(refused.value)
    await registry.register(replace(VERIFIER, pod_id="v-3"))
    assert [pod.pod_id for pod in await registry.pods()] == ["v-1", "v-3"]


async def test_another_vocabulary_is_refused(registry: Registry) -> None:
    """A speculator with another token table is refused, at registration and at renewal (trial 18); a padded one
    has the same fingerprint, and one without a vocabulary of its own fits any."""
    permuted = replace(SPECULATOR, pod_id="s-9", vocab_fingerprint="vocab-b")
    await registry.register(permuted)
    await registry.register(VERIFIER)
    for enter in (registry.register, registry.renew):
        with pytest.raises(Incompatible) as refused:
            await enter(permuted)
        for word in ("s-9", "v-1", "vocab-a", "vocab-b"):
            assert word in str(refused.value)
    await registry.register(replace(SPECULATOR, vocab_size=640))
    await registry.register(NGRAM)


async def test_the_measure_is_live_verifiers_only(registry: Registry, redis: Redis) -> None:
    """A verifier that is gone, speculators, and a damaged record bind nobody; a pod is not measured by itself."""
    await registry.register(VERIFIER)
    await registry.register(SPECULATOR)
    other = replace(VERIFIER, model_fingerprint="model-b")
    await registry.register(other)
    await redis.hset(PODS, "v-1", "{damaged")
    await registry.register(replace(VERIFIER, pod_id="v-2", model_fingerprint="model-c"))
    await redis.zadd(LEASES, {"v-2": 1})
    await registry.register(replace(VERIFIER, pod_id="v-3", model_fingerprint="model-d", vocab_fingerprint="vocab-d"))


async def test_malformed_records_are_skipped(registry: Registry, redis: Redis) -> None:
    """Whatever stands in the hash, the pods that can be read are returned and the others counted."""
    await registry.register(VERIFIER)
    text = (await redis.hget(PODS, "v-1")) or b""
    damaged = [
        b"",
        b"null",
        b"[]",
        b"{bad",
        b"\xff\xfe",
        text,  # filed under another id
        text.replace(b'"v-1"', b'"x-6"').replace(b'"verifier"', b'"cook"'),
        text.replace(b'"v-1"', b'"x-7"').replace(b"512", b"-1"),
        text.replace(b'"v-1"', b'"x-8"').replace(b"512", b'"512"'),
        text.replace(b'"v-1"', b'"x-9"').replace(b"random:llama", b"x" * 20_000),
    ]
    for index, value in enumerate(damaged):
        await redis.hset(PODS, f"x-{index}", value)
        await redis.zadd(LEASES, {f"x-{index}": 1 << 50})
    assert await registry.pods() == [VERIFIER]
    assert registry.malformed == len(damaged)
    await registry.renew(VERIFIER)


async def test_newer_records_are_read(registry: Registry, redis: Redis) -> None:
    """A field that this version does not know is ignored."""
    await registry.register(VERIFIER)
    text = (await redis.hget(PODS, "v-1")) or b""
    await redis.hset(PODS, "v-1", text.replace(b"{", b'{"colour":"green",', 1))
    assert await registry.pods() == [VERIFIER]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pod_id", "a b"),
        ("pod_id", ""),
        ("tier", "cook"),
        ("kind", "x" * 1025),
        ("address", ""),
        ("vocab_size", -1),
        ("sessions", 1 << 31),
        ("max_context", "64"),
        ("draining", 1),
    ],
)
async def test_bad_records_are_refused(field: str, value: object) -> None:
    """A record outside its limits is refused before it is sent, by field."""
    async with client("fakeredis") as redis:
        registry = Registry(redis, lease_seconds=10)
        with pytest.raises(InvalidArgument, match=f"pod.{field}"):
            await registry.register(replace(VERIFIER, **{field: value}))
        assert await registry.pods() == []


async def test_bad_leases_are_refused() -> None:
    """A registry needs a lease that can end."""
    async with client("fakeredis") as redis:
        for lease in (0, -1, float("inf"), float("nan"), 1e6):
            with pytest.raises(InvalidArgument, match="lease_seconds"):
                Registry(redis, lease_seconds=lease)


async def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limit a new pod is refused, while those that are there still renew."""
    monkeypatch.setattr(registry_module, "MAX_PODS", 2)
    async with client("fakeredis") as redis:
        registry = Registry(redis, lease_seconds=10)
        await registry.register(VERIFIER)
        await registry.register(SPECULATOR)
        with pytest.raises(ResourceExhausted):
            await registry.register(NGRAM)
        await registry.renew(SPECULATOR)
        await registry.unregister("s-1")
        await registry.register(NGRAM)


async def test_longest_record_is_read_back(registry: Registry) -> None:
    """A record at its limits, with text that needs escapes, is not too long to be read."""
    longest = replace(VERIFIER, kind="\x01" * 1024, address="é" * 512, vocab_fingerprint="f" * 128)
    await registry.register(longest)
    assert await registry.pods() == [longest]


async def test_other_errors_keep_their_name(registry: Registry, redis: Redis) -> None:
    """Damage to the keys themselves is an internal error that says what Redis said."""
    await redis.set(PODS, "no hash")
    with pytest.raises(GraftreeError, match="WRONGTYPE"):
        await registry.register(VERIFIER)


async def test_an_ssm_for_another_llm_is_refused(redis: Redis) -> None:
    """A speculator made for one LLM is not registered beside a verifier of another; one made for any is."""
    registry = Registry(redis, lease_seconds=5)
    await registry.register(replace(VERIFIER, llm_identity="a" * 64))
    await registry.register(replace(SPECULATOR, llm_identity="a" * 64))
    await registry.register(replace(SPECULATOR, pod_id="for-any"))
    with pytest.raises(Incompatible, match=r"made for the LLM b.*serves a"):
        await registry.register(replace(SPECULATOR, pod_id="for-another", llm_identity="b" * 64))
