"""`Committer`: session commits of one router, grouped, and kept going while Redis is away.

Group commit: while one round trip is under way, whatever arrives waits and travels together in the next, one
compare-and-set per session. Sessions at rest have their leases renewed in the same round trips.

When Redis cannot be reached, running requests go on: a commit answers DEGRADED at once, what it carried stays here,
at most one output per session, and is written when Redis is back. A record that an empty restart or a failover
lost is written again whole. Another router may have taken a session over meanwhile; its owner here learns it
(LeaseLost) with the next commit.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from graftree.errors import AlreadyExists, GraftreeError, LeaseLost, NotFound, ResourceExhausted, Stale, Unavailable
from graftree.store.held import Durability, HeldSession, Share, Waiter, fail
from graftree.store.outage import Outage
from graftree.store.sessions import Commit, SessionRecord, SessionStore, pack

__all__ = ["Committer", "Durability"]

_log = structlog.get_logger(__name__)


class Committer:
    """Commits for many sessions, one round trip at a time.

    Args:
        store: where to.
        clock: seconds; read when an outage begins.
        lease_seconds: lease of each session; renewed at a third of it.
        patience_seconds: longest a commit waits for Redis before it is answered DEGRADED.
        capacity: most sessions held.
        batch: most sessions in one round trip.
        retry_seconds: shortest and longest pause between tries during an outage.
        rng: jitter of those pauses.

    Attributes:
        outage: whether Redis is away, why and since when.
        round_trips: tries to write, each of many commits.
        commits_durable, commits_degraded: how commits were answered.
        sessions_restored: records written again because Redis had lost them.
        sessions_lost: sessions that another owner took.
        sessions_dropped: finished sessions that were given up unwritten, for want of room.
    """

    def __init__(
        self,
        store: SessionStore,
        clock: Callable[[], float],
        *,
        lease_seconds: float = 10.0,
        patience_seconds: float = 0.5,
        capacity: int = 8192,
        batch: int = 512,
        retry_seconds: tuple[float, float] = (0.05, 1.0),
        rng: random.Random | None = None,
    ) -> None:
        self.store = store
        self.outage = Outage(clock, rng or random.Random(), shortest=retry_seconds[0], longest=retry_seconds[1])
        self.round_trips = 0
        self.commits_durable = 0
        self.commits_degraded = 0
        self.sessions_restored = 0
        self.sessions_lost = 0
        self.sessions_dropped = 0
        self._lease = lease_seconds
        self._patience = patience_seconds
        self._capacity = capacity
        self._batch = batch
        self._sessions: dict[str, HeldSession] = {}
        self._dirty: dict[str, HeldSession] = {}  # in order of arrival
        self._renew_at = 0.0  # event loop time
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def degraded(self) -> bool:
        return self.outage.active

    @property
    def sessions(self) -> int:
        """Sessions held."""
        return len(self._sessions)

    @property
    def unsaved_tokens(self) -> int:
        """Output tokens that Redis has not acknowledged."""
        return sum(session.length - session.saved for session in self._sessions.values())

    async def create(self, record: SessionRecord) -> Durability:
        """Write a new session, and look after it until it finishes, is released or forgotten.

        During an outage the record is written later; if another owner's turns out to be there, the session's
        next commit raises LeaseLost.

        Raises:
            AlreadyExists: there is a record of this id, here or in Redis.
            ResourceExhausted: `capacity` sessions are held.
        """
        if record.session_id in self._sessions:
            raise AlreadyExists(f"session {record.session_id} exists")
        session = self._hold(HeldSession.of(record, saved=0))
        if not self.degraded:
            try:
                async with asyncio.timeout(self._patience):
                    await self.store.create(record, self._lease)
            except (Unavailable, TimeoutError) as error:
                self._degrade(error)
            except BaseException:
                self._drop(session)
                raise
            else:
                session.saved, session.seen = session.length, True
                session.touched = _now()
                return Durability.DURABLE
        self._mark(session)
        return Durability.DEGRADED

    def adopt(self, record: SessionRecord, *, seen: bool = True, any_seed: bool = False) -> None:
        """Look after a session that was acquired (`SessionStore.acquire`), or is to be as far as anyone can tell.

        Args:
            seen: Redis has this very record. Otherwise it is written where there is none, and one of the same
                request, owner and epoch is gone on with, however many of its tokens are there.
            any_seed: that one may have another seed: the tokens do not depend on it.

        Raises:
            ResourceExhausted: `capacity` sessions are held.
        """
        old = self._sessions.get(record.session_id)
        if old is not None:
            self._drop(old)
        session = self._hold(HeldSession.of(record, saved=len(record.token_ids) if seen else 0))
        session.finish_saved, session.seen, session.any_seed = record.finished, seen, any_seed

    async def commit(self, commit: Commit) -> Durability:
        """Append to a session's output; returns when its round trip is done, or at once during an outage.

        Raises:
            LeaseLost: the session has another owner: stop it here.
            Stale: `length` is not the session's, or it has finished.
            NotFound: Redis has no record, and this committer neither created nor adopted the session.
            ResourceExhausted: `capacity` sessions are held.
            InvalidArgument: a token outside the limit.
        """
        pack(commit.token_ids)  # refused here, so that it cannot spoil a round trip that others share
        session = self._find(commit)
        session.append(commit)
        self._mark(session)
        if self.degraded:
            self.commits_degraded += 1
            return Durability.DEGRADED
        waiter: Waiter = asyncio.get_running_loop().create_future()
        session.waiters.append(waiter)
        return await waiter

    async def release(self, session_id: str) -> None:
        """Hand a session over: write what is unsaved, then let anyone acquire it.

        Raises:
            Unavailable: not done; the lease will run out by itself.
        """
        session = self._sessions.get(session_id)
        if session is None or session.finished or session.error is not None:
            self.forget(session_id)
            return
        try:
            # An empty commit, so that nothing of this session is under way when its owner goes.
            last = Commit(session_id, session.epoch, session.length, (), owner=session.owner)
            if await self.commit(last) is Durability.DEGRADED:
                raise Unavailable(f"session {session_id} is not handed over: {self.outage.reason}")
            await self.store.release(session_id, session.epoch)
        finally:
            self.forget(session_id)

    def forget(self, session_id: str) -> None:
        """Look after a session no longer. That it finished is still written."""
        session = self._sessions.get(session_id)
        if session is not None and not session.unfinished_business:
            self._drop(session)

    async def close(self, timeout_seconds: float = 1.0) -> None:
        """Write what is unsaved, if that takes no longer than `timeout_seconds`, and stop."""
        task, self._task = self._task, None
        if task is None:
            return
        self._closing = True
        self._wake.set()
        await asyncio.wait((task,), timeout=timeout_seconds)
        task.cancel()
        await asyncio.wait((task,))
        for session in list(self._sessions.values()):
            self._drop(session)

    def _find(self, commit: Commit) -> HeldSession:
        session = self._sessions.get(commit.session_id)
        if session is None:
            return self._hold(HeldSession.from_commit(commit))
        if session.error is not None:
            raise session.error
        if commit.epoch != session.epoch:
            raise LeaseLost(f"session {commit.session_id} is at epoch {session.epoch}, not {commit.epoch}")
        if commit.length != session.length or session.finished:
            state = " and has finished" if session.finished else ""
            raise Stale(f"session {commit.session_id} has {session.length} tokens{state}; commit at {commit.length}")
        return session

    def _hold(self, session: HeldSession) -> HeldSession:
        if len(self._sessions) >= self._capacity:
            self._make_room()
        session.touched = _now()
        self._sessions[session.session_id] = session
        self._start()
        return session

    def _make_room(self) -> None:
        for session in self._sessions.values():
            if session.finished or session.error is not None:
                self.sessions_dropped += session.unfinished_business
                self._drop(session)
                return
        raise ResourceExhausted(f"{self._capacity} sessions are held")

    def _drop(self, session: HeldSession) -> None:
        for table in (self._sessions, self._dirty):
            if table.get(session.session_id) is session:
                del table[session.session_id]
        self._answer(session.waiters, Durability.DEGRADED)
        session.waiters = []

    def _mark(self, session: HeldSession) -> None:
        self._dirty[session.session_id] = session
        self._start()
        self._wake.set()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._closing = False
            self._task = asyncio.create_task(self._run(), name="committer")

    async def _run(self) -> None:
        while not (self._closing and not self._dirty):
            if self.degraded:
                await asyncio.sleep(self.outage.next_pause())
            elif not self._dirty:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._renew_at):
                        await self._wake.wait()
            self._wake.clear()
            shares = self._take()
            if shares or self.degraded:
                await self._round_trip(shares)

    def _take(self) -> list[Share]:
        chosen = list(self._dirty.values())[: self._batch]
        now = _now()
        if now >= self._renew_at:
            due = [session for session in self._sessions.values() if self._is_due(session, now)]
            self._renew_at = now if len(due) > self._batch else now + self._lease / 6
            chosen += due[: self._batch]
        shares = []
        for session in chosen:
            self._dirty.pop(session.session_id, None)
            shares.append(Share(session, session.unsaved(), session.waiters))
            session.waiters = []
        return shares

    def _is_due(self, session: HeldSession, now: float) -> bool:
        owned = session.record is not None and not session.finished and session.error is None
        return owned and session.touched <= now - self._lease / 3 and session.session_id not in self._dirty

    def _renew_all(self) -> None:
        """After an outage leases may be over and records gone: every session's turn has come."""
        self._renew_at = 0.0
        for session in self._sessions.values():
            session.touched = -math.inf

    async def _round_trip(self, shares: Sequence[Share]) -> None:
        self.round_trips += 1
        try:
            async with asyncio.timeout(None if self.degraded else self._patience):
                outcomes = await self._write(shares)
        except (Unavailable, TimeoutError) as error:
            self._keep(shares)
            self._degrade(error)
            return
        except asyncio.CancelledError:
            self._keep(shares)
            raise
        except Exception as error:  # must not end the task: other sessions' commits come after
            _log.error("commit failed", kind=type(error).__name__)
            for share in shares:
                self._fail(share, error if isinstance(error, GraftreeError) else GraftreeError(str(error)))
            return
        refused: list[tuple[Share, Unavailable]] = []
        for share, outcome in zip(shares, outcomes, strict=True):
            if outcome is None:
                self._acknowledge(share)
            elif isinstance(outcome, Unavailable):
                refused.append((share, outcome))
            else:
                self._fail(share, outcome)
        if refused:
            self._keep([share for share, _ in refused])
            self._degrade(refused[0][1])
        elif self.degraded:
            self.outage.end()
            self._renew_all()

    async def _write(self, shares: Sequence[Share]) -> list[GraftreeError | None]:
        """One commit per share; then once more, as whole records, those of which Redis has lost what it had."""
        if not shares:
            await self.store.ping()
        outcomes = await self.store.commit([share.commit for share in shares], self._lease)
        lost = [index for index, share in enumerate(shares) if _is_lost(share, outcomes[index])]
        if lost:
            whole = [shares[index].session.whole(shares[index].commit) for index in lost]
            for index, outcome in zip(lost, await self.store.commit(whole, self._lease), strict=True):
                outcomes[index] = outcome
                self.sessions_restored += outcome is None
        pairs = zip(shares, outcomes, strict=True)
        self.sessions_restored += sum(share.commit.record is not None and outcome is None for share, outcome in pairs)
        return outcomes

    def _acknowledge(self, share: Share) -> None:
        session = share.session
        session.saw(share.commit, _now())
        self._answer(share.waiters, Durability.DURABLE)
        if session.session_id not in self._dirty and (session.finish_saved or session.record is None):
            self._drop(session)

    def _fail(self, share: Share, error: GraftreeError) -> None:
        session = share.session
        session.error = error
        self.sessions_lost += isinstance(error, LeaseLost)
        fail(share.waiters + session.waiters, error)
        session.waiters = []
        self._dirty.pop(session.session_id, None)
        if session.finished or session.record is None:
            self._drop(session)

    def _keep(self, shares: Sequence[Share]) -> None:
        """What was not written waits again, first in line; those who waited for it do no longer."""
        held = [share.session for share in shares if self._sessions.get(share.session.session_id) is share.session]
        self._dirty = {**{session.session_id: session for session in held}, **self._dirty}
        for share in shares:
            self._answer(share.waiters, Durability.DEGRADED)

    def _degrade(self, error: BaseException) -> None:
        self.outage.begin(error)
        for session in self._dirty.values():
            self._answer(session.waiters, Durability.DEGRADED)
            session.waiters = []
        self._wake.set()

    def _answer(self, waiters: Sequence[Waiter], result: Durability) -> None:
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(result)
                self.commits_durable += result is Durability.DURABLE
                self.commits_degraded += result is Durability.DEGRADED


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_lost(share: Share, outcome: GraftreeError | None) -> bool:
    """Redis has no record of a session that it had acknowledged, or less of it: an empty restart or a failover."""
    if share.session.record is None or share.commit.record is not None or isinstance(outcome, LeaseLost):
        return False
    return isinstance(outcome, NotFound | Stale)
