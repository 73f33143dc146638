"""Group commit, and what happens to it while Redis is away."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence

import pytest
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, ReadOnlyError

from graftree.errors import (
    AlreadyExists,
    GraftreeError,
    InvalidArgument,
    LeaseLost,
    NotFound,
    ResourceExhausted,
    Stale,
    Unavailable,
)
from graftree.store.committer import Committer, Durability
from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis
from graftree.store.sessions import Commit, SessionRecord, SessionStore
from tests.store_redis import KINDS, client, record

DURABLE, DEGRADED = Durability.DURABLE, Durability.DEGRADED
RECORD_KEY = "graftree:v1:{s:s-1}:record"


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ScriptedStore(SessionStore):
    """A store whose commits can be held back, lost on the way there, or lost on the way back."""

    def __init__(self, redis: Redis, **options: float) -> None:
        super().__init__(redis, ttl_seconds=60)
        self.trips: list[list[Commit]] = []
        self.sent = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.request_error: Exception | None = None
        self.reply_error: Exception | None = None

    async def create(self, record: SessionRecord, lease_seconds: float) -> None:
        if self.request_error:
            raise self.request_error
        await super().create(record, lease_seconds)

    async def ping(self) -> None:
        if self.request_error:
            raise self.request_error
        await super().ping()

    async def commit(self, commits: Sequence[Commit], lease_seconds: float) -> list[GraftreeError | None]:
        self.trips.append(list(commits))
        self.sent.set()
        await self.gate.wait()
        if self.request_error:
            raise self.request_error
        outcomes = await super().commit(commits, lease_seconds)
        if self.reply_error:
            raise self.reply_error
        return outcomes


class Bench:
    """A committer on a scripted store."""

    def __init__(self, redis: Redis, **options: object) -> None:
        self.store = ScriptedStore(redis)
        self.clock = Clock()
        self.committer = self.another(**options)

    def another(self, **options: object) -> Committer:
        defaults: dict[str, object] = {
            "retry_seconds": (0.001, 0.01),
            "patience_seconds": 20,
            "rng": random.Random(0),
        }
        return Committer(self.store, self.clock, **{**defaults, **options})  # type: ignore[arg-type]

    async def recovered(self) -> None:
        """Wait until the outage is over and everything is written."""
        for _ in range(4000):
            if not self.committer.degraded and self.committer.unsaved_tokens == 0:
                return
            await asyncio.sleep(0.005)
        raise AssertionError("no recovery")

    async def tokens(self, session_id: str = "s-1") -> tuple[int, ...]:
        found = await self.store.load(session_id)
        assert found is not None
        return found.token_ids


@pytest.fixture(params=KINDS)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with client(request.param) as redis:
        bench = Bench(redis)
        yield bench
        bench.store.gate.set()
        await bench.committer.close()


@pytest.fixture
async def quick() -> AsyncIterator[Bench]:
    """For what does not depend on the server."""
    async with client("fakeredis") as redis:
        bench = Bench(redis)
        yield bench
        bench.store.gate.set()
        await bench.committer.close()


async def test_commits_are_durable_when_they_return(bench: Bench) -> None:
    """Every commit is in Redis when its call returns, in order, and a finished session is held no longer."""
    committer = bench.committer
    assert await committer.create(record()) is DURABLE
    for length in range(5):
        assert await committer.commit(Commit("s-1", 1, length, (length,))) is DURABLE
        assert await bench.tokens() == tuple(range(length + 1))
    assert committer.sessions == 1
    assert await committer.commit(Commit("s-1", 1, 5, (5,), finished=True)) is DURABLE
    assert await bench.store.load("s-1") == record(token_ids=tuple(range(6)), finished=True)
    assert committer.sessions == 0
    assert committer.commits_durable == 6
    assert not committer.degraded


async def test_what_waits_together_travels_together(quick: Bench) -> None:
    """While one round trip is under way the commits of all other sessions collect; the next takes them all."""
    committer, store = quick.committer, quick.store
    for index in range(50):
        await committer.create(record(f"s-{index}"))
    store.gate.clear()
    waiting = [asyncio.create_task(committer.commit(Commit("s-0", 1, 0, (7,))))]
    await store.sent.wait()
    waiting += [asyncio.create_task(committer.commit(Commit(f"s-{index}", 1, 0, (7,)))) for index in range(1, 50)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    store.gate.set()
    assert await asyncio.gather(*waiting) == [DURABLE] * 50
    assert [len(trip) for trip in store.trips] == [1, 49]


async def test_several_commits_of_one_session(quick: Bench) -> None:
    """Commits of one session that wait together become one, and each of their callers is told."""
    committer, store = quick.committer, quick.store
    await committer.create(record())
    store.gate.clear()
    waiting = []
    for length in range(4):
        waiting.append(asyncio.create_task(committer.commit(Commit("s-1", 1, length, (length,)))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    store.gate.set()
    assert await asyncio.gather(*waiting) == [DURABLE] * 4
    assert [[commit.token_ids for commit in trip] for trip in store.trips] == [[(0,)], [(1, 2, 3)]]
    assert await quick.tokens() == (0, 1, 2, 3)


async def test_a_group_is_bounded(quick: Bench) -> None:
    """A round trip takes at most `batch` sessions; the others go in the next."""
    committer = quick.another(batch=4)
    for index in range(10):
        await committer.create(record(f"s-{index}"))
    commits = (committer.commit(Commit(f"s-{index}", 1, 0, (7,))) for index in range(10))
    assert await asyncio.gather(*commits) == [DURABLE] * 10
    assert [len(trip) for trip in quick.store.trips] == [4, 4, 2]
    await committer.close()


async def test_another_owner(bench: Bench) -> None:
    """A session that another router took raises LeaseLost at its next commit, at every one after it, and harms
    no other session of the same round trip."""
    committer = bench.committer
    await committer.create(record())
    await committer.create(record("s-2"))
    await bench.store.redis.hset(RECORD_KEY, "lease", "1")
    await bench.store.acquire("s-1", "router-b", 10)
    lost, kept = await asyncio.gather(
        committer.commit(Commit("s-1", 1, 0, (7,))),
        committer.commit(Commit("s-2", 1, 0, (7,))),
        return_exceptions=True,
    )
    assert isinstance(lost, LeaseLost)
    assert kept is DURABLE
    with pytest.raises(LeaseLost):
        await committer.commit(Commit("s-1", 1, 1, (8,)))
    assert await bench.tokens() == ()
    assert committer.sessions_lost == 1
    committer.forget("s-1")
    assert committer.sessions == 1


async def test_wrong_commits(quick: Bench) -> None:
    """A wrong length or epoch, a token outside int32 and a finished session are refused without a round trip."""
    committer = quick.committer
    await committer.create(record(token_ids=(1,)))
    with pytest.raises(Stale):
        await committer.commit(Commit("s-1", 1, 0, (7,)))
    with pytest.raises(LeaseLost):
        await committer.commit(Commit("s-1", 2, 1, (7,)))
    with pytest.raises(InvalidArgument):
        await committer.commit(Commit("s-1", 1, 1, (-1,)))
    assert quick.store.trips == []
    quick.store.gate.clear()
    last = asyncio.create_task(committer.commit(Commit("s-1", 1, 1, (), finished=True)))
    await asyncio.sleep(0)
    with pytest.raises(Stale):
        await committer.commit(Commit("s-1", 1, 1, (7,)))
    quick.store.gate.set()
    assert await last is DURABLE


async def test_sessions_it_was_not_told_about(quick: Bench) -> None:
    """Commits of a session that was neither created nor adopted here go through, and leave nothing behind."""
    await quick.store.create(record(), 10)
    assert await quick.committer.commit(Commit("s-1", 1, 0, (7,))) is DURABLE
    assert await quick.committer.commit(Commit("s-1", 1, 1, (8,))) is DURABLE
    assert quick.committer.sessions == 0
    with pytest.raises(NotFound):
        await quick.committer.commit(Commit("s-2", 1, 0, (7,)))
    with pytest.raises(Stale):
        await quick.committer.commit(Commit("s-1", 1, 5, (7,)))
    assert quick.committer.sessions == 0


async def test_create_conflicts(quick: Bench) -> None:
    """An id in use, here or in Redis, is AlreadyExists; the session that has it goes on."""
    await quick.committer.create(record())
    with pytest.raises(AlreadyExists):
        await quick.committer.create(record())
    with pytest.raises(AlreadyExists):
        await quick.another().create(record(owner="router-b"))
    assert await quick.committer.commit(Commit("s-1", 1, 0, (7,))) is DURABLE


async def test_adopt(quick: Bench) -> None:
    """A session that was acquired goes on where it stood."""
    await quick.store.create(record(token_ids=(7,)), 10)
    await quick.store.release("s-1", 1)
    quick.committer.adopt(await quick.store.acquire("s-1", "router-b", 10))
    assert await quick.committer.commit(Commit("s-1", 2, 1, (8,))) is DURABLE
    assert await quick.tokens() == (7, 8)


async def test_adopt_a_finished_session(quick: Bench) -> None:
    """A finished session that was taken over, to be told again, is held until it is forgotten, and never longer."""
    await quick.store.create(record(token_ids=(7,)), 10)
    await quick.store.commit([Commit("s-1", 1, 1, (), finished=True)], 10)
    quick.committer.adopt(await quick.store.acquire("s-1", "router-a", 10))
    with pytest.raises(Stale):
        await quick.committer.commit(Commit("s-1", 2, 1, (8,)))
    assert quick.committer.sessions == 1
    quick.committer.forget("s-1")
    assert quick.committer.sessions == 0


async def test_release(quick: Bench) -> None:
    """A released session is written to the end and can be acquired at once; a finished or unknown one is let be."""
    await quick.committer.create(record())
    await quick.committer.commit(Commit("s-1", 1, 0, (7,)))
    await quick.committer.release("s-1")
    assert quick.committer.sessions == 0
    assert (await quick.store.acquire("s-1", "router-b", 10)).token_ids == (7,)
    await quick.committer.release("s-1")


async def test_release_during_an_outage(quick: Bench) -> None:
    """A session that cannot be handed over says so; its lease will run out."""
    await quick.committer.create(record())
    quick.store.request_error = Unavailable("gone")
    with pytest.raises(Unavailable, match="s-1 is not handed over"):
        await quick.committer.release("s-1")
    assert quick.committer.sessions == 0


async def test_leases_are_renewed(quick: Bench) -> None:
    """A session at rest keeps its lease without a commit of its own; one that was forgotten does not."""
    committer = quick.another(lease_seconds=0.06)
    await committer.create(record())
    await committer.create(record("s-2"))
    committer.forget("s-2")
    for _ in range(4000):
        if len(quick.store.trips) >= 5:
            break
        await asyncio.sleep(0.005)
    renewals = [commit for trip in quick.store.trips for commit in trip]
    assert len(renewals) >= 5
    assert {(commit.session_id, commit.length, tuple(commit.token_ids)) for commit in renewals} == {("s-1", 0, ())}
    await committer.close()


async def test_an_outage(quick: Bench) -> None:
    """Commits of an outage answer DEGRADED, the first after the error, the others at once; what they carried is
    written once Redis is back; why and since when can be read meanwhile."""
    committer = quick.committer
    await committer.create(record())
    assert await committer.commit(Commit("s-1", 1, 0, (7,))) is DURABLE
    quick.store.request_error = Unavailable("connection refused")
    quick.clock.now = 123.0
    assert await committer.commit(Commit("s-1", 1, 1, (8,))) is DEGRADED
    quick.clock.now = 456.0
    assert committer.degraded
    assert (committer.outage.since, committer.outage.reason) == (123.0, "connection refused")
    for length in range(2, 10):
        assert await committer.commit(Commit("s-1", 1, length, (length,))) is DEGRADED
    assert committer.unsaved_tokens == 9
    assert committer.commits_degraded == 9
    assert await quick.tokens() == (7,)
    quick.store.request_error = None
    await quick.recovered()
    assert await quick.tokens() == (7, 8, 2, 3, 4, 5, 6, 7, 8, 9)
    assert (committer.outage.since, committer.outage.reason) == (None, "")
    assert await committer.commit(Commit("s-1", 1, 10, (10,))) is DURABLE
    assert committer.sessions_restored == 0


@pytest.mark.parametrize("error", [ReadOnlyError("read only"), BusyLoadingError("loading")])
async def test_a_server_that_cannot_write_now(
    quick: Bench, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica, and a server that is still loading, are an outage too, whether the whole round trip or single
    commits of it are refused."""
    run_all = quick.store._commit.run_all

    async def refused(*call: object) -> list[object]:
        if isinstance(error, BusyLoadingError):
            raise error
        return [error]

    await quick.committer.create(record())
    monkeypatch.setattr(quick.store._commit, "run_all", refused)
    assert await quick.committer.commit(Commit("s-1", 1, 0, (7,))) is DEGRADED
    assert quick.committer.degraded
    monkeypatch.setattr(quick.store._commit, "run_all", run_all)
    await quick.recovered()
    assert await quick.tokens() == (7,)


