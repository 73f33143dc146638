"""`Outbox`: what waits to be sent on a stream, batched and held to the receiver's credits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """One direction of a stream. Everything put while the sender waits travels in its next message.

    Back-pressure batches instead of losing: without a credit items stay, and leave together with the next one.
    Used on one event loop; `put` never blocks.

    Args:
        credits: messages that may be sent at once; None = no limit.
    """

    def __init__(self, credits: int | None = None) -> None:
        self._items: list[T] = []
        self._credits = credits
        self._wake = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, *items: T) -> None:
        """Queue items for the next message."""
        self._items.extend(items)
        self._wake.set()

    def grant(self, credits: int) -> None:
        """Allow `credits` more messages."""
        if self._credits is not None:
            self._credits += credits
        self._wake.set()

    def close(self) -> None:
        """Let `take` return what is left and then an empty list."""
        self._closed = True
        self._wake.set()

    def pending(self) -> Sequence[T]:
        """What waits, in order."""
        return self._items

    def replace(self, items: list[T]) -> None:
        """Swap what waits, e.g. after dropping what has gone stale."""
        self._items = items

    async def take(self) -> list[T]:
        """Wait for at least one item and a credit; take everything and spend one credit.

        Returns:
            The items in order; empty only after `close`.
        """
        while not self._closed and not (self._items and self._credits != 0):
            self._wake.clear()
            await self._wake.wait()
        # One turn of the loop lets every session that is ready now travel in this message.
        await asyncio.sleep(0)
        items, self._items = self._items, []
        if items and self._credits is not None and self._credits > 0:
            self._credits -= 1
        return items
