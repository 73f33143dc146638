"""`History`: who really wrote to the sessions in Redis, read from its own log of commands.

Redis shows the commands of a script as it runs them (MONITOR). A session's epoch and owner are followed from them
alone: whatever appends tokens must come from the owner of the current epoch. The scripts' own checks do not count.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from redis.asyncio import Redis
from redis.exceptions import RedisError

from graftree.store.connection import connect
from graftree.store.script import Script

RETRY_SECONDS = 0.05

_COMMIT = Script("session_commit").sha


@dataclass
class _Session:
    """None = not known: its beginning was not seen."""

    epoch: int | None = None
    owner: str | None = None


@dataclass(frozen=True)
class _Commit:
    """The commit whose commands are coming now."""

    name: str
    epoch: int
    owner: str


@dataclass
class History:
    """Of one server.

    Attributes:
        url: of the server.
        commits: appends that were checked.
        acquired: times that a session got another epoch.
        wrong: what must not be, in words.
        listening: set as soon as commands are seen.
    """

    url: str
    commits: int = 0
    acquired: int = 0
    wrong: list[str] = field(default_factory=list)
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    _marks: dict[str, asyncio.Event] = field(default_factory=dict)
    _sessions: dict[str, _Session] = field(default_factory=dict)
    _commit: _Commit | None = None

    async def follow(self) -> None:
        """Until cancelled. A server that starts again has no sessions."""
        while True:
            with suppress(RedisError, OSError):
                async with connect(self.url, timeout_seconds=3600.0) as redis, redis.monitor() as monitor:
                    self._sessions.clear()
                    self.listening.set()
                    async for entry in monitor.listen():
                        self.saw(entry["client_type"], entry["command"].split(" "))
            await asyncio.sleep(RETRY_SECONDS)

    async def caught_up(self, redis: Redis) -> None:
        """Returns when whatever the server has done before this call was seen here."""
        mark = f"graftree-mark-{len(self._marks)}"
        event = self._marks[mark] = asyncio.Event()
        await redis.echo(mark)
        await event.wait()

    def saw(self, client: str, words: list[str]) -> None:
        """One command: whose it is ("lua" = a script's own), and its words."""
        if client != "lua":
            self._commit = _outer(words)
            if words[0].upper() == "ECHO" and words[1] in self._marks:
                self._marks[words[1]].set()
            return
        command, key = words[0].upper(), words[1] if len(words) > 1 else ""
        name, _, part = key.rpartition(":")
        if not name.startswith("graftree:") or "{s:" not in name:
            return
        session = self._sessions.setdefault(name, _Session())
        if part == "tokens" and command == "APPEND":
            self._append(name, session)
        elif part == "record":
            self._record(session, command, words[2:])

    def _record(self, session: _Session, command: str, rest: list[str]) -> None:
        if command == "HINCRBY" and rest[0] == "epoch":
            session.epoch = None if session.epoch is None else session.epoch + 1
            self.acquired += 1
        elif command == "HSET":
            if "epoch" in rest:
                session.epoch = int(rest[rest.index("epoch") + 1])
            if "owner" in rest:
                session.owner = rest[rest.index("owner") + 1]

    def _append(self, name: str, session: _Session) -> None:
        commit, self._commit = self._commit, None
        if commit is None or commit.name != name:
            self.wrong.append(f"{name}: tokens came without a commit")
        elif session.epoch is not None and session.owner is not None:
            self.commits += 1
            if (commit.epoch, commit.owner) != (session.epoch, session.owner):
                wrote, holds = f"epoch {commit.epoch} of {commit.owner}", f"epoch {session.epoch} of {session.owner}"
                self.wrong.append(f"{name}: {wrote} wrote, but it is {holds}")


def _outer(words: list[str]) -> _Commit | None:
    """A commit's call: EVALSHA sha 3 record tokens log_probs epoch owner length ..."""
    if words[0].upper() != "EVALSHA" or len(words) < 9 or words[1] != _COMMIT:
        return None
    return _Commit(words[3].removesuffix(":record"), int(words[6]), words[7])
