"""`Script`: one Lua file next to this module, run by its SHA-1.

EVALSHA costs a round trip like any command; the text travels only when a server does not know it, for instance
after a restart. redis-py's own scripts in pipelines ask SCRIPT EXISTS first, a second round trip each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

Argument = bytes | str | int


class Script:
    """A Lua script.

    Args:
        name: file name in this package, without `.lua`.
    """

    def __init__(self, name: str) -> None:
        self.text = resources.files(__package__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: Redis, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Run once. Raises redis-py's errors."""
        try:
            return await redis.evalsha(self.sha, len(keys), *keys, *arguments)
        except NoScriptError:
            return await redis.eval(self.text, len(keys), *keys, *arguments)

    async def run_all(self, redis: Redis, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]) -> list[Any]:
        """Run for each (keys, arguments) in order, in one round trip; a failed call's entry is its exception.

        The script must bear being run twice: where the server lacks it, everything from there on is sent again.
        """
        replies = await self._pipeline(redis, calls)
        for index, reply in enumerate(replies):
            if isinstance(reply, NoScriptError):
                await redis.script_load(self.text)
                return replies[:index] + await self._pipeline(redis, calls[index:])
        return replies

    async def _pipeline(self, redis: Redis, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]) -> list[Any]:
        async with redis.pipeline(transaction=False) as pipeline:
            for keys, arguments in calls:
                # Not pipeline.evalsha: redis-py refuses that method in a cluster, where it does no harm.
                pipeline.execute_command("EVALSHA", self.sha, len(keys), *keys, *arguments)
            return await pipeline.execute(raise_on_error=False)