async def test_a_lost_reply(quick: Bench) -> None:
    """A commit that was written although its reply was lost is not written twice, and what follows fits on."""
    await quick.committer.create(record())
    quick.store.reply_error = Unavailable("connection reset")
    assert await quick.committer.commit(Commit("s-1", 1, 0, (7, 8))) is DEGRADED
    assert await quick.tokens() == (7, 8)
    assert await quick.committer.commit(Commit("s-1", 1, 2, (9,))) is DEGRADED
    quick.store.reply_error = None
    await quick.recovered()
    assert await quick.tokens() == (7, 8, 9)
    assert await quick.committer.commit(Commit("s-1", 1, 3, (10,), finished=True)) is DURABLE


async def test_begun_again_over_its_own_record(bench: Bench) -> None:
    """Writes time out after they were applied, and the session begins again without having seen its record: what is
    there already counts as written, what lies behind is appended once."""
    committer = bench.committer
    bench.store.reply_error = Unavailable("timed out")
    assert await committer.create(record()) is DURABLE
    assert await committer.commit(Commit("s-1", 1, 0, (7, 8, 9))) is DEGRADED
    assert await bench.tokens() == (7, 8, 9)
    committer.adopt(record(salt=5, seed=6), seen=False, any_seed=True)
    bench.store.reply_error = None
    await bench.recovered()
    for length, tokens in enumerate([(), (7,), (8,)]):
        assert await committer.commit(Commit("s-1", 1, max(0, length - 1), tokens)) is DURABLE
        assert await bench.tokens() == (7, 8, 9)
    assert await committer.commit(Commit("s-1", 1, 2, (9, 10))) is DURABLE
    assert await committer.commit(Commit("s-1", 1, 4, (11,), finished=True)) is DURABLE
    assert await bench.store.load("s-1") == record(token_ids=(7, 8, 9, 10, 11), finished=True)
    assert committer.sessions_lost == 0


