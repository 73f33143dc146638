"""Reaching Redis: URLs, secrets, bounded waits, and what errors mean."""

from __future__ import annotations

import asyncio
import socket

import pytest
from redis.asyncio import Redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from graftree.errors import ConfigError, GraftreeError, Unavailable
from graftree.store.connection import connect, from_redis, redact
from graftree.store.sessions import SessionStore
from tests.store_redis import record, server


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://host",
        "redis://user:secret@[::1]:6380/3",
        "rediss://:secret@host/1?ssl_check_hostname=no",
        "unix:///run/redis.sock?db=2&password=secret",
        "redis://host:6379/?protocol=3",
    ],
)
async def test_good_urls(url: str) -> None:
    """Every kind of URL makes a client, without a connection being opened."""
    redis = connect(url)
    assert isinstance(redis, Redis)
    await redis.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://user:secret@host",
        "redis://",
        "redis://:secret@",
        "redis://user:secret@host:notaport",
        "redis://user:secret@host:70000",
        "redis://user:secret@host:0",
        "redis://user:secret@host/zero",
        "redis://user:secret@host/1/2",
        "redis://user:secret@host/0?password=secret&nonsense=1",
        "redis://user:secret@host/0?socket_timeout=99",
        "redis://user:secret@host?db=secret",
        "redis://user:secret@host?novalue",
        "redis://user:secret@[::1",
        "redis://user:secret@host/0#secret",
        "unix://?password=secret",
        "rediss://user:secret@host?ssl_check_hostname=maybe&db=x",
    ],
)
def test_bad_urls(url: str) -> None:
    """A URL that cannot work is a ConfigError naming the key, and never repeats the password."""
    with pytest.raises(ConfigError) as refused:
        connect(url, key="GRAFTREE_REDIS")
    assert refused.value.key == "GRAFTREE_REDIS"
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_redact() -> None:
    """What is logged is scheme, host, port and path."""
    assert redact("redis://user:secret@host:6379/1?password=secret") == "redis://host:6379/1"
    assert redact("unix:///run/redis.sock?password=secret") == "unix:///run/redis.sock"
    assert redact("secret@[") == "(malformed)"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionError("Error 111"), Unavailable),
        (TimeoutError("Timeout reading"), Unavailable),
        (BusyLoadingError("loading"), Unavailable),
        (ReadOnlyError("read only"), Unavailable),
        (OutOfMemoryError("command not allowed"), Unavailable),
        (AuthenticationError("invalid"), Unavailable),
        (OSError("no route"), Unavailable),
        (ResponseError("MISCONF Errors writing to the AOF file"), Unavailable),
        (ResponseError("CLUSTERDOWN the cluster is down"), Unavailable),
        (ResponseError("WRONGTYPE Operation"), GraftreeError),
        (NoPermissionError("this user has no permissions"), GraftreeError),
    ],
)
def test_errors(error: Exception, kind: type[GraftreeError]) -> None:
    """What may succeed later is Unavailable; a wrong command or a refused permission is not."""
    assert type(from_redis(error)) is kind


async def test_nobody_listens() -> None:
    """A closed port is Unavailable, without a secret in the text."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        async with connect(f"redis://user:secret@127.0.0.1:{bound.getsockname()[1]}") as redis:
            with pytest.raises(Unavailable) as refused:
                await SessionStore(redis, ttl_seconds=60).load("s-1")
    assert "secret" not in str(refused.value)


async def test_a_mute_server() -> None:
    """A server that accepts and says nothing is Unavailable after the time-out."""
    closed = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await closed.wait()
        writer.close()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with connect(f"redis://127.0.0.1:{port}", timeout_seconds=0.02) as redis:
        with pytest.raises(Unavailable, match="Timeout"):
            await SessionStore(redis, ttl_seconds=60).create(record(), 10)
        closed.set()
    listener.close()


async def test_wrong_password() -> None:
    """A refused password is Unavailable, and the text does not hold it."""
    async with connect(server("valkey").url.replace("//", "//nobody@") + "?password=secret") as redis:
        with pytest.raises(Unavailable) as refused:
            await SessionStore(redis, ttl_seconds=60).load("s-1")
    assert "WRONGPASS" in str(refused.value) or "invalid" in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_pool_is_bounded() -> None:
    """Any number of calls share the connections there are: the server never sees more."""
    url = server("valkey").url
    async with connect(url) as admin, connect(url, max_connections=3, timeout_seconds=30) as redis:
        await admin.flushall()
        before = len(await admin.client_list())
        store = SessionStore(redis, ttl_seconds=60)
        await asyncio.gather(*(store.create(record(f"s-{index}"), 10) for index in range(50)))
        assert len(await admin.client_list()) - before <= 3
