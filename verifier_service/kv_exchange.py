"""`Exchange`: the engine's side of the KV Redis. Blocks come and go between two forwards, and nothing here waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
from torch import Tensor

from graftree.models.blocks import BlockPool
from verifier_service.counters import Counters
from verifier_service.reservation import Reservations
from verifier_service.session import Session

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Load:
    """What a session waits for, and how far it has come.

    Attributes:
        session: whose; it has given up as soon as its own `load` is another one.
        first: index of its first block that is wanted.
        names: of the wanted blocks, in order.
        length: tokens of its text.
        got: blocks that were handed to the engine.
    """

    session: Session
    first: int
    names: Sequence[bytes]
    length: int
    got: int = 0

    @property
    def given_up(self) -> bool:
        """Whether nobody waits any more; may be read on any thread."""
        return self.session.load is not self


class Remote(Protocol):
    """What is needed of `verifier_service.kv_cache.KvCache`. No method waits for anything."""

    def wants(self, first: int, blocks: int, length: int) -> bool:
        """Whether it may be worth while to ask for so many blocks behind the first ones of a text."""

    def begin(self, load: Load) -> None:
        """Load; `Exchange.put` brings blocks, `Exchange.ended` says that no more will come, within a bounded time."""

    def offer(self, names: Sequence[bytes]) -> None:
        """These blocks are full and published here."""


class Blocks(Protocol):
    """What is needed of `graftree.models.paged.PagedKV`."""

    block_size: int

    def read_blocks(self, blocks: Sequence[int]) -> Tensor: ...

    def write_blocks(self, blocks: Sequence[int], data: Tensor) -> None: ...


class Exchange:
    """The engine's; only its thread calls it."""

    def __init__(
        self, remote: Remote, kv: Blocks, pool: BlockPool, reservations: Reservations, counters: Counters
    ) -> None:
        self._remote, self._kv, self._pool = remote, kv, pool
        self._reservations, self._counters = reservations, counters

    def seek(self, session: Session) -> None:
        """A session has got its blocks: what neither is cached nor has to be computed may come from elsewhere."""
        self.offer(session)
        first, names = session.published, session.block_names
        if names[first:] and self._remote.wants(first, len(names) - first, len(session.token_ids)):
            session.load = Load(session, first, names[first:], len(session.token_ids))
            self._remote.begin(session.load)

    def put(self, load: Load, data: Tensor, done: Callable[[float], None]) -> None:
        """Take the next blocks of a load.

        Args:
            data: (2, layers, n, block_size, KVH, D).
            done: called with the seconds it took, 0.0 where nobody wanted them any more.
        """
        session, size, count, begun = load.session, self._kv.block_size, data.shape[2], time.monotonic()
        try:
            if load.given_up:
                begun = time.monotonic()
                return
            first = session.cached // size
            assert first + count <= len(session.block_names), "no more than was wanted"
            self._kv.write_blocks(session.blocks[first : first + count], data)
            session.cached += count * size
            self._counters.loaded_rows += count * size
            self._reservations.publish(session)
            self.offer(session)
        except Exception:
            log.exception("loaded KV blocks could not be stored", blocks=count)
            session.load = None
        finally:
            done(time.monotonic() - begun)

    def ended(self, load: Load) -> None:
        """The rest of what was wanted is computed."""
        if not load.given_up:
            load.session.load = None

    def offer(self, session: Session) -> None:
        """Tell of the session's blocks that were published since the last time."""
        if session.published > session.offered:
            self._remote.offer(session.block_names[session.offered : session.published])
            session.offered = session.published

    def offer_all(self) -> None:
        """Tell of every published block of every open session once more."""
        for session in self._reservations.holders:
            self._remote.offer(session.block_names[: session.published])

    def supply(self, names: Sequence[bytes], deliver: Callable[[Sequence[bytes], Tensor | None], None]) -> None:
        """Copy blocks out, those that are still there.

        Args:
            deliver: called with their names and (2, layers, n, block_size, KVH, D), on the cache's device; None =
                there are none.
        """
        found = self._pool.find(names)
        data = None
        try:
            data = self._kv.read_blocks(list(found.values())) if found else None
        except Exception:
            log.exception("KV blocks could not be copied", blocks=len(found))
        deliver(list(found) if data is not None else [], data)
