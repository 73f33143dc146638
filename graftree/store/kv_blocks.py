"""`BlockStore`: KV blocks in Redis, each one value under a name that says what is in it.

    graftree:kv:v1:<space>:<name in hex>   string   a block as `graftree.models.kv_codec` packs it
    graftree:kv:v1:marker                  string   random, by whoever came first; another one: it was emptied

The space is the packing, so blocks of two packings never meet. A key has no hash tag: the blocks of a text spread
over the nodes of a Redis Cluster, and every command names one key. It is a cache: any key may be gone at any time.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from graftree.store.connection import translated

PREFIX = "graftree:kv:v1"
MARKER = f"{PREFIX}:marker"
NO_STRING = -1  # the size of something that is no block by its very type

Command = tuple[str | bytes | bytearray | int, ...]


class BlockStore:
    """Every method is one round trip. Raises Unavailable where Redis cannot be reached or does not answer now, and
    GraftreeError where it lets us do nothing.

    Args:
        redis: with binary replies (`graftree.store.connection.connect`).
        space: keeps apart what must not meet; no colon.
        ttl_seconds: how long a block is kept after it was written or kept.
    """

    def __init__(self, redis: Redis, *, space: str, ttl_seconds: float) -> None:
        self._redis, self._space = redis, space
        self._ttl = max(1, round(ttl_seconds * 1000))
        self._marker = b""

    def key(self, name: bytes) -> str:
        """Where a block lies."""
        return f"{PREFIX}:{self._space}:{name.hex()}"

    async def sizes(self, names: Sequence[bytes]) -> list[int]:
        """Bytes of each value; 0 = it is not there, `NO_STRING` = something else is."""
        replies = await self._pipeline([("STRLEN", self.key(name)) for name in names])
        return [NO_STRING if isinstance(reply, Exception) else int(reply) for reply in replies]

    async def read(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Each value; None = it is not there any more, or is no string."""
        replies = await self._pipeline([("GET", self.key(name)) for name in names])
        return [reply if isinstance(reply, bytes) else None for reply in replies]

    async def keep(self, names: Sequence[bytes]) -> tuple[list[bool], bool]:
        """Let blocks live as long as if they had been written now.

        Returns:
            Which of them are there, and whether the store was emptied since the last call: what was there may not be.
        """
        commands: list[Command] = [
            ("SET", MARKER, secrets.token_bytes(8), "NX"),
            ("PEXPIRE", MARKER, self._ttl),
            ("GET", MARKER),
            *(("PEXPIRE", self.key(name), self._ttl) for name in names),
        ]
        replies = await self._pipeline(commands)
        before, marker = self._marker, replies[2]
        if isinstance(marker, bytes):  # a replica that takes no writes may have none
            self._marker = marker
        return [reply == 1 for reply in replies[3:]], bool(before) and before != self._marker

    async def write(self, values: Sequence[tuple[bytes, bytes | bytearray]]) -> list[bool]:
        """Write (name, value) pairs; which of them Redis took. It may be full, or a replica."""
        commands: list[Command] = [("SET", self.key(name), value, "PX", self._ttl) for name, value in values]
        return [reply is True for reply in await self._pipeline(commands, may_fail=True)]

    async def delete(self, names: Sequence[bytes]) -> None:
        """Forget blocks."""
        await self._pipeline([("DEL", self.key(name)) for name in names])

    async def ping(self) -> None:
        """Ask whether somebody answers."""
        with translated():
            await self._redis.ping()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _pipeline(self, commands: Sequence[Command], *, may_fail: bool = False) -> list[Any]:
        """One reply per command, an error in place of one that failed. Raises where nothing but errors came back."""
        if not commands:
            return []
        with translated():
            async with self._redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
            errors = [reply for reply in replies if isinstance(reply, Exception)]
            if len(errors) == len(replies) and not may_fail and not str(errors[0]).startswith("WRONGTYPE"):
                raise errors[0]
        return replies
