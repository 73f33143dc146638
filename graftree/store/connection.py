"""How the tiers reach Redis: one URL in, one client with bounded waits out; what its errors mean to us."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import EqualJitterBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    ClusterDownError,
    ClusterError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
)

from graftree.errors import ConfigError, GraftreeError, Unavailable
from graftree.store.address import LIMIT, RedisAddress, redact
from graftree.store.cancellable import cancellable
from graftree.store.topologies import behind_sentinels, cluster

__all__ = ["check", "connect", "from_redis", "is_transient", "redact", "translated"]

# Replies that say "not now" rather than "wrong": a replica, a server that is starting, full, or cannot save.
_TRANSIENT = (
    "READONLY",
    "LOADING",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "MOVED",
    "ASK",
    "MISCONF",
    "NOREPLICAS",
    "OOM",
    "BUSY",
    "UNBLOCKED",
)
_TRANSIENT_ERRORS = (
    ConnectionError,
    TimeoutError,
    ReadOnlyError,
    OutOfMemoryError,
    ClusterDownError,
    ClusterError,
    RedisClusterException,
    OSError,
)
_ERRORS = (RedisError, RedisClusterException, OSError)  # RedisClusterException is no RedisError


def connect(
    url: str,
    *,
    timeout_seconds: float = 1.0,
    max_connections: int = 32,
    key: str = "redis",
    credentials: CredentialProvider | None = None,
) -> Redis:
    """A client for `url`. Nothing is sent before its first command.

    Every wait is bounded: connecting, each reply, and a free connection of the pool take at most `timeout_seconds`;
    a command that met a broken connection is sent once more after a short random pause. Behind Sentinels and in a
    cluster the client follows a failover.

    Args:
        url: of one server, of Sentinels or of a cluster (`graftree.store.address`).
        timeout_seconds: longest wait for a connection and for a reply.
        max_connections: most connections held at once, of one server.
        key: the configuration key that `url` came from.
        credentials: asked for user and password at each connection; None = those of the URL, if any.

    Raises:
        ConfigError: names `key`; a password in the URL is not repeated.
    """
    address = RedisAddress.parse(url, key)
    if credentials is not None and (address.user or address.password):
        raise ConfigError(key, redact(url), "without user and password, because they come from a file")
    if address.kind == "sentinel":
        return behind_sentinels(address, timeout_seconds, credentials)
    if address.kind == "cluster":
        return cluster(address, timeout_seconds, credentials)
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_seconds,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            health_check_interval=10,
            credential_provider=credentials,
            retry=Retry(EqualJitterBackoff(cap=0.05, base=0.005), retries=1),
        )
    except (ValueError, TypeError):
        raise ConfigError(key, redact(url), LIMIT) from None
    pool.connection_class = cancellable(pool.connection_class)
    return Redis.from_pool(pool)


def check(url: str) -> None:
    """Ask once whether a Redis answers, before anything slow is started for it; blocks for seconds at most.

    Raises:
        ConfigError: `url` is none.
        Unavailable: nobody answers, with the address and the reason.
    """
    RedisAddress.parse(url)

    async def ask() -> None:
        async with connect(url, timeout_seconds=2.0) as redis:
            await redis.ping()

    with ThreadPoolExecutor(1) as thread:  # whoever calls may have a loop of his own
        try:
            thread.submit(asyncio.run, ask()).result()
        except _ERRORS as error:
            raise Unavailable(f"redis {redact(url)} does not answer: {_words(error)}") from error


def is_transient(error: BaseException) -> bool:
    """Whether the same command may succeed later, as opposed to a wrong command or damaged data."""
    if isinstance(error, _TRANSIENT_ERRORS):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_TRANSIENT)


def from_redis(error: BaseException) -> GraftreeError:
    """The Graftree error that stands for a redis-py one."""
    kind = Unavailable if is_transient(error) else GraftreeError
    return kind(f"Redis: {_words(error)}")


def _words(error: BaseException) -> str:
    # What no Sentinel knows is followed by all that each of them was asked with.
    text = str(error).partition(" : <")[0] if isinstance(error, MasterNotFoundError) else str(error)
    return f"{type(error).__name__}: {text}"


@contextmanager
def translated() -> Iterator[None]:
    """Raises Unavailable where Redis cannot be reached or cannot write now, GraftreeError for its other errors."""
    try:
        yield
    except _ERRORS as error:
        raise from_redis(error) from error
