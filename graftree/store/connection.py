"""How the tiers reach Redis: one URL in, one client with bounded waits out; what its errors mean to us."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import SplitResult, parse_qsl, urlsplit

from redis import Redis as SyncRedis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import EqualJitterBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from graftree.errors import ConfigError, GraftreeError, Unavailable

SCHEMES = ("redis", "rediss", "unix")
_OPTIONS = frozenset(
    {"db", "password", "protocol", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}
)
_LIMIT = "redis://[user:password@]host[:port][/db], rediss://... (TLS) or unix:///path[?db=n]"

# Replies that say "not now" rather than "wrong": a replica, a server that is starting, full, or cannot save.
_TRANSIENT = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "NOREPLICAS", "OOM", "BUSY")
_TRANSIENT_ERRORS = (ConnectionError, TimeoutError, ReadOnlyError, OutOfMemoryError, ClusterDownError, OSError)


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
    a command that met a broken connection is sent once more after a short random pause.

    Args:
        url: redis://, rediss:// or unix://.
        timeout_seconds: longest wait for a connection and for a reply.
        max_connections: most connections held at once.
        key: the configuration key that `url` came from.
        credentials: asked for user and password at each connection; None = those of the URL, if any.

    Raises:
        ConfigError: names `key`; a password in the URL is not repeated.
    """
    _check(url, key)
    if credentials is not None and "@" in urlsplit(url).netloc:
        raise ConfigError(key, redact(url), "without user and password, because they come from a file")
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
        raise ConfigError(key, redact(url), _LIMIT) from None
    pool.connection_class = _CLASSES[pool.connection_class]
    return Redis.from_pool(pool)


class _Cancellable(AbstractConnection):
    """A connection whose writes never lose a cancellation.

    redis-py bounds a write by `asyncio.wait_for`, which before Python 3.12 drops a cancellation that arrives in the
    turn in which the write ends: the task goes on, and whoever waits for its end waits for ever.
    """

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        seconds, self.socket_timeout = self.socket_timeout, None  # without one, no wait_for
        try:
            async with asyncio.timeout(seconds):
                await super().send_packed_command(command, check_health)
        except builtins.TimeoutError:
            raise TimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = seconds


_CLASSES: dict[type[AbstractConnection], type[AbstractConnection]] = {
    cls: type(f"Cancellable{cls.__name__}", (_Cancellable, cls), {})
    for cls in (Connection, SSLConnection, UnixDomainSocketConnection)
}


def check(url: str) -> None:
    """Ask once whether a Redis answers, before anything slow is started for it; blocks for seconds at most.

    Raises:
        ConfigError: `url` is none.
        Unavailable: nobody answers, with the address and the reason.
    """
    _check(url, "redis")
    try:
        with SyncRedis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as redis:
            redis.ping()
    except (RedisError, OSError) as error:
        raise Unavailable(f"redis {redact(url)} does not answer: {type(error).__name__}: {error}") from error


def redact(url: str) -> str:
    """`url` fit for a log: without user, password and options."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(malformed)"
    return f"{parts.scheme}://{host}{parts.path}" if parts.scheme in SCHEMES else "(malformed)"


def is_transient(error: BaseException) -> bool:
    """Whether the same command may succeed later, as opposed to a wrong command or damaged data."""
    if isinstance(error, _TRANSIENT_ERRORS):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_TRANSIENT)


def from_redis(error: BaseException) -> GraftreeError:
    """The Graftree error that stands for a redis-py one."""
    kind = Unavailable if is_transient(error) else GraftreeError
    return kind(f"Redis: {type(error).__name__}: {error}")


@contextmanager
def translated() -> Iterator[None]:
    """Raises Unavailable where Redis cannot be reached or cannot write now, GraftreeError for its other errors."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise from_redis(error) from error


def _check(url: str, key: str) -> None:
    try:
        parts: SplitResult = urlsplit(url)
        port = parts.port
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigError(key, redact(url), _LIMIT) from None
    database = parts.path.strip("/") if parts.scheme != "unix" else ""
    problem = (
        parts.scheme not in SCHEMES
        or (parts.scheme == "unix" and len(parts.path) < 2)
        or (parts.scheme != "unix" and (not parts.hostname or port == 0))
        or (database != "" and not database.isdecimal())
        or bool(parts.fragment)
    )
    if problem:
        raise ConfigError(key, redact(url), _LIMIT)
    for name, _ in options:
        if name not in _OPTIONS:
            raise ConfigError(key, redact(url), f"unknown option {name!r}; known: {', '.join(sorted(_OPTIONS))}")
