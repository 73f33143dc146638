"""The session store's contract, on every server it is used with."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import fakeredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from graftree.errors import AlreadyExists, GraftreeError, InvalidArgument, LeaseLost, NotFound, Stale, Unavailable
from graftree.store.sessions import Commit, SessionRecord, SessionStore, pack, unpack
from tests.store_redis import KINDS, client, record, server

RECORD_KEY, TOKENS_KEY = "graftree:v1:{s:s-1}:record", "graftree:v1:{s:s-1}:tokens"


@pytest.fixture(params=KINDS)
async def redis(request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    async with client(request.param) as redis:
        yield redis


@pytest.fixture
def store(redis: Redis) -> SessionStore:
    return SessionStore(redis, ttl_seconds=60)


async def commit_one(store: SessionStore, commit: Commit) -> GraftreeError | None:
    return (await store.commit([commit], 10))[0]


async def loaded(store: SessionStore, session_id: str = "s-1") -> SessionRecord:
    found = await store.load(session_id)
    assert found is not None
    return found


async def test_create_and_load(store: SessionStore) -> None:
    """A record comes back as it went in, binary parameters, 64-bit numbers and output included."""
    wanted = record(token_ids=(0, 255, 256, (1 << 31) - 1))
    await store.create(wanted, 10)
    assert await store.load("s-1") == wanted
    assert await store.load("s-2") is None


async def test_create_twice(store: SessionStore) -> None:
    """A second session of the same id is refused, by any owner, and the first stays as it was."""
    await store.create(record(), 10)
    for other in (record(), record(owner="router-b", prompt_token_ids=(9,))):
        with pytest.raises(AlreadyExists, match="s-1"):
            await store.create(other, 10)
    assert await store.load("s-1") == record()


async def test_create_repeated_after_a_lost_reply(store: SessionStore, redis: Redis) -> None:
    """The client library sends a create again when the connection breaks under the reply: that is no conflict."""
    run = store._create.run

    async def twice(*call: object) -> object:
        await run(*call)  # type: ignore[arg-type]
        return await run(*call)  # type: ignore[arg-type]

    store._create.run = twice  # type: ignore[method-assign, assignment]
    await store.create(record(), 10)
    assert await store.load("s-1") == record()


async def test_commit_appends(store: SessionStore, redis: Redis) -> None:
    """Commits append in order, four bytes a token; the last one finishes the session."""
    await store.create(record(), 10)
    assert await commit_one(store, Commit("s-1", 1, 0, (7, 8))) is None
    assert await commit_one(store, Commit("s-1", 1, 2, (9,), finished=True)) is None
    assert await store.load("s-1") == record(token_ids=(7, 8, 9), finished=True)
    assert await redis.get(TOKENS_KEY) == b"\x07\0\0\0\x08\0\0\0\x09\0\0\0"


async def test_commit_compares_epoch_and_length(store: SessionStore) -> None:
    """Another epoch is LeaseLost, another length Stale, no record NotFound; nothing is written then."""
    await store.create(record(token_ids=(7, 8)), 10)
    outcomes = await store.commit(
        [
            Commit("s-1", 2, 2, (9,)),
            Commit("s-1", 0, 2, (9,)),
            Commit("s-1", 1, 2, (9,), owner="router-b"),
            Commit("s-1", 1, 3, (9,)),
            Commit("s-1", 1, 1, (9,)),
            Commit("s-1", 1, 0, (7,)),
            Commit("s-2", 1, 0, (9,)),
        ],
        10,
    )
    assert [type(outcome) for outcome in outcomes] == [LeaseLost] * 3 + [Stale] * 3 + [NotFound]
    assert await store.load("s-1") == record(token_ids=(7, 8))


async def test_commit_repeated_after_a_lost_reply(store: SessionStore) -> None:
    """The same commit again succeeds and appends nothing, alone or with what came after it."""
    await store.create(record(), 10)
    first = Commit("s-1", 1, 0, (7, 8))
    assert await store.commit([first, first], 10) == [None, None]
    assert await commit_one(store, first) is None
    assert await commit_one(store, Commit("s-1", 1, 0, (7, 8, 9))) is None
    last = Commit("s-1", 1, 3, (10,), finished=True)
    assert await store.commit([last, last], 10) == [None, None]
    assert (await loaded(store)).token_ids == (7, 8, 9, 10)
    other_tokens = await commit_one(store, Commit("s-1", 1, 3, (11,)))
    assert type(other_tokens) is Stale


async def test_finished_is_final(store: SessionStore) -> None:
    """Nothing is appended to a finished session."""
    await store.create(record(token_ids=(7,)), 10)
    assert await commit_one(store, Commit("s-1", 1, 1, (), finished=True)) is None
    assert type(await commit_one(store, Commit("s-1", 1, 1, (8,)))) is Stale
    assert (await loaded(store)).token_ids == (7,)


async def test_many_sessions_in_one_trip(store: SessionStore) -> None:
    """Outcomes come in the order of the commits, each session judged by itself."""
    for index in range(20):
        await store.create(record(f"s-{index}"), 10)
    commits = [Commit(f"s-{index}", 1 + index % 2, 0, (index,)) for index in range(20)]
    outcomes = await store.commit(commits, 10)
    assert [outcome is None for outcome in outcomes] == [index % 2 == 0 for index in range(20)]
    assert [(await loaded(store, f"s-{index}")).token_ids for index in range(4)] == [(0,), (), (2,), ()]
    assert await store.commit([], 10) == []


async def test_acquire(store: SessionStore) -> None:
    """While the lease lives only its owner can acquire; after a release anyone can; each time under a new epoch."""
    await store.create(record(token_ids=(7,)), 10)
    with pytest.raises(LeaseLost, match="router-a"):
        await store.acquire("s-1", "router-b", 10)
    assert await store.acquire("s-1", "router-a", 10) == record(token_ids=(7,), epoch=2)
    await store.release("s-1", 1)
    with pytest.raises(LeaseLost):
        await store.acquire("s-1", "router-b", 10)
    await store.release("s-1", 2)
    assert await store.acquire("s-1", "router-b", 10) == record(token_ids=(7,), epoch=3, owner="router-b")
    with pytest.raises(NotFound):
        await store.acquire("s-2", "router-b", 10)


async def test_a_released_session_takes_no_commits(store: SessionStore) -> None:
    """After a release the old owner is fenced off at once, not only when there is a new one."""
    await store.create(record(), 10)
    await store.release("s-1", 1)
    assert type(await commit_one(store, Commit("s-1", 1, 0, (7,)))) is LeaseLost


async def test_an_expired_lease_can_be_acquired(store: SessionStore) -> None:
    """A lease ends by itself; the old owner's next commit is LeaseLost."""
    await store.create(record(), 0.05)
    async with asyncio.timeout(20):
        while True:
            try:
                taken = await store.acquire("s-1", "router-b", 10)
                break
            except LeaseLost:
                await asyncio.sleep(0.01)
    assert taken.epoch == 2
    assert type(await commit_one(store, Commit("s-1", 1, 0, (7,)))) is LeaseLost