@pytest.mark.parametrize(
    ("changes", "tokens", "finished"),
    [
        ({}, (7, 6), False),
        ({}, (6, 8, 9), False),
        ({}, (7,), True),
        ({"prompt_token_ids": (1, 2)}, (7, 8, 9), False),
        ({"parameters": b"others"}, (7,), False),
        ({"seed": 4}, (), False),
    ],
)
async def test_begun_again_as_another(
    bench: Bench, changes: dict[str, object], tokens: tuple[int, ...], finished: bool
) -> None:
    """Other tokens, an earlier end and another request are conflicts: the record stays as it is."""
    await bench.store.create(record(), 10)
    await bench.store.commit([Commit("s-1", 1, 0, (7, 8))], 10)
    bench.committer.adopt(record(**changes), seen=False)
    with pytest.raises(Stale, match="the record has 2"):
        await bench.committer.commit(Commit("s-1", 1, 0, tokens, finished=finished))
    assert await bench.store.load("s-1") == record(token_ids=(7, 8))


async def test_begun_again_under_a_later_epoch(bench: Bench) -> None:
    """A session that was taken over meanwhile is lost to one who begins it again without having seen that."""
    await bench.store.create(record(), 10)
    await bench.store.acquire("s-1", "router-b", 10, force=True)
    bench.committer.adopt(record(), seen=False)
    with pytest.raises(LeaseLost):
        await bench.committer.commit(Commit("s-1", 1, 0, ()))


