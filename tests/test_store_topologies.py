"""Redis as more than one server: a failover behind a Sentinel, and a cluster whose node dies."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import RedisCluster

from graftree.errors import ConfigError, Unavailable
from graftree.store.address import RedisAddress, redact
from graftree.store.committer import Committer, Durability
from graftree.store.connection import check, connect
from graftree.store.registry import Registry
from graftree.store.sessions import Commit, SessionStore
from tests.fakes import FakeVerifier, plain
from tests.redis_servers import ClusterNode, eventually, free_port, watched
from tests.router_harness import PROMPT, harness
from tests.store_redis import record, server


async def until(condition: Callable[[], bool]) -> None:
    """Wait for other processes."""
    await asyncio.to_thread(eventually, condition, "it")


async def test_a_failover_behind_a_sentinel() -> None:
    """The primary dies under a session: its commits go on undurable, reach the replica once that is the primary, and
    the whole session is there."""
    with watched() as servers:
        async with connect(servers.url, timeout_seconds=0.5) as redis:
            store = SessionStore(redis, ttl_seconds=60)
            committer = Committer(store, time.monotonic, patience_seconds=0.3, retry_seconds=(0.02, 0.1))
            await committer.create(record())
            assert await committer.commit(Commit("s-1", 1, 0, (7,))) is Durability.DURABLE
            servers.primary.stop()
            assert await committer.commit(Commit("s-1", 1, 1, (8,))) is Durability.DEGRADED
            assert committer.degraded
            await until(servers.failed_over)
            await until(lambda: not committer.degraded)
            assert await committer.commit(Commit("s-1", 1, 2, (9,), finished=True)) is Durability.DURABLE
            await committer.close()
            assert await store.load("s-1") == record(token_ids=(7, 8, 9), finished=True)
        assert servers.replica.ask("EXISTS", "graftree:v1:{s:s-1}:record") == 1


async def test_a_router_through_a_failover() -> None:
    """A router behind a Sentinel loses its primary in mid request: the answer is plain decoding's, the pods stay
    known, and a request that comes again afterwards is told from the record on the new primary."""
    verifier = FakeVerifier()
    identifier = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"
    options = {"token_ids": PROMPT, "max_new_tokens": 60, "request_id": identifier}
    with watched() as servers:
        async with harness(verifier, redis=servers, lease_seconds=1.0) as stack:
            stream = stack.client.stream(**options)
            await anext(stream)
            servers.primary.stop()
            tokens = [token async for chunk in stream for token in chunk.token_ids]
            assert stream.result.token_ids[-len(tokens) :] == tuple(tokens)
            assert list(stream.result.token_ids) == plain(PROMPT, 60)
            await until(servers.failed_over)
            await until(lambda: not stack.router.committer.degraded)
            async with stack.another() as other:
                stored = await SessionStore(other.redis, ttl_seconds=60).load(identifier)
                assert stored is not None
                assert (list(stored.token_ids), stored.finished) == (plain(PROMPT, 60), True)


async def test_a_cluster_that_starts_again_empty() -> None:
    """The only node of a cluster dies and comes back with nothing: sessions go on, and are written again whole."""
    node = ClusterNode().start()
    try:
        redis = connect(node.url, timeout_seconds=0.5)
        assert isinstance(redis, RedisCluster)
        async with redis:
            store = SessionStore(redis, ttl_seconds=60)
            committer = Committer(store, time.monotonic, patience_seconds=0.3, retry_seconds=(0.02, 0.1))
            names = [f"s-{index}" for index in range(20)]
            for name in names:
                await committer.create(record(name))
            await asyncio.gather(*(committer.commit(Commit(name, 1, 0, (1,))) for name in names))
            node.stop()
            outcomes = await asyncio.gather(*(committer.commit(Commit(name, 1, 1, (2,))) for name in names))
            assert set(outcomes) == {Durability.DEGRADED}
            await asyncio.to_thread(node.start)
            await until(lambda: not committer.degraded and committer.unsaved_tokens == 0)
            for name in names:
                assert await store.load(name) == record(name, token_ids=(1, 2))
            assert committer.sessions_restored == 20
            await committer.close()
    finally:
        node.close()


async def test_the_documented_rights_in_a_cluster() -> None:
    """The user of docs/security.md needs the two commands that are named there for a cluster, and no other."""
    document = (Path(__file__).parent.parent / "docs/security.md").read_text()
    rule = re.search(r"ACL SETUSER graftree (.*)", document)
    more = re.search(r"in a cluster also `(.*?)`", document)
    assert rule is not None
    assert more is not None
    node = server("cluster")
    assert isinstance(node, ClusterNode)
    node.ask("ACL", "SETUSER", "graftree", *rule[1].replace("PASSWORD", "hunter2").split(), *more[1].split())
    async with connect(node.url.replace("//", "//graftree:hunter2@")) as redis:
        store = SessionStore(redis, ttl_seconds=60)
        await store.create(record("rights"), 10)
        assert await store.commit([Commit("rights", 1, 0, (1,))], 10) == [None]
        assert (await store.acquire("rights", "router-b", 10, force=True)).token_ids == (1,)
        await Registry(redis, lease_seconds=5).pods()


def test_whether_redis_answers() -> None:
    """The question before a stack starts works for every kind of URL."""
    check(server("valkey").url)
    check(server("cluster").url)
    gone = free_port()
    for url in (f"redis+cluster://127.0.0.1:{gone}", f"redis+sentinel://127.0.0.1:{gone}/main"):
        with pytest.raises(Unavailable, match="does not answer"):
            check(url)


def test_what_a_url_says() -> None:
    """Nodes with their ports, service, database, user and options."""
    found = RedisAddress.parse("rediss+sentinel://me:p%40ss@a,b:1,[::1]:2/main/3?sentinel_password=x&protocol=3")
    assert found == RedisAddress(
        kind="sentinel",
        tls=True,
        nodes=(("a", 26379), ("b", 1), ("::1", 2)),
        service="main",
        db=3,
        user="me",
        password="p@ss",
        options={"sentinel_password": "x", "protocol": 3},
    )
    assert RedisAddress.parse("redis+cluster://a:1,b").nodes == (("a", 1), ("b", 6379))
    assert redact("redis+sentinel://me:secret@a,b:1/main/0?password=secret") == "redis+sentinel://a,b:1/main/0"


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://secret@a:1",
        "redis+sentinel://:secret@a:1/main/zero",
        "redis+sentinel://:secret@a:1/main/0/1",
        "redis+sentinel://:secret@a:0/main",
        "redis+sentinel://:secret@a:1,/main",
        "redis+cluster://:secret@a:1/1",
        "redis+cluster://:secret@",
        "redis+cluster://:secret@a:1?db=1",
        "redis+cluster://:secret@a:1?sentinel_password=secret",
        "redis+other://:secret@a:1",
        "redis://:secret@a:1,b:2",
    ],
)
def test_urls_that_cannot_be(url: str) -> None:
    """Refused by key, without the password."""
    with pytest.raises(ConfigError) as caught:
        connect(url, key="GRAFTREE_REDIS")
    assert caught.value.key == "GRAFTREE_REDIS"
    assert "secret" not in str(caught.value)