async def test_commit_after_expiry_without_a_taker(store: SessionStore, redis: Redis) -> None:
    """A lease that ran out unnoticed fences nobody: the owner commits on, and has its lease again."""
    await store.create(record(), 10)
    await redis.hset(RECORD_KEY, "lease", "1")
    assert await commit_one(store, Commit("s-1", 1, 0, (7,))) is None
    with pytest.raises(LeaseLost):
        await store.acquire("s-1", "router-b", 10)


async def test_leases_by_the_servers_clock(store: SessionStore, redis: Redis) -> None:
    """create, acquire and commit date the lease by Redis' TIME."""

    async def now() -> int:
        seconds, micros = await redis.time()
        return seconds * 1000 + micros // 1000

    async def between(before: int, lease_ms: int) -> bool:
        lease = int((await redis.hget(RECORD_KEY, "lease")) or 0)
        return before + lease_ms <= lease <= await now() + lease_ms

    before = await now()
    await store.create(record(), 5)
    assert await between(before, 5000)
    before = await now()
    await store.commit([Commit("s-1", 1, 0, ())], 7)
    assert await between(before, 7000)
    before = await now()
    await store.acquire("s-1", "router-a", 9)
    assert await between(before, 9000)


async def test_everything_expires(store: SessionStore, redis: Redis) -> None:
    """Both keys have a time to live after every kind of write."""
    await store.create(record(token_ids=(1,)), 10)
    for _ in range(2):
        for key in (RECORD_KEY, TOKENS_KEY):
            assert 0 < await redis.pttl(key) <= 60_000
            await redis.persist(key)
        await store.commit([Commit("s-1", 1, 1, ())], 10)
    await store.commit([Commit("s-1", 1, 1, ())], 10)
    await store.acquire("s-1", "router-a", 10)
    await store.release("s-1", 2)
    assert sorted(await redis.keys("*")) == [RECORD_KEY.encode(), TOKENS_KEY.encode()]
    assert await redis.pttl(RECORD_KEY) > 0


