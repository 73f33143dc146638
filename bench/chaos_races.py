"""Races for `bench.chaos`: two routers that both believe in a session, on a real server.

In each race both acquire the session, one of them or both by force as `resume_after` does, and then commit, at
moments that chance decides. What they were told, what the record says and what the server's own log of commands shows
must agree: no output position was ever acknowledged to two of them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from bench.chaos_history import History
from bench.report import Report
from graftree.errors import LeaseLost
from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis
from graftree.store.sessions import Commit, SessionRecord, SessionStore

ROUTERS = ("router-a", "router-b")
SESSION = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"
SHORTEST_LEASE = 0.001  # seconds
PATIENT = 60.0  # seconds for a reply: a slow machine is none of the things that race
MOST_COMMITS = 3  # of one router in one race
PER_SESSION = 500  # races: a record is copied whole at each acquisition


@dataclass
class Races:
    """What came of them.

    Attributes:
        told: (session, length before, token) of each commit that was acknowledged.
        fenced: commits that were refused because the other router had taken the session.
        held: acquisitions that were refused because the other one's lease was live.
        astray: sessions whose record is not exactly what was acknowledged.
    """

    races: int = 0
    told: list[tuple[str, int, int]] = field(default_factory=list)
    fenced: int = 0
    held: int = 0
    astray: int = 0

    @property
    def double(self) -> int:
        """Output positions that were acknowledged more than once, counted for each time too many."""
        return len(self.told) - len({(session, length) for session, length, _ in self.told})


async def race(url: str, count: int, rng: Random) -> tuple[Races, History]:
    """So many races on the server at `url`, one after the other."""
    found, history = Races(), History(url)
    following = asyncio.create_task(history.follow())
    async with connect(url, timeout_seconds=PATIENT) as one, connect(url, timeout_seconds=PATIENT) as other:
        stores = [SessionStore(redis, ttl_seconds=600) for redis in (one, other)]
        await history.listening.wait()
        while found.races < count:
            session = f"{SESSION}:{found.races}"
            await _session(found, stores, session, min(PER_SESSION, count - found.races), rng)
        await history.caught_up(one)
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    return found, history


async def _session(found: Races, stores: list[SessionStore], session: str, races: int, rng: Random) -> None:
    record = SessionRecord(session, "model", (1, 2, 3), (), b"", 7, 9, 1, ROUTERS[0], finished=False)
    await stores[0].create(record, SHORTEST_LEASE)
    for number in range(races):
        await asyncio.gather(
            *(
                _router(found, store, session, name, token=2 * number + index, rng=rng)
                for index, (store, name) in enumerate(zip(stores, ROUTERS, strict=True))
            )
        )
    found.races += races
    final = await stores[0].load(session)
    told = sorted((length, token) for each, length, token in found.told if each == session)
    if final is None or final.token_ids != tuple(token for _, token in told):
        found.astray += 1


async def _router(found: Races, store: SessionStore, session: str, name: str, *, token: int, rng: Random) -> None:
    await _dawdle(rng)
    try:
        mine = await store.acquire(session, name, SHORTEST_LEASE, force=rng.random() < 0.8)
    except LeaseLost:
        found.held += 1
        return
    length = len(mine.token_ids)
    for _ in range(rng.randint(1, MOST_COMMITS)):
        await _dawdle(rng)
        [outcome] = await store.commit([Commit(session, mine.epoch, length, (token,), owner=name)], SHORTEST_LEASE)
        if outcome is not None:
            found.fenced += isinstance(outcome, LeaseLost)
            return
        found.told.append((session, length, token))
        length += 1


async def _dawdle(rng: Random) -> None:
    for _ in range(rng.randrange(4)):
        await asyncio.sleep(0)


def run(count: int, rng: Random, json: str | None) -> int:
    """Race and report; 1 where two routers wrote one position."""
    report = Report("chaos: races")
    with EmbeddedRedis() as redis:
        found, history = asyncio.run(race(redis.url, count, rng))
    report.add("ownership races between two routers", found.races)
    report.add("commits acknowledged", len(found.told))
    report.add("commits fenced off", found.fenced, "", "> 0: they did race", found.fenced > 0)
    report.add("acquisitions refused, lease live", found.held)
    report.add("double commits", found.double, "", "0", found.double == 0)
    report.add("records that are not what was acknowledged", found.astray, "", "0", found.astray == 0)
    report.add("epochs seen in the log of commands", history.acquired)
    missed = len(found.told) - history.commits
    report.add("acknowledged commits not in the log", missed, "", "0", missed == 0)
    wrong = len(history.wrong)
    report.add("commits in the log not by the epoch's owner", wrong, "", "0", wrong == 0)
    return report.finish(json)
