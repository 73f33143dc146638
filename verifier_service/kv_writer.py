"""`Writer`: blocks on their way to the KV Redis, behind the engine's back.

    names of full blocks -> bounded queue -> are they there? -> copies of those that are not -> packed, written

The queue holds names only; a batch's rows are copied when it is its turn. So the engine is asked for no more than
Redis takes, and what is too much is dropped rather than waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from torch import Tensor

from graftree.errors import GraftreeError
from graftree.models.kv_codec import BlockFormat
from graftree.store.kv_blocks import BlockStore
from verifier_service.kv_counters import Dropped, KvCounters
from verifier_service.kv_link import Link

Supply = Callable[[Sequence[bytes]], Awaitable[tuple[Sequence[bytes], Tensor | None]]]

_KNOWN = 1 << 16  # names that are remembered as written
_PAUSE_SECONDS = 1.0  # after a batch of which Redis took nothing


class Writer:
    """One per verifier, on the pod's event loop."""

    def __init__(
        self,
        store: BlockStore,
        block_format: BlockFormat,
        link: Link,
        counters: KvCounters,
        supply: Supply,
        emptied: Callable[[], None],
        *,
        queue_blocks: int,
        batch_blocks: int,
        keep_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            supply: copies of blocks by name, without those that the pool has forgotten.
            emptied: called when what was written is there no more.
            queue_blocks: most names that wait.
            batch_blocks: most blocks in one round trip.
            keep_seconds: how long a block that is there is taken to be there.
            clock: seconds.
        """
        self._store, self._format, self._link, self._counters = store, block_format, link, counters
        self._supply, self._emptied, self._clock = supply, emptied, clock
        self._limit, self._batch, self._keep = queue_blocks, batch_blocks, keep_seconds
        self._queue: dict[bytes, None] = {}
        self._known: OrderedDict[bytes, float] = OrderedDict()  # name -> until when
        self._wake = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Names in the queue."""
        return len(self._queue)

    def offer(self, names: Iterable[bytes]) -> None:
        """Queue blocks, but for those that are known to be there."""
        now, dropped = self._clock(), self._counters.dropped
        for name in names:
            if name in self._queue or self._known.get(name, 0.0) > now:
                continue
            if not self._link.up:
                dropped[Dropped.AWAY] += 1
            elif len(self._queue) >= self._limit:
                dropped[Dropped.QUEUE] += 1
            else:
                self._queue[name] = None
        if self._queue:
            self._wake.set()

    def forget(self, names: Iterable[bytes] | None = None) -> None:
        """These blocks, or all, may not be there any more."""
        if names is None:
            self._known.clear()
        else:
            for name in names:
                self._known.pop(name, None)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            batch = list(self._queue)[: self._batch]
            for name in batch:
                del self._queue[name]
            if not self._queue:
                self._wake.clear()
            if not self._link.up:
                self._counters.dropped[Dropped.AWAY] += len(batch)
                continue
            begun = time.monotonic_ns()
            left = set(batch)
            try:
                await self._write(batch, left)
            except GraftreeError as error:
                self._counters.dropped[Dropped.FAILED] += len(left)
                self._link.failed(error)
            self._counters.write_ns += time.monotonic_ns() - begun

    async def _write(self, batch: Sequence[bytes], left: set[bytes]) -> None:
        """Bring a batch to Redis.

        Args:
            left: loses every name whose fate is settled and counted.
        """
        counters = self._counters
        there, emptied = await self._store.keep(batch)
        if emptied:
            counters.emptied += 1
            self.forget()
            self._emptied()
        kept = [name for name, is_there in zip(batch, there, strict=True) if is_there]
        counters.blocks_kept += len(kept)
        self._remember(kept)
        left.difference_update(kept)
        if not left:
            return
        names, rows = await self._supply([name for name in batch if name in left])
        counters.dropped[Dropped.GONE] += len(left) - len(names)
        left.intersection_update(names)
        if rows is None:
            return
        values = await asyncio.to_thread(self._pack, names, rows)
        counters.dropped[Dropped.PACKING] += len(names) - len(values)
        left.intersection_update(name for name, _ in values)
        taken = await self._store.write(values)
        written = [name for (name, _), was_taken in zip(values, taken, strict=True) if was_taken]
        counters.blocks_written += len(written)
        counters.bytes_written += len(written) * self._format.value_bytes
        self._remember(written)
        left.difference_update(written)
        counters.dropped[Dropped.FAILED] += len(left)
        left.clear()
        if values and not written:  # it is full, or a replica: what comes meanwhile is dropped when the queue is full
            await asyncio.sleep(_PAUSE_SECONDS)

    def _pack(self, names: Sequence[bytes], rows: Tensor) -> list[tuple[bytes, bytearray]]:
        rows = rows.cpu()
        values = [(name, self._format.pack(name, rows[:, :, index])) for index, name in enumerate(names)]
        return [(name, value) for name, value in values if value is not None]

    def _remember(self, names: Iterable[bytes]) -> None:
        until = self._clock() + self._keep
        for name in names:
            self._known[name] = until
            self._known.move_to_end(name)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