async def test_whole_record(store: SessionStore, redis: Redis) -> None:
    """A commit that carries the record writes it where there is none (whatever tokens were left behind), catches
    up where Redis has less, and is fenced off where another owner has begun again."""
    bare = record()
    whole = Commit("s-1", 1, 0, (7, 8, 9), owner="router-a", record=bare)
    assert await commit_one(store, whole) is None
    assert await store.load("s-1") == record(token_ids=(7, 8, 9))
    assert 0 < await redis.pttl(RECORD_KEY) <= 60_000
    assert 0 < await redis.pttl(TOKENS_KEY) <= 60_000
    await redis.delete(RECORD_KEY)
    await redis.set(TOKENS_KEY, pack((5, 6)))
    assert await commit_one(store, whole) is None
    assert await store.load("s-1") == record(token_ids=(7, 8, 9))
    await redis.set(TOKENS_KEY, pack((7,)))
    assert await commit_one(store, replace(whole, finished=True)) is None
    assert await store.load("s-1") == record(token_ids=(7, 8, 9), finished=True)
    await redis.flushall()
    await store.create(record(owner="router-b"), 10)
    assert type(await commit_one(store, whole)) is LeaseLost
    assert await store.load("s-1") == record(owner="router-b")


async def test_scripts_survive_a_script_flush(store: SessionStore, redis: Redis) -> None:
    """A server that forgot the scripts is given them again, in single calls and in the middle of a group."""
    await store.create(record(), 10)
    await redis.script_flush()
    outcomes = await store.commit([Commit("s-1", 1, 0, (7,)), Commit("s-1", 1, 1, (8,))], 10)
    assert outcomes == [None, None]
    await redis.script_flush()
    assert (await loaded(store)).token_ids == (7, 8)
    await redis.script_flush()
    assert (await store.acquire("s-1", "router-a", 10)).epoch == 2


async def test_bad_arguments(store: SessionStore) -> None:
    """Ids that would break a key, tokens outside int32, and senseless leases are refused by name."""
    for bad in ("", "a}b", "a b", "x" * 129, "é"):
        with pytest.raises(InvalidArgument, match="session_id"):
            await store.load(bad)
    for token in (-1, 1 << 31):
        with pytest.raises(InvalidArgument, match="token_ids"):
            await store.commit([Commit("s-1", 1, 0, (token,))], 10)
    for lease in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="lease_seconds"):
            await store.create(record(), lease)
    with pytest.raises(InvalidArgument, match="owner"):
        await store.create(record(owner=""), 10)
    with pytest.raises(InvalidArgument, match="ttl_seconds"):
        SessionStore(store.redis, ttl_seconds=0)


async def test_damaged_record(store: SessionStore, redis: Redis) -> None:
    """A record that cannot be read says which session and what kind of damage; no content."""
    await store.create(record(), 10)
    await redis.hdel(RECORD_KEY, "prompt")
    with pytest.raises(GraftreeError, match="s-1: damaged record: KeyError"):
        await store.load("s-1")
    await redis.delete(RECORD_KEY)
    await redis.set(RECORD_KEY, "no hash")
    outcome = await commit_one(store, Commit("s-1", 1, 0, (7,)))
    assert type(outcome) is GraftreeError
    assert "WRONGTYPE" in str(outcome)


RACES = {"fakeredis": 500, "cluster": 200}


