"""Session records in Redis: what another router needs to take a generation over.

    graftree:v1:{s:<session id>}:record   hash    prompt, parameters, seed, salt, epoch, owner, lease, finished
    graftree:v1:{s:<session id>}:tokens   string  the output so far, int32 little endian, appended to
    graftree:v1:{s:<session id>}:log_probs  string  as many bytes for each token, where its request wants them

The samples of a request behind its first one have ids that end in #1, #2, ...; that stands behind the braces.
The keys share a hash tag, so a session lives on one node of a Redis Cluster, and expire `ttl_seconds` after the last
write, those of a finished session `finished_seconds` after it. `epoch` counts owners and `lease` is the time, by
Redis' own clock, until which nobody else may acquire the session without force. Every change of state is one Lua
script, so it happens whole or not at all.
"""

from __future__ import annotations

import math
import re
import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from graftree.errors import AlreadyExists, GraftreeError, InvalidArgument, LeaseLost, NotFound, Stale
from graftree.store.connection import from_redis, translated
from graftree.store.script import Argument, Script

SCHEMA = "graftree:v1"
_SESSION_ID = re.compile(r"([A-Za-z0-9._:-]{1,128})(#[0-9]{1,4})?")
_MAX_TOKEN = (1 << 31) - 1
_MAX_SECONDS = 10 * 365 * 86_400.0


@dataclass(frozen=True)
class SessionRecord:
    """One generation.

    Attributes:
        session_id: 1 to 128 of A-Z a-z 0-9 . _ : - and, for a further sample of a request, # and its number.
        model_fingerprint: of the LLM that began it.
        prompt_token_ids: the prompt.
        token_ids: output committed so far.
        parameters: the serialised GenerateRequest without its input.
        seed: unsigned 64 bits.
        salt: start of the node id chain, unsigned 64 bits.
        epoch: counts owners, from 1.
        owner: pod id of the router that has the lease; empty after a release.
        finished: no token will follow.
        log_probs: of the output, as many bytes for each token; what they mean is the router's business.
    """

    session_id: str
    model_fingerprint: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    parameters: bytes
    seed: int
    salt: int
    epoch: int
    owner: str
    finished: bool
    log_probs: bytes = b""


@dataclass(frozen=True)
class Commit:
    """Tokens to append to a session's output.

    Attributes:
        epoch: the owner's.
        length: output tokens before these.
        token_ids: may be empty: a commit also renews the lease.
        finished: nothing follows.
        owner: if given, must be the record's owner too.
        record: if given, written (up to and with these tokens) where Redis has no record, as after an empty
            restart; `length` is then 0 and `token_ids` the whole output. Where Redis has one of the same request
            these may be the first of its tokens.
        log_probs: of these tokens, as many bytes for each; empty where the session has none.
        any_seed: the tokens do not depend on the seed: that of the record in Redis may be another.
    """

    session_id: str
    epoch: int
    length: int
    token_ids: Sequence[int]
    finished: bool = False
    owner: str = ""
    record: SessionRecord | None = None
    log_probs: bytes = b""
    any_seed: bool = False


class SessionStore:
    """Reads and writes session records.

    Every method raises Unavailable where Redis cannot be reached or cannot write now, and may then be repeated.

    Args:
        redis: with binary replies (`graftree.store.connection.connect`).
        ttl_seconds: how long a record is kept after its last write.
        finished_seconds: the same of a finished session; None = `ttl_seconds`.
    """

    def __init__(self, redis: Redis, *, ttl_seconds: float, finished_seconds: float | None = None) -> None:
        self.redis = redis
        self._ttl = _milliseconds("ttl_seconds", ttl_seconds)
        self._finished_ttl = self._ttl
        if finished_seconds is not None:
            self._finished_ttl = _milliseconds("finished_seconds", finished_seconds)
        self._create = Script("session_create")
        self._load = Script("session_load")
        self._acquire = Script("session_acquire")
        self._commit = Script("session_commit")
        self._release = Script("session_release")

    async def create(self, record: SessionRecord, lease_seconds: float) -> None:
        """Write a new session; `record.owner` has its lease.

        Raises:
            AlreadyExists: there is a record of this id.
            InvalidArgument: a field outside its limit.
        """
        lease = _milliseconds("lease_seconds", lease_seconds)
        # The nonce makes a repeat of this very call, after a lost reply, succeed as the first did.
        output = (pack(record.token_ids), record.log_probs)
        arguments = [secrets.token_hex(8), lease, self._ttl, *output, *_fields(record)]
        with translated():
            reply = await self._create.run(self.redis, _keys(record.session_id), arguments)
        if reply[0] == b"EXISTS":
            raise AlreadyExists(f"session {record.session_id} exists")

    async def load(self, session_id: str) -> SessionRecord | None:
        """The record, or None."""
        with translated():
            reply = await self._load.run(self.redis, _keys(session_id), ())
        return None if reply[0] == b"MISSING" else _record(session_id, *reply[1:4])

    async def acquire(
        self, session_id: str, owner: str, lease_seconds: float, *, force: bool = False
    ) -> SessionRecord:
        """Make `owner` the owner, under the next epoch: whoever had the session can never write to it again.

        Args:
            force: take it from an owner whose lease is live, too.

        Raises:
            LeaseLost: another owner's lease is live; says for how long.
            NotFound: no such record.
        """
        lease = _milliseconds("lease_seconds", lease_seconds)
        arguments = (_owner(owner), lease, self._ttl, int(force), self._finished_ttl)
        with translated():
            reply = await self._acquire.run(self.redis, _keys(session_id), arguments)
        if reply[0] == b"MISSING":
            raise NotFound(f"session {session_id} is unknown")
        if reply[0] == b"HELD":
            holder, remaining = reply[1].decode(), int(reply[2])
            text = f"session {session_id} belongs to {holder} for another {remaining} ms"
            raise LeaseLost(text, remaining_s=remaining / 1000)
        return _record(session_id, *reply[1:4])

    async def commit(self, commits: Sequence[Commit], lease_seconds: float) -> list[GraftreeError | None]:
        """Append to many sessions in one round trip, each by compare-and-set, and renew their leases.

        Sending a commit again is harmless: tokens that are there already, at the same place and under the same
        epoch, are not appended twice.

        Returns:
            One entry per commit: None = written; LeaseLost = another epoch or owner, or released; Stale = the
            length is another, or the tokens or the request there differ, or the session has finished; NotFound = no
            record; Unavailable = Redis cannot write now.

        Raises:
            Unavailable: no reply: any of them may or may not have been written.
        """
        if not commits:
            return []
        lease = _milliseconds("lease_seconds", lease_seconds)
        calls = [(_keys(commit.session_id), self._commit_arguments(commit, lease)) for commit in commits]
        with translated():
            replies = await self._commit.run_all(self.redis, calls)
        return [_outcome(commit, reply) for commit, reply in zip(commits, replies, strict=True)]

    async def release(self, session_id: str, epoch: int) -> None:
        """Give the session up, so that it can be acquired at once. Nothing happens if `epoch` is not its epoch."""
        with translated():
            await self._release.run(self.redis, _keys(session_id)[:1], (epoch,))

    async def ping(self) -> None:
        """Raises Unavailable if Redis does not answer."""
        with translated():
            await self.redis.ping()

    def _commit_arguments(self, commit: Commit, lease: int) -> list[Argument]:
        arguments: list[Argument] = [
            commit.epoch,
            commit.owner,
            commit.length,
            pack(commit.token_ids),
            int(commit.finished),
            lease,
            self._finished_ttl if commit.finished else self._ttl,
            commit.log_probs,
            int(commit.any_seed),
        ]
        return arguments if commit.record is None else arguments + _fields(commit.record)


