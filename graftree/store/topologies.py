"""Clients of Redis where it is more than one server: behind Sentinels, and as a cluster.

Both follow a failover by themselves: while it lasts commands fail as those of a Redis that is away (Unavailable).
"""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import EqualJitterBackoff
from redis.credentials import CredentialProvider

from graftree.store.address import RedisAddress
from graftree.store.cancellable import cancellable

# Connections are opened by need, and calls do not wait for a free one as they do at one server.
_MOST_CONNECTIONS = 4096


class _Watched(Redis):
    """The primary that some Sentinels name; closes the connections to them, too."""

    watchers: Sentinel

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for watcher in self.watchers.sentinels:
            await watcher.aclose()


def behind_sentinels(address: RedisAddress, timeout_seconds: float, credentials: CredentialProvider | None) -> Redis:
    """A client of the primary, whichever server that is when a connection is opened."""
    options = dict(address.options)
    login = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    waits = _waits(timeout_seconds)
    tls = {"ssl": True, **_tls(options)} if address.tls else {}
    sentinel = Sentinel(
        list(address.nodes),
        sentinel_kwargs={
            "retry": _retry(),
            **waits,
            **tls,
            **{name: value for name, value in login.items() if value},
        },
    )
    managed = SentinelManagedSSLConnection if address.tls else SentinelManagedConnection
    redis = sentinel.master_for(
        address.service,
        redis_class=_Watched,
        connection_class=cancellable(managed),
        max_connections=_MOST_CONNECTIONS,
        db=address.db,
        health_check_interval=10,
        retry=_retry(),
        **waits,
        **options,
        **_login(address, credentials),
    )
    redis.watchers = sentinel
    return redis


def cluster(address: RedisAddress, timeout_seconds: float, credentials: CredentialProvider | None) -> Redis:
    """A client of a cluster; has the commands of `Redis`, each for keys of one hash tag."""
    client = RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.nodes],
        max_connections=_MOST_CONNECTIONS,
        health_check_interval=10,
        retry=_retry(),
        ssl=address.tls,
        **_waits(timeout_seconds),
        **address.options,
        **_login(address, credentials),
    )
    kind = cancellable(SSLConnection if address.tls else Connection)
    client.connection_kwargs["connection_class"] = kind  # of the nodes that are found
    for node in client.startup_nodes:
        node.connection_class = kind
    return cast(Redis, client)


def _waits(timeout_seconds: float) -> dict[str, Any]:
    return {"socket_timeout": timeout_seconds, "socket_connect_timeout": timeout_seconds}


def _retry() -> Retry:
    return Retry(EqualJitterBackoff(cap=0.05, base=0.005), retries=1)


def _tls(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("ssl_")}


def _login(address: RedisAddress, credentials: CredentialProvider | None) -> dict[str, Any]:
    if credentials is not None:
        return {"credential_provider": credentials}
    return {"username": address.user or None, "password": address.password or None}