async def test_patience(quick: Bench) -> None:
    """A server that does not answer holds a commit no longer than the patience; a late answer mends it."""
    committer = quick.another(patience_seconds=0.01)
    await quick.store.create(record(), 10)
    committer.adopt(record())
    quick.store.gate.clear()
    assert await committer.commit(Commit("s-1", 1, 0, (7,))) is DEGRADED
    assert committer.outage.reason == "Redis did not answer in time"
    quick.store.gate.set()
    quick.committer = committer
    await quick.recovered()
    assert await quick.tokens() == (7,)
    await committer.close()


async def test_sessions_begun_and_finished_during_an_outage(quick: Bench) -> None:
    """A session can begin, run, finish and be forgotten without Redis; its record is there afterwards."""
    quick.store.request_error = Unavailable("connection refused")
    assert await quick.committer.create(record()) is DEGRADED
    assert await quick.committer.create(record("s-2", token_ids=(1, 2))) is DEGRADED
    assert await quick.committer.create(record("s-3")) is DEGRADED
    assert await quick.committer.commit(Commit("s-1", 1, 0, (7, 8), finished=True)) is DEGRADED
    quick.committer.forget("s-1")
    quick.committer.forget("s-3")
    quick.store.request_error = None
    await quick.recovered()
    assert await quick.store.load("s-1") == record(token_ids=(7, 8), finished=True)
    assert await quick.store.load("s-2") == record("s-2", token_ids=(1, 2))
    assert await quick.store.load("s-3") is None
    assert quick.committer.sessions == 1


