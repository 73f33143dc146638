"""`Loader`: a session's blocks out of the KV Redis: are they there, is it worth it, read, check, hand over.

Several batches are under way at once, so that Redis reads while others are checked. Whatever goes wrong, or takes
longer than computing would, ends the load; what has come so far is used.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import structlog
from torch import Tensor

from graftree.errors import GraftreeError
from graftree.models.kv_codec import BlockFormat, Refusal
from graftree.store.kv_blocks import BlockStore
from verifier_service.kv_choice import Choice
from verifier_service.kv_counters import KvCounters, Outcome
from verifier_service.kv_exchange import Load
from verifier_service.kv_link import Link

log = structlog.get_logger(__name__)

LOADS = 4  # at once
BATCHES = 2  # of a load at once
_AHEAD = 16  # batches of a load that the engine has not taken yet
_THREADS = 4  # that check a batch
_SILENCE_SECONDS = 0.1  # who has not answered a lookup by then, when time is up, is away


class Put(Protocol):
    """Hands blocks to the engine; `done` is called on the event loop with the seconds that it took to place them."""

    def __call__(self, load: Load, data: Tensor, done: Callable[[float], None]) -> None: ...


class Loader:
    """One per verifier, on the pod's event loop.

    Attributes:
        choice: load or prefill.
    """

    def __init__(
        self,
        store: BlockStore,
        block_format: BlockFormat,
        choice: Choice,
        link: Link,
        counters: KvCounters,
        put: Put,
        refused: Callable[[bytes], None],
        *,
        batch_blocks: int,
    ) -> None:
        """
        Args:
            refused: called with the name of a block whose value is not what it should be.
            batch_blocks: most blocks in one round trip.
        """
        self.choice = choice
        self._store, self._format, self._link, self._counters = store, block_format, link, counters
        self._put, self._refused, self._batch = put, refused, batch_blocks
        self._gate = asyncio.Semaphore(LOADS)

    async def run(self, load: Load) -> None:
        """One load, to its end."""
        now = asyncio.get_running_loop().time
        begun, outcome = now(), Outcome.LEFT
        try:
            async with asyncio.timeout(self.choice.patience(load.first, len(load.names), load.length)), self._gate:
                outcome = await self._load(load)
        except TimeoutError:
            outcome = Outcome.PART if load.got else Outcome.LATE
        except GraftreeError as error:
            self._link.failed(error)
            outcome = Outcome.PART if load.got else Outcome.FAILED
        finally:
            self._counters.loads[outcome] += 1
            self._counters.load_ns += round((now() - begun) * 1e9)

    async def read(self, names: Sequence[bytes]) -> tuple[Tensor, int, Refusal | None]:
        """Blocks by name.

        Returns:
            (2, layers, n, block_size, KVH, D); how many of them are good, from the first on; what is wrong with the
            next one, None = it is not there.
        """
        values = await self._store.read(names)
        data, part = self._format.empty(len(names)), -(-len(names) // _THREADS)
        starts = range(0, len(names), part)
        found = await asyncio.gather(
            *(asyncio.to_thread(self._unpack, names, values, data, start, start + part) for start in starts)
        )
        return data, *next((entry for entry in found if entry[0] < len(names)), (len(names), None))

    def _unpack(
        self, names: Sequence[bytes], values: Sequence[bytes | None], data: Tensor, start: int, end: int
    ) -> tuple[int, Refusal | None]:
        """Index of the first block from `start` to `end` that is not good, and why; len(names) where all are."""
        for index in range(start, min(end, len(names))):
            value = values[index]
            if value is None:
                return index, None
            if (refusal := self._format.unpack(names[index], value, data[:, :, index])) is not None:
                return index, refusal
        return len(names), None

    async def _load(self, load: Load) -> Outcome:
        available, refusal = await self._lookup(load)
        if not available:
            return Outcome.REFUSED if refusal else Outcome.MISS
        pays = partial(self.choice.pays, load.first, length=load.length)
        if pays(blocks=len(load.names)) and not pays(blocks=available):  # else it is a trial
            return Outcome.PREFILL
        self.choice.times.tried()
        names = load.names[:available]
        batches = [names[start : start + self._batch] for start in range(0, available, self._batch)]
        tasks = deque(asyncio.create_task(self.read(batch)) for batch in batches[:BATCHES])
        try:
            return await self._take(load, batches, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(
        self,
        load: Load,
        batches: Sequence[Sequence[bytes]],
        tasks: deque[asyncio.Task[tuple[Tensor, int, Refusal | None]]],
    ) -> Outcome:
        """Hand batches over in order, as they come.

        Args:
            tasks: read the first ones; always has those that are under way.
        """
        now, room = asyncio.get_running_loop().time, asyncio.Semaphore(_AHEAD)
        begun = now()
        for index, names in enumerate(batches):
            data, good, refusal = await tasks[0]
            tasks.popleft()
            if load.given_up:
                return Outcome.LEFT
            if good:
                await room.acquire()
                self._hand_over(load, data[:, :, :good], room)
                self.choice.times.loaded(load.got, now() - begun)
            if good < len(names):
                if refusal is not None:
                    self._refuse(names[good], refusal)
                return Outcome.PART if load.got else Outcome.REFUSED if refusal else Outcome.MISS
            if index + BATCHES < len(batches):
                tasks.append(asyncio.create_task(self.read(batches[index + BATCHES])))
        return Outcome.LOADED

    async def _lookup(self, load: Load) -> tuple[int, Refusal | None]:
        """How many of the wanted blocks are there, from the first on; what is wrong with the next one, if it is."""
        now = asyncio.get_running_loop().time
        begun, answered = now(), False
        try:
            sizes = await self._store.sizes(load.names)
            answered = True
        finally:
            waited = now() - begun
            if not answered and waited > _SILENCE_SECONDS:
                self._link.failed(TimeoutError(f"no answer within {waited:.1f} s"))
        self.choice.times.looked_up(waited)
        self._counters.blocks_looked_up += len(sizes)
        good = next((index for index, size in enumerate(sizes) if size != self._format.value_bytes), len(sizes))
        if good == len(sizes) or not sizes[good]:
            return good, None
        self._refuse(load.names[good], Refusal.SIZE)
        return good, Refusal.SIZE

    def _hand_over(self, load: Load, data: Tensor, room: asyncio.Semaphore) -> None:
        count = data.shape[2]
        load.got += count
        self._counters.blocks_loaded += count
        self._counters.bytes_loaded += count * self._format.value_bytes

        def done(seconds: float) -> None:
            room.release()
            if seconds:
                self.choice.times.placed(count, seconds)

        self._put(load, data, done)

    def _refuse(self, name: bytes, refusal: Refusal) -> None:
        self._counters.refused[refusal] += 1
        log.warning("KV block refused", reason=str(refusal), key=self._store.key(name))
        self._refused(name)
