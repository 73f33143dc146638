"""`KeyRing`: who may ask, from a file of hashed API keys that may be replaced while the router runs.

    {"keys": [{"name": "alice", "tenant": "acme", "sha256": "9f86...", "requests_per_second": 5, "concurrent": 8}]}

`graftree keys new` makes a key and its entry. A key is 256 random bits, so a plain SHA-256 of it is enough: there is
nothing to guess, and a stolen file opens nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from graftree.errors import ConfigError, Unauthenticated
from graftree.security.files import WatchedFiles

PREFIX = "gt_"
MAX_KEY_CHARACTERS = 256
MAX_FILE_BYTES = 16 << 20

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,32}$")]
Limit = Annotated[float, Field(ge=0, le=1e12)]


class ApiKey(BaseModel):
    """One key; limits are those of one router, 0 = none.

    Attributes:
        name: of the key, for the audit log.
        tenant: whose it is; requests of different tenants never meet.
        sha256: of the key, 64 hexadecimal digits.
        requests_per_second: on average; up to `burst` at once (0 = as many as come in a second, at least 1).
        concurrent: requests at once.
        tokens_per_minute: prompt and output tokens on average; a minute's worth at once.
        max_priority: highest priority that its requests may have; unlike the others, unset = 0, the ordinary one.
        admin: may see the pods and their addresses (GetModelInfo).
        expires: from then on it opens nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name
    tenant: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_per_second: Limit = 0.0
    burst: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    concurrent: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    tokens_per_minute: Limit = 0.0
    max_priority: Annotated[int, Field(ge=-100, le=100)] = 0
    admin: bool = False
    expires: AwareDatetime | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey]


def new_key() -> str:
    """A fresh key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def read(path: str) -> dict[str, ApiKey]:
    """The keys of a file, by digest.

    Raises:
        ConfigError: names api_keys: it cannot be read, or what in it is wrong; no key is repeated.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError("api_keys", path, f"a file that can be read ({error.strerror or error})") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError("api_keys", path, f"at most {MAX_FILE_BYTES} bytes")
    try:
        keys = _File.model_validate_json(content).keys
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ConfigError("api_keys", path, f"{place}: {first['msg']}") from None
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            raise ConfigError("api_keys", path, f"every key with a {field} of its own")
    return {key.sha256: key for key in keys}


class KeyRing:
    """The keys in force.

    Args:
        path: of the file.

    Raises:
        ConfigError: as `read`.
    """

    def __init__(self, path: str) -> None:
        self.files = WatchedFiles([path], lambda: read(path))

    def find(self, presented: str) -> ApiKey:
        """The entry of a key that somebody shows.

        Raises:
            Unauthenticated: it is none, or has expired; does not say which.
        """
        self.files.refresh()
        known = self.files.value.get(digest(presented)) if len(presented) <= MAX_KEY_CHARACTERS else None
        if known is None or (known.expires is not None and known.expires <= datetime.now(UTC)):
            raise Unauthenticated("no valid API key: send it as authorization: Bearer <key>")
        return known