async def test_sessions_at_rest_are_restored_too(quick: Bench) -> None:
    """When Redis comes back empty, also the sessions that have nothing to say get their record back at once."""
    committer = quick.another(lease_seconds=1000)
    await committer.create(record("s-1", token_ids=(7, 8)))
    await committer.create(record("s-2"))
    quick.store.request_error = Unavailable("connection refused")
    assert await committer.commit(Commit("s-2", 1, 0, (9,))) is DEGRADED
    await quick.store.redis.flushall()
    quick.store.request_error = None
    for _ in range(4000):
        if committer.sessions_restored == 2:
            break
        await asyncio.sleep(0.005)
    assert await quick.store.load("s-1") == record("s-1", token_ids=(7, 8))
    assert await quick.store.load("s-2") == record("s-2", token_ids=(9,))
    await committer.close()


async def test_another_owner_began_again(quick: Bench) -> None:
    """After an empty restart another router may begin a session of the same id at the same epoch: the old owner
    is fenced off by its name."""
    await quick.committer.create(record())
    await quick.store.redis.flushall()
    await quick.store.create(record(owner="router-b"), 10)
    with pytest.raises(LeaseLost, match="router-b"):
        await quick.committer.commit(Commit("s-1", 1, 0, (7,)))
    assert await quick.store.load("s-1") == record(owner="router-b")