@pytest.mark.parametrize(("kind", "races"), [(kind, RACES.get(kind, 2000)) for kind in KINDS])
async def test_racing_owners(kind: str, races: int) -> None:
    """Two routers that both believe in a session, with leases as short as they get: for no output position are
    two of them ever told that their token was committed, and the record is exactly what they were told."""
    rng = random.Random(races)
    told: list[tuple[int, str, int]] = []
    fenced = 0

    async def router(store: SessionStore, name: str, token: int) -> None:
        nonlocal fenced
        try:
            mine = await store.acquire("s-1", name, 0.001)
        except LeaseLost:
            return
        length = len(mine.token_ids)
        for step in range(2):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            outcome = await commit_one(store, Commit("s-1", mine.epoch, length, (token + step,)))
            if outcome is not None:
                fenced += isinstance(outcome, LeaseLost)
                return
            told.append((length, name, token + step))
            length += 1

    async with client(kind) as redis:
        store = SessionStore(redis, ttl_seconds=60)
        await store.create(record(), 0.001)
        for race in range(races):
            await redis.hset(RECORD_KEY, "lease", "1")
            await asyncio.gather(router(store, "router-a", 4 * race), router(store, "router-b", 4 * race + 2))
        final = (await loaded(store)).token_ids
    positions = [length for length, _, _ in told]
    double_commits = len(positions) - len(set(positions))
    assert double_commits == 0
    assert final == tuple(token for _, _, token in sorted(told))
    assert fenced > races // 50, "the owners hardly raced"


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("commit"),
            st.integers(-1, 1),  # epoch, relative to the record's
            st.integers(-3, 1),  # length, relative to the record's
            st.lists(st.integers(0, 2), max_size=3),
            st.booleans(),
        ),
        st.tuples(st.just("acquire"), st.sampled_from(["router-a", "router-b"])),
        st.tuples(st.just("expire")),
        st.tuples(st.just("release"), st.integers(-1, 0)),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(operations)
def test_against_a_model(script: list[tuple]) -> None:
    """Random histories end as a model of the rules, written down in ten lines of Python, says."""
    asyncio.run(run_history(script))


async def run_history(script: list[tuple]) -> None:
    redis = fakeredis.FakeAsyncRedis()
    store = SessionStore(redis, ttl_seconds=60)
    await store.create(record(), 1000)
    tokens: list[int] = []
    epoch, owner, live, finished = 1, "router-a", True, False
    for operation, *arguments in script:
        if operation == "commit":
            epoch_off, length_off, new, finish = arguments
            first = max(0, len(tokens) + length_off)
            outcome = await commit_one(store, Commit("s-1", epoch + epoch_off, first, new, finished=finish))
            merged = tokens[:first] + new
            grows = len(merged) > len(tokens)
            if epoch_off != 0 or not owner:
                assert type(outcome) is LeaseLost
            elif first > len(tokens) or merged[: len(tokens)] != tokens or (finished and grows):
                assert type(outcome) is Stale
            else:
                assert outcome is None
                tokens, finished, live = merged, finished or finish, True
        elif operation == "acquire":
            (who,) = arguments
            if owner and live and who != owner:
                with pytest.raises(LeaseLost):
                    await store.acquire("s-1", who, 1000)
            else:
                epoch, owner, live = epoch + 1, who, True
                assert (await store.acquire("s-1", who, 1000)).epoch == epoch
        elif operation == "expire":
            live = False
            await redis.hset(RECORD_KEY, "lease", "0")
        else:
            (epoch_off,) = arguments
            await store.release("s-1", epoch + epoch_off)
            owner = owner if epoch_off else ""
        expected = record(token_ids=tuple(tokens), epoch=epoch, owner=owner, finished=finished)
        assert await store.load("s-1") == expected
    await redis.aclose()


@given(st.lists(st.integers(0, (1 << 31) - 1), max_size=20))
def test_packing(ids: list[int]) -> None:
    """pack and unpack are inverse, at four bytes a token."""
    assert len(pack(ids)) == 4 * len(ids)
    assert list(unpack(pack(ids))) == ids


async def test_read_only_server() -> None:
    """A server that became a replica is Unavailable, not an error of the session; once writable it goes on."""
    async with client("valkey") as redis:
        store = SessionStore(redis, ttl_seconds=60)
        await store.create(record(), 10)
        try:
            await redis.replicaof("127.0.0.1", "1")
            assert type(await commit_one(store, Commit("s-1", 1, 0, (7,)))) is Unavailable
            with pytest.raises(Unavailable, match=r"READONLY|read only"):
                await store.acquire("s-1", "router-a", 10)
        finally:
            await redis.replicaof("NO", "ONE")
        assert await commit_one(store, Commit("s-1", 1, 0, (7,))) is None
    assert server("valkey").running
