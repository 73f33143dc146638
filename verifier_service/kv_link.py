"""`Link`: whether the KV Redis is there. While it is away nobody asks it for anything but a sign of life."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from graftree.errors import GraftreeError
from graftree.store.outage import Outage

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 2.0  # between two tries


class Link:
    """Args:
    ping: asks once; raises GraftreeError, within a bounded time, where nobody answers.
    changed: called when it went away (False) and when it is back (True).
    clock: seconds.
    rng: jitter of the pauses.

    Attributes:
        outages: times that it went away.
    """

    def __init__(
        self,
        ping: Callable[[], Awaitable[None]],
        changed: Callable[[bool], None],
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._ping, self._changed = ping, changed
        self._outage = Outage(
            clock,
            rng,
            shortest=_SHORTEST_SECONDS,
            longest=_LONGEST_SECONDS,
            lost="KV Redis away",
            regained="KV Redis is back",
        )
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.outages = 0

    @property
    def up(self) -> bool:
        """Whether it answered when it was asked last; may be read on any thread."""
        return not self._outage.active

    def failed(self, error: BaseException) -> None:
        """It did not do what it was asked for."""
        if self._closed:
            return
        first = self.up
        self._outage.begin(error)
        if first:
            self.outages += 1
            self._changed(False)
            self._task = asyncio.create_task(self._probe())

    async def close(self) -> None:
        """Ask no more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _probe(self) -> None:
        while not self.up:
            await asyncio.sleep(self._outage.next_pause())
            try:
                await self._ping()
            except GraftreeError as error:
                self._outage.begin(error)
            else:
                self._outage.end()
        self._changed(True)
