"""`KvCache`: KV blocks of this verifier in a Redis that all verifiers share.

    engine's thread   seek ──► names          put ◄── rows          offer ──► names of full blocks
                                 │             ▲                      │
    event loop        are they there? ► read, check                `Writer`
                                 └───── KV Redis ◄────────────────────┘

A session that opens waits for its blocks no longer than computing them would take, and computes what did not come. A
Redis that is away, slow, empty or full costs the hit and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog
from torch import Tensor

from graftree.errors import GraftreeError
from graftree.models.kv_codec import NAME_BYTES, BlockFormat
from graftree.store.kv_blocks import BlockStore
from verifier_service.kv_choice import Choice
from verifier_service.kv_counters import KvCounters, Outcome
from verifier_service.kv_exchange import Exchange, Load
from verifier_service.kv_link import Link
from verifier_service.kv_loader import Loader
from verifier_service.kv_writer import Writer

log = structlog.get_logger(__name__)

Submit = Callable[[Callable[[Exchange], None]], None]

_BATCH_BYTES = 8 << 20  # in one round trip
_MEASURE_SECONDS, _PROBE_BLOCKS, _PROBES = 2.0, 4, 3
_KEEP_SECONDS = 60.0  # longest that a block is taken to be there without asking


class KvCache:
    """One per verifier, on its pod's event loop; `wants`, `begin` and `offer` are the engine's thread's."""

    def __init__(
        self,
        store: BlockStore,
        block_format: BlockFormat,
        choice: Choice,
        *,
        queue_blocks: int,
        ttl_seconds: float,
        changed: Callable[[bool], None] = lambda up: None,
        rng: random.Random | None = None,
    ) -> None:
        """
        Args:
            store: the Redis.
            block_format: of the verifier's cache.
            choice: load or prefill.
            queue_blocks: most blocks that wait to be written.
            ttl_seconds: the store's.
            changed: called when Redis went away (False) or is back (True).
            rng: jitter of the pauses between tries.
        """
        self.counters = KvCounters()
        self._store, self._format, self._changed = store, block_format, changed
        self._loop = loop = asyncio.get_running_loop()
        batch = max(1, _BATCH_BYTES // block_format.value_bytes)
        self.link = Link(store.ping, self._link_changed, clock=loop.time, rng=rng or random.Random())
        self.writer = Writer(
            store,
            block_format,
            self.link,
            self.counters,
            self._supply,
            self._offer_all,
            queue_blocks=queue_blocks,
            batch_blocks=batch,
            keep_seconds=min(ttl_seconds / 8, _KEEP_SECONDS),
            clock=loop.time,
        )
        self._submit: Submit = lambda command: None
        self.loader = Loader(
            store, block_format, choice, self.link, self.counters, self._put, self._refused, batch_blocks=batch
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, submit: Submit) -> None:
        """Measure, then begin to write.

        Args:
            submit: has a function called on the engine's thread, between two forwards.
        """
        self._submit = submit
        await self._measure()
        self._spawn(self.writer.run())

    async def close(self) -> None:
        """End everything under way."""
        await self.link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(GraftreeError, OSError):
            await self._store.close()

    @property
    def choice(self) -> Choice:
        """Load or prefill; to be read only."""
        return self.loader.choice

    # On the engine's thread.

    def wants(self, first: int, blocks: int, length: int) -> bool:
        """See `verifier_service.kv_exchange.Remote`."""
        if not self.link.up:
            self.counters.loads[Outcome.AWAY] += 1
        elif not self.loader.choice.wants(first, blocks, length):
            self.counters.loads[Outcome.SHORT] += 1
        else:
            return True
        return False

    def begin(self, load: Load) -> None:
        """See `verifier_service.kv_exchange.Remote`."""
        self._call(lambda: self._spawn(self._load(load)))

    def offer(self, names: Sequence[bytes]) -> None:
        """See `verifier_service.kv_exchange.Remote`."""
        self._call(lambda: self.writer.offer(names))

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the pod is gone
            self._loop.call_soon_threadsafe(function)

    # On the event loop.

    async def _load(self, load: Load) -> None:
        try:
            await self.loader.run(load)
        finally:
            self._submit(lambda exchange: exchange.ended(load))

    def _put(self, load: Load, data: Tensor, done: Callable[[float], None]) -> None:
        self._submit(lambda exchange: exchange.put(load, data, lambda seconds: self._call(lambda: done(seconds))))

    def _refused(self, name: bytes) -> None:
        """Take a value away that is not what it should be, so that a good one can be written."""
        self.writer.forget([name])
        self._spawn(self._delete([name]))

    async def _delete(self, names: Sequence[bytes]) -> None:
        try:
            await self._store.delete(names)
        except GraftreeError as error:
            self.link.failed(error)

    async def _supply(self, names: Sequence[bytes]) -> tuple[Sequence[bytes], Tensor | None]:
        answer: asyncio.Future[tuple[Sequence[bytes], Tensor | None]] = self._loop.create_future()

        def settle(found: Sequence[bytes], rows: Tensor | None) -> None:
            if not answer.done():
                answer.set_result((found, rows))

        self._submit(
            lambda exchange: exchange.supply(names, lambda found, rows: self._call(lambda: settle(found, rows)))
        )
        return await answer

    def _offer_all(self) -> None:
        self._submit(lambda exchange: exchange.offer_all())

    def _link_changed(self, up: bool) -> None:
        if up:  # it may have lost anything
            self.writer.forget()
            self._offer_all()
        self._changed(up)

    async def _measure(self) -> None:
        """Write and read some blocks of zeros, so that the first session's choice has something to go by."""
        names = [secrets.token_bytes(NAME_BYTES) for _ in range(_PROBE_BLOCKS)]
        zeros = self._format.empty(1).zero_()[:, :, 0]
        values = [(name, value) for name in names if (value := self._format.pack(name, zeros)) is not None]
        times = self.loader.choice.times
        try:
            async with asyncio.timeout(_MEASURE_SECONDS):
                if not all(await self._store.write(values)):
                    return
                for _ in range(_PROBES):
                    begun = time.monotonic()
                    await self._store.sizes(names)
                    times.looked_up(time.monotonic() - begun)
                    begun = time.monotonic()
                    await self.loader.read(names)
                    times.loaded(len(names), time.monotonic() - begun)
                await self._store.delete(names)
        except (TimeoutError, GraftreeError) as error:
            self.link.failed(error)
        log.info("KV Redis", up=self.link.up, loads_from_tokens=self.loader.choice.break_even_tokens)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