def pack(token_ids: Iterable[int]) -> bytes:
    """int32 little endian, 4 bytes each. Raises InvalidArgument for one outside 0 .. 2**31 - 1."""
    ids = tuple(token_ids)
    for token in ids:
        if not 0 <= token <= _MAX_TOKEN:
            raise InvalidArgument("token_ids", token, f"0 <= token <= {_MAX_TOKEN}")
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data)


def _keys(session_id: str) -> tuple[str, str, str]:
    match = _SESSION_ID.fullmatch(session_id)
    if match is None:
        raise InvalidArgument("session_id", session_id[:128], "1 to 128 of A-Z a-z 0-9 . _ : -")
    prefix = f"{SCHEMA}:{{s:{match[1]}}}{match[2] or ''}"
    return f"{prefix}:record", f"{prefix}:tokens", f"{prefix}:log_probs"


def _owner(owner: str) -> str:
    if not owner:
        raise InvalidArgument("owner", owner, "a pod id")
    return owner


def _milliseconds(name: str, seconds: float) -> int:
    if not (math.isfinite(seconds) and 0.001 <= seconds <= _MAX_SECONDS):
        raise InvalidArgument(name, seconds, f"0.001 to {_MAX_SECONDS:.0f} seconds")
    return math.ceil(seconds * 1000)


def _fields(record: SessionRecord) -> list[Argument]:
    """Field, value, ... of the hash; the output lives in its own key."""
    return [
        "model_fingerprint",
        record.model_fingerprint,
        "prompt",
        pack(record.prompt_token_ids),
        "parameters",
        record.parameters,
        "seed",
        record.seed,
        "salt",
        record.salt,
        "epoch",
        record.epoch,
        "owner",
        _owner(record.owner),
        "finished",
        int(record.finished),
    ]


def _record(session_id: str, flat: Sequence[bytes], tokens: bytes, log_probs: bytes) -> SessionRecord:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    try:
        return SessionRecord(
            session_id=session_id,
            model_fingerprint=fields[b"model_fingerprint"].decode(),
            prompt_token_ids=unpack(fields[b"prompt"]),
            token_ids=unpack(tokens),
            parameters=fields[b"parameters"],
            seed=int(fields[b"seed"]),
            salt=int(fields[b"salt"]),
            epoch=int(fields[b"epoch"]),
            owner=fields[b"owner"].decode(),
            finished=fields[b"finished"] == b"1",
            log_probs=log_probs,
        )
    except (KeyError, ValueError, struct.error) as error:
        raise GraftreeError(f"session {session_id}: damaged record: {type(error).__name__}") from error


def _outcome(commit: Commit, reply: Any) -> GraftreeError | None:
    if isinstance(reply, BaseException):
        return from_redis(reply)
    match reply[0]:
        case b"OK":
            return None
        case b"MISSING":
            return NotFound(f"session {commit.session_id} is unknown")
        case b"FENCED":
            epoch, owner = int(reply[1]), reply[2].decode()
            holder = f"epoch {epoch} of {owner}" if owner else f"nobody, since epoch {epoch}"
            return LeaseLost(f"session {commit.session_id} belongs to {holder}, not to epoch {commit.epoch}")
        case _:
            return Stale(
                f"session {commit.session_id}: commit of {len(commit.token_ids)} tokens at {commit.length}, "
                f"but the record has {reply[1]}"
            )
