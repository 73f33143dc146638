"""KV blocks in Redis: the same on every server, under keys that never meet, with an end to their lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from graftree.errors import GraftreeError, Unavailable
from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis
from graftree.store.kv_blocks import MARKER, NO_STRING, PREFIX, BlockStore
from tests.store_redis import KINDS, client

NAMES = [bytes([index]) * 32 for index in range(5)]


@pytest.fixture(params=KINDS)
async def redis(request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    async with client(request.param) as connection:
        yield connection


def store(redis: Redis, space: str = "none", ttl_seconds: float = 60.0) -> BlockStore:
    return BlockStore(redis, space=space, ttl_seconds=ttl_seconds)


async def test_what_is_written_is_read(redis: Redis) -> None:
    """Sizes and values in the order of the names, bytes and bytearrays, with gaps; deleted ones are gone."""
    blocks = store(redis)
    assert await blocks.write([(NAMES[0], b"\0\r\n\xff"), (NAMES[2], bytearray(b"x" * 70_000))]) == [True, True]
    assert await blocks.sizes(NAMES[:3]) == [4, 0, 70_000]
    assert await blocks.read(NAMES[:3]) == [b"\0\r\n\xff", None, b"x" * 70_000]
    await blocks.delete(NAMES[:2])
    assert await blocks.sizes(NAMES[:3]) == [0, 0, 70_000]
    assert await blocks.sizes([]) == await blocks.read([]) == []


async def test_spaces_never_meet(redis: Redis) -> None:
    """One name in two packings is two keys; all keys begin as the documented rights allow, none has a hash tag."""
    exact, small = store(redis), store(redis, "int8")
    await exact.write([(NAMES[0], b"exact")])
    assert await small.sizes(NAMES[:1]) == [0]
    await small.write([(NAMES[0], b"small")])
    assert await exact.read(NAMES[:1]) == [b"exact"]
    assert exact.key(NAMES[1]) == f"{PREFIX}:none:{'01' * 32}"
    assert not set("{}") & set(small.key(NAMES[1]) + MARKER)


async def test_blocks_live_as_long_as_they_are_used(redis: Redis) -> None:
    """A block is given its whole life when it is written and when it is kept, and dies of neglect."""
    blocks = store(redis, ttl_seconds=0.4)
    await blocks.write([(name, b"x") for name in NAMES[:2]])
    for _ in range(3):
        await asyncio.sleep(0.2)
        there, _ = await blocks.keep(NAMES[:1])
        assert there == [True]
    assert await blocks.sizes(NAMES[:2]) == [1, 0]
    assert await blocks.keep([NAMES[1]]) == ([False], False)


async def test_an_emptied_store_is_noticed_once(redis: Redis) -> None:
    """Whoever has seen it before learns that everything is gone, each one once; who comes later does not."""
    one, two = store(redis), store(redis)
    assert await one.keep([]) == ([], False)
    assert await two.keep([]) == ([], False)
    await redis.flushall()
    assert await one.keep([]) == ([], True)
    assert await two.keep([]) == ([], True)
    assert await one.keep([]) == await two.keep([]) == ([], False)
    assert await store(redis).keep([]) == ([], False)


async def test_something_else_under_the_key(redis: Redis) -> None:
    """A list where a block should be has a size of its own, no value, and does not hide its neighbours."""
    blocks = store(redis)
    await blocks.write([(NAMES[1], b"x")])
    await redis.lpush(blocks.key(NAMES[0]), "a")
    assert await blocks.sizes(NAMES[:3]) == [NO_STRING, 1, 0]
    assert await blocks.read(NAMES[:2]) == [None, b"x"]
    assert await blocks.sizes(NAMES[:1]) == [NO_STRING]


async def test_a_server_that_is_full() -> None:
    """Without eviction it takes no more: each block says so, reading goes on, nothing is raised."""
    with EmbeddedRedis() as server:
        async with connect(server.url) as redis:
            blocks = store(redis)
            assert await blocks.write([(NAMES[0], b"x")]) == [True]
            await redis.config_set("maxmemory", "1")
            assert await blocks.write([(NAMES[1], b"y"), (NAMES[2], b"z")]) == [False, False]
            assert await blocks.read(NAMES[:2]) == [b"x", None]


async def test_a_server_that_is_away() -> None:
    """Every method says Unavailable within the connection's own time limit, and works again when it is back."""
    with EmbeddedRedis() as server:
        async with connect(server.url, timeout_seconds=0.5) as redis:
            blocks = store(redis)
            await blocks.ping()
            server.stop()
            for call in (
                blocks.sizes(NAMES),
                blocks.read(NAMES),
                blocks.keep(NAMES),
                blocks.write([(NAMES[0], b"x")]),
                blocks.delete(NAMES),
                blocks.ping(),
            ):
                with pytest.raises(Unavailable):
                    await call
            server.start()
            assert await blocks.sizes(NAMES[:1]) == [0]


async def test_a_server_that_forbids_it() -> None:
    """A user without rights gets an error that says so, not an empty cache."""
    with EmbeddedRedis() as server:
        async with connect(server.url) as redis:
            await redis.execute_command("ACL", "SETUSER", "default", "-strlen", "-get")
            with pytest.raises(GraftreeError, match="NoPermission"):
                await store(redis).sizes(NAMES)
            with pytest.raises(GraftreeError, match="NoPermission"):
                await store(redis).read(NAMES)
