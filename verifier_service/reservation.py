"""`Reservations`: which KV blocks a session has, and which of them it has in common with others.

By default everything a session can ever need is reserved when it opens. With less reserved more sessions fit; where
the pool then runs short, the session of the lowest priority, of equals the last to open, is parked: it loses its
blocks, and when there is room again its text is prefilled again, as far as the rows are not known any more. One that
opens parks sessions of lower priority where it does not fit beside them. The first in rank (`Session.rank`) always
goes on, and those parked rank behind all others.

Full blocks of committed rows are shared: they are never written again, so a copy is only made of what stands in a
block that is not full (copy-on-write, where the one write that could come is known beforehand).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from operator import attrgetter
from typing import Protocol

from graftree.errors import ContextTooLong, ResourceExhausted
from graftree.models.blocks import BlockPool, block_names
from verifier_service.counters import Counters
from verifier_service.session import Session, Share

_rank = attrgetter("rank")


class Cache(Protocol):
    """What is needed of `graftree.models.paged.PagedKV`."""

    block_size: int

    def move_rows(self, blocks: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], rows: Sequence[int]) -> None: ...


class Reservations:
    """The engine's; one per pool."""

    def __init__(
        self, pool: BlockPool, kv: Cache, *, fingerprint: str, reuse: bool, reserve: float, counters: Counters
    ) -> None:
        """
        Args:
            pool, kv: the runner's.
            fingerprint: of the model: names of blocks say whose rows they hold.
            reuse: whether sessions find the blocks that others, open or closed, have published.
            reserve: share of what a session may still generate that is reserved when it opens.
            counters: where rows that need not be computed, and preemptions, are counted.
        """
        self._pool, self._kv, self._counters, self._reuse = pool, kv, counters, reuse
        self._fingerprint, self._reserve = fingerprint, reserve
        self._holders: dict[Session, None] = {}
        self._parked: dict[Session, None] = {}
        self._arrivals = count()

    def take(self, session: Session, park: Callable[[Session], None]) -> None:
        """Reserve blocks for a session that opens. What is known of its text need not be computed.

        Args:
            park: as of `fit`; for sessions of lower priority.

        Raises:
            ContextTooLong: it can need more than there is.
            ResourceExhausted: it wants more than is free now, or others that were here before wait.
        """
        pool, size = self._pool, self._kv.block_size
        if -(-session.rows_wanted(1.0) // size) > pool.num_blocks:
            limit = f"max_length + max_nodes below the KV pool's {pool.num_blocks * size} tokens"
            raise ContextTooLong("max_length", session.max_length, limit)
        before = sum(other.priority >= session.priority for other in self._parked)
        if before:
            raise ResourceExhausted(f"{before} preempted sessions wait for KV blocks")
        lower = sorted((other for other in self._holders if other.priority < session.priority), key=_rank)
        wanted = -(-session.rows_wanted(self._reserve) // size)
        if wanted > pool.free_blocks + sum(len(other.blocks) for other in lower):
            lower = []  # nobody is parked in vain
        session.arrival = next(self._arrivals)
        while True:
            try:
                self._take(session)
                return
            except ResourceExhausted:
                if not lower:
                    raise
            park(lower.pop())

    def fit(self, shares: Sequence[Share], park: Callable[[Session], None]) -> list[Share]:
        """The shares that can run: the blocks their rows need are there, those of the last in rank if need be.

        Args:
            park: called with a session that must give its blocks back; it calls `park` here.
        """
        fitting = []
        for share in sorted(shares, key=lambda share: share.session.rank):
            session = share.session
            while not session.parked and not self._grow(session, session.cached + len(share)):
                park(max(self._holders, key=_rank))
            if not session.parked:
                fitting.append(share)
        return fitting

    def park(self, session: Session) -> None:
        """Take a session's blocks away; what was published stays known until its place is needed."""
        self.release(session)
        self._parked[session] = None
        session.parked, session.cached, session.published, session.load = True, 0, 0, None
        self._counters.preemptions += 1

    @property
    def holders(self) -> Iterable[Session]:
        """Sessions that have blocks."""
        return self._holders

    def resume(self) -> list[Session]:
        """Give parked sessions blocks again, the first in rank first, as far as there are enough and some to spare.

        Returns:
            Those that got some.
        """
        size, resumed = self._kv.block_size, list[Session]()
        for session in sorted(self._parked, key=_rank):
            wanted = -(-session.rows_wanted(self._reserve) // size)
            if wanted + len(self._holders) > self._pool.free_blocks:  # each of the others may soon want one
                break
            del self._parked[session]
            session.parked = False
            self._take(session)
            resumed.append(session)
        return resumed

    def _grow(self, session: Session, rows: int) -> bool:
        missing = -(-rows // self._kv.block_size) - len(session.blocks)
        if missing > self._pool.free_blocks:
            return False
        if missing > 0:
            session.blocks += self._pool.allocate(missing, behind=session.blocks[-1])
        return True

    def _take(self, session: Session) -> None:
        pool, size = self._pool, self._kv.block_size
        wanted = -(-session.rows_wanted(self._reserve) // size)
        known: list[int] = []
        if self._reuse:
            # The root's own row is always computed: its logits are wanted.
            session.block_names = block_names(self._origin(session), session.token_ids[:-1], size)
            known = pool.share(session.block_names)
        try:
            behind = known[-1] if known else None
            session.blocks = known + pool.allocate(max(0, wanted - len(known)), behind=behind)
        except Exception:
            pool.free(known)
            raise
        if self._reuse:
            self._counters.prefix_cache_queries += len(session.token_ids) - 1
            self._counters.prefix_cache_hits += len(known) * size
        session.cached, session.published = len(known) * size, len(known)
        self._holders[session] = None

    def join(self, session: Session, source: Session, rows: int) -> None:
        """Let the session have the first `rows` rows of another one's; both texts are the same so far."""
        if rows <= session.cached:
            return
        size, first = self._kv.block_size, session.cached // self._kv.block_size
        full = rows // size
        common = source.blocks[first:full]
        self._pool.refer(common)
        self._pool.free(session.blocks[first:full])
        session.blocks[first:full] = common
        self._kv.copy_rows(source.blocks, session.blocks, range(max(full * size, session.cached), rows))
        self._counters.shared_rows += rows - session.cached
        session.cached = rows

    def publish(self, session: Session) -> None:
        """Make the session's blocks known that have become full."""
        size = self._kv.block_size
        full = session.cached // size
        if not self._reuse or session.published >= full:
            return
        names = session.block_names
        names += block_names(
            names[-1] if names else self._origin(session), session.token_ids[len(names) * size : full * size], size
        )
        for index in range(session.published, full):
            self._pool.publish(session.blocks[index], names[index])
        session.published = full

    def _origin(self, session: Session) -> bytes:
        """What block names begin with.

        Every tenant's with something else: whether somebody else has asked the same before must not show, not even
        in how soon an answer begins.
        """
        return hashlib.sha256(f"{self._fingerprint}\0{session.tenant}".encode()).digest()

    def release(self, session: Session) -> None:
        """Give everything back; what was published stays known until its place is needed."""
        self._pool.free(session.blocks)
        session.blocks = []
        self._holders.pop(session, None)
        self._parked.pop(session, None)
