"""`EventLog`: a generation's events, written once, read by any number of streams from the first event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from graftree.errors import GraftreeError
from graftree.v1.generation_pb2 import GenerateResponse


class EventLog:
    """Append-only; at most one event per generated token and two more, so a slow reader costs a bounded amount."""

    def __init__(self) -> None:
        self._events: list[GenerateResponse] = []
        self._readers: list[asyncio.Future[None]] = []
        self._error: GraftreeError | None = None
        self.ended = False

    def __len__(self) -> int:
        return len(self._events)

    def append(self, event: GenerateResponse) -> None:
        self._events.append(event)
        self._wake()

    def end(self, error: GraftreeError | None = None) -> None:
        """Nothing follows; readers raise `error` behind the last event. The first end counts."""
        if not self.ended:
            self.ended, self._error = True, error
            self._wake()

    async def follow(self) -> AsyncIterator[GenerateResponse]:
        """Every event from the first on.

        Raises:
            GraftreeError: the generation failed.
        """
        index = 0
        while True:
            while index < len(self._events):
                yield self._events[index]
                index += 1
            if self.ended:
                if self._error is not None:
                    raise self._error
                return
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            await reader

    def _wake(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)