async def test_commits_do_not_wait_for_a_try(quick: Bench) -> None:
    """Between two tries, however far apart, commits are answered at once."""
    committer = quick.another(retry_seconds=(1000, 1000))
    await committer.create(record())
    quick.store.request_error = Unavailable("connection refused")
    async with asyncio.timeout(60):
        for length in range(3):
            assert await committer.commit(Commit("s-1", 1, length, (7,))) is DEGRADED
    assert committer.round_trips == 1
    await committer.close(0)


async def test_more_leases_than_a_group_holds(quick: Bench) -> None:
    """Renewals that do not fit into one round trip follow in the next ones, without waiting for their turn."""
    committer = quick.another(batch=3, lease_seconds=0.6)
    for index in range(10):
        await committer.create(record(f"s-{index}"))
    for _ in range(4000):
        if len({commit.session_id for trip in quick.store.trips for commit in trip}) == 10:
            break
        await asyncio.sleep(0.005)
    assert {commit.session_id for trip in quick.store.trips for commit in trip} == {f"s-{i}" for i in range(10)}
    assert max(len(trip) for trip in quick.store.trips) == 3
    await committer.close()


async def test_taken_over_during_an_outage(quick: Bench) -> None:
    """An owner that could not reach Redis while another took its session stops at its next commit, and has
    written nothing over the other's work."""
    await quick.committer.create(record())
    quick.store.request_error = Unavailable("partition")
    assert await quick.committer.commit(Commit("s-1", 1, 0, (7,))) is DEGRADED
    other = SessionStore(quick.store.redis, ttl_seconds=60)
    await other.redis.hset(RECORD_KEY, "lease", "1")
    await other.acquire("s-1", "router-b", 10)
    assert await other.commit([Commit("s-1", 2, 0, (9,))], 10) == [None]
    quick.store.request_error = None
    for _ in range(4000):
        if quick.committer.sessions_lost:
            break
        await asyncio.sleep(0.005)
    with pytest.raises(LeaseLost):
        await quick.committer.commit(Commit("s-1", 1, 1, (8,)))
    assert await quick.tokens() == (9,)


async def test_a_failover_that_lost_commits(bench: Bench) -> None:
    """A replica that took over without the last commits is caught up, record and all."""
    redis = bench.store.redis
    await bench.committer.create(record())
    await bench.committer.commit(Commit("s-1", 1, 0, (7,)))
    old_record, old_tokens = await redis.hgetall(RECORD_KEY), await redis.get("graftree:v1:{s:s-1}:tokens")
    await bench.committer.commit(Commit("s-1", 1, 1, (8, 9)))
    await redis.flushall()
    await redis.hset(RECORD_KEY, mapping=old_record)
    await redis.set("graftree:v1:{s:s-1}:tokens", old_tokens or b"")
    assert await bench.committer.commit(Commit("s-1", 1, 3, (10,))) is DURABLE
    assert await bench.tokens() == (7, 8, 9, 10)
    assert bench.committer.sessions_restored == 1


async def test_capacity(quick: Bench) -> None:
    """What is held is bounded: running sessions are refused beyond it, finished ones that could not be written
    give way, and are counted."""
    committer = quick.another(capacity=2)
    quick.store.request_error = Unavailable("gone")
    await committer.create(record("s-1"))
    await committer.create(record("s-2"))
    with pytest.raises(ResourceExhausted):
        await committer.create(record("s-3"))
    await committer.commit(Commit("s-1", 1, 0, (7,), finished=True))
    assert await committer.create(record("s-3")) is DEGRADED
    assert committer.sessions_dropped == 1
    assert committer.sessions == 2
    quick.store.request_error = None
    await committer.close(20)
    assert await quick.store.load("s-1") is None
    assert await quick.store.load("s-3") == record("s-3")


