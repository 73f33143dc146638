"""`RedisAddress`: what a Redis URL says: one server, those that Sentinels watch, or a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from graftree.errors import ConfigError

SINGLE = ("redis", "rediss", "unix")
SCHEMES = (*SINGLE, "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")

_OPTIONS = frozenset({"password", "protocol", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"})
_MORE = {"single": {"db"}, "sentinel": {"sentinel_username", "sentinel_password"}, "cluster": set[str]()}
LIMIT = (
    "redis://[user:password@]host[:port][/db], rediss://... (TLS), unix:///path[?db=n], "
    "redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db] or "
    "redis+cluster://[user:password@]host[:port][,host[:port]...] (rediss+...: TLS)"
)
_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}
_BOOLEANS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class RedisAddress:
    """Attributes:
    kind: single = one server (or one name for it), sentinel = whichever server the Sentinels call the primary of
        `service`, cluster = Redis Cluster.
    tls: whether connections are encrypted, to the Sentinels, too.
    nodes: host and port of the server, the Sentinels, or some nodes of the cluster; none of a unix socket.
    service: name of the primary that the Sentinels watch.
    db: number of the database.
    user, password: of the servers; empty = none.
    options: what else the URL says, as redis-py's keywords.
    """

    kind: Literal["single", "sentinel", "cluster"]
    tls: bool
    nodes: tuple[tuple[str, int], ...]
    service: str
    db: int
    user: str
    password: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, url: str, key: str = "redis") -> RedisAddress:
        """Raises: ConfigError names `key`; a password in the URL is not repeated."""
        try:
            return cls._parse(url, key)
        except (ValueError, KeyError):
            raise ConfigError(key, redact(url), LIMIT) from None

    @classmethod
    def _parse(cls, url: str, key: str) -> RedisAddress:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or parts.fragment:
            raise ValueError("scheme")
        base, _, word = parts.scheme.partition("+")
        kind: Literal["single", "sentinel", "cluster"] = word or "single"  # type: ignore[assignment]
        options: dict[str, Any] = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        )
        known = _OPTIONS | _MORE[kind]
        for name in options:
            if name not in known:
                limit = f"unknown option {name!r}; known: {', '.join(sorted(known))}"
                raise ConfigError(key, redact(url), limit)
        login, _, hosts = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        service, db = _path(kind, parts.path) if base != "unix" else ("", 0)
        if base == "unix":
            if len(parts.path) < 2:
                raise ValueError("no path")
            nodes: tuple[tuple[str, int], ...] = ()
        else:
            nodes = tuple(_node(host, _PORTS[kind]) for host in hosts.split(","))
        if len(nodes) > 1 and kind == "single":
            raise ValueError("several servers")
        password = unquote(password) or options.pop("password", "")
        if "protocol" in options:
            options["protocol"] = int(options["protocol"])
        if "ssl_check_hostname" in options:
            options["ssl_check_hostname"] = _BOOLEANS[options["ssl_check_hostname"].lower()]
        return cls(kind, base == "rediss", nodes, service, db, unquote(user), password, options)


def redact(url: str) -> str:
    """`url` fit for a log: without user, password and options."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(malformed)"
    return f"{parts.scheme}://{host}{parts.path}" if parts.scheme in SCHEMES else "(malformed)"


def _node(text: str, default: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0:
        raise ValueError("no host")
    return parts.hostname, parts.port or default


def _path(kind: str, path: str) -> tuple[str, int]:
    """Service and database of a URL's path."""
    first, _, second = path.strip("/").partition("/")
    service, database = (first, second) if kind == "sentinel" else ("", path.strip("/"))
    if kind == "sentinel" and not service:
        raise ValueError("no service")
    if database and (kind == "cluster" or not (database.isdecimal() and database.isascii())):
        raise ValueError("database")
    return service, int(database or 0)
