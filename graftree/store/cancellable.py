"""`cancellable`: connections to Redis whose writes never lose a cancellation."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import TimeoutError


class _Cancellable(AbstractConnection):
    """redis-py bounds a write by `asyncio.wait_for`, which before Python 3.12 drops a cancellation that arrives in
    the turn in which the write ends: the task goes on, and whoever waits for its end waits for ever."""

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        seconds, self.socket_timeout = self.socket_timeout, None  # without one, no wait_for
        try:
            async with asyncio.timeout(seconds):
                await super().send_packed_command(command, check_health)
        except builtins.TimeoutError:
            raise TimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = seconds


def cancellable(kind: type[AbstractConnection]) -> type[Any]:
    """One of redis-py's classes of connections, so changed."""
    return type(f"Cancellable{kind.__name__}", (_Cancellable, kind), {})