async def test_close_writes_what_is_left(quick: Bench) -> None:
    """Closing waits for the commits under way."""
    await quick.committer.create(record())
    waiting = asyncio.create_task(quick.committer.commit(Commit("s-1", 1, 0, (7,))))
    await asyncio.sleep(0)
    await quick.committer.close(20)
    assert await waiting is DURABLE
    assert await quick.tokens() == (7,)


async def test_close_in_an_outage(quick: Bench) -> None:
    """Closing does not wait for a Redis that is away, and leaves no caller waiting."""
    await quick.committer.create(record())
    quick.store.gate.clear()
    waiting = asyncio.create_task(quick.committer.commit(Commit("s-1", 1, 0, (7,))))
    await quick.store.sent.wait()
    await quick.committer.close(0.001)
    assert await waiting is DEGRADED
    assert quick.committer.sessions == 0


async def test_a_caller_that_gives_up(quick: Bench) -> None:
    """A cancelled commit disturbs nobody, and its tokens are written all the same."""
    await quick.committer.create(record())
    quick.store.gate.clear()
    gone = asyncio.create_task(quick.committer.commit(Commit("s-1", 1, 0, (7,))))
    stays = asyncio.create_task(quick.committer.commit(Commit("s-1", 1, 1, (8,))))
    await asyncio.sleep(0)
    gone.cancel()
    quick.store.gate.set()
    assert await stays is DURABLE
    assert await quick.tokens() == (7, 8)


async def test_an_unexpected_error(quick: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the store reaches those whose commits it hit; the next round trips are served."""
    await quick.committer.create(record())
    await quick.committer.create(record("s-2"))
    quick.store.request_error = RuntimeError("fault")
    with pytest.raises(GraftreeError, match="fault"):
        await quick.committer.commit(Commit("s-1", 1, 0, (7,)))
    quick.store.request_error = None
    assert await quick.committer.commit(Commit("s-2", 1, 0, (7,))) is DURABLE
    assert not quick.committer.degraded


async def test_a_real_server_killed_and_restarted() -> None:
    """A server dies under 20 running sessions and comes back empty: every commit is answered, and afterwards
    every record is whole again."""
    with EmbeddedRedis() as server:
        async with connect(server.url) as redis:
            bench = Bench(redis)
            committer = bench.committer
            for index in range(20):
                await committer.create(record(f"s-{index}"))
            answers = []

            async def generate(session_id: str) -> None:
                for length in range(30):
                    answers.append(await committer.commit(Commit(session_id, 1, length, (length,))))
                    await asyncio.sleep(0.001)

            running = asyncio.gather(*(generate(f"s-{index}") for index in range(20)))
            while len(answers) < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            server.stop()
            assert await committer.create(record("s-20")) is DEGRADED
            await running
            assert committer.degraded
            server.start()
            for _ in range(4000):
                if committer.sessions_restored == 21:
                    break
                await asyncio.sleep(0.005)
            await bench.recovered()
            assert set(answers) == {DURABLE, DEGRADED}
            for index in range(20):
                assert await bench.store.load(f"s-{index}") == record(f"s-{index}", token_ids=tuple(range(30)))
            assert await bench.store.load("s-20") == record("s-20")
            assert committer.sessions_restored == 21
            assert await committer.commit(Commit("s-0", 1, 30, (30,))) is DURABLE
            await committer.close()


async def test_a_real_server_that_hangs() -> None:
    """A server that is stopped, not dead, holds commits up no longer than the patience, and the connection on
    which a reply was given up is not used again."""
    with EmbeddedRedis() as server:
        async with connect(server.url, timeout_seconds=0.05) as redis:
            bench = Bench(redis, patience_seconds=0.05)
            await bench.committer.create(record())
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
            assert await bench.committer.commit(Commit("s-1", 1, 0, (7,))) is DEGRADED
            assert await bench.committer.commit(Commit("s-1", 1, 1, (8,))) is DEGRADED
            os.kill(server.pid, signal.SIGCONT)
            await bench.recovered()
            assert await bench.tokens() == (7, 8)
            bench.committer.forget("s-1")
            await bench.committer.close()
