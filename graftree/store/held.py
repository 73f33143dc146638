"""`HeldSession`: a session as its router holds it, and how much of it Redis has acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from graftree.errors import GraftreeError
from graftree.store.sessions import Commit, SessionRecord


class Durability(Enum):
    """What a commit's return means: written to Redis, or kept in memory until Redis is back."""

    DURABLE = "durable"
    DEGRADED = "degraded"


Waiter = asyncio.Future[Durability]


@dataclass(eq=False)
class HeldSession:
    """Attributes:
    record: as it was created or acquired, without output. None: known from its commits only, so that it
        cannot be written again.
    base: output tokens before output[0].
    output: the output, as far as it is held.
    log_probs: of the output, as many bytes for each token.
    saved: output tokens that Redis has.
    finished, finish_saved: nothing follows; Redis knows that.
    touched: event loop time of the last acknowledged write.
    waiters: of commits that no round trip has taken yet.
    error: why it cannot go on here.
    seen: its record is or was in Redis, by Redis' own word.
    any_seed: its tokens do not depend on its seed.
    """

    session_id: str
    epoch: int
    owner: str
    record: SessionRecord | None
    base: int
    output: list[int]
    saved: int
    finished: bool = False
    finish_saved: bool = False
    touched: float = 0.0
    waiters: list[Waiter] = field(default_factory=list)
    error: GraftreeError | None = None
    log_probs: bytearray = field(default_factory=bytearray)
    seen: bool = False
    any_seed: bool = False

    @classmethod
    def of(cls, record: SessionRecord, *, saved: int) -> HeldSession:
        bare = replace(record, token_ids=(), finished=False, log_probs=b"")
        output = list(record.token_ids)
        held = cls(record.session_id, record.epoch, record.owner, bare, 0, output, saved, record.finished)
        held.log_probs.extend(record.log_probs)
        return held

    @classmethod
    def from_commit(cls, commit: Commit) -> HeldSession:
        return cls(commit.session_id, commit.epoch, commit.owner, None, commit.length, [], commit.length)

    @property
    def length(self) -> int:
        return self.base + len(self.output)

    @property
    def unfinished_business(self) -> bool:
        """Whether Redis has yet to learn that it finished."""
        return self.finished and not self.finish_saved and self.error is None

    def append(self, commit: Commit) -> None:
        """Take over what it brings."""
        self.output.extend(commit.token_ids)
        self.log_probs.extend(commit.log_probs)
        self.finished = commit.finished

    def unsaved(self) -> Commit:
        """What Redis lacks; may be no tokens."""
        first = self.saved - self.base
        tokens, log_probs = tuple(self.output[first:]), self._log_probs(first, len(self.output))
        commit = Commit(
            self.session_id, self.epoch, self.saved, tokens, self.finished, self.owner, log_probs=log_probs
        )
        # Nobody knows what is there: not to be mixed with what another request left.
        return commit if self.seen or self.record is None else self.whole(commit)

    def whole(self, commit: Commit) -> Commit:
        """All that Redis would have after `commit`, with the record: for a Redis that lost it."""
        end = commit.length + len(commit.token_ids)
        output, log_probs = tuple(self.output[:end]), self._log_probs(0, end)
        whole = replace(commit, length=0, token_ids=output, record=self.record, log_probs=log_probs)
        return replace(whole, any_seed=self.any_seed)

    def _log_probs(self, first: int, end: int) -> bytes:
        if not self.log_probs:
            return b""
        size = len(self.log_probs) // len(self.output)
        return bytes(self.log_probs[first * size : end * size])

    def saw(self, commit: Commit, now: float) -> None:
        """Redis has acknowledged `commit`."""
        self.saved = max(self.saved, commit.length + len(commit.token_ids))
        self.finish_saved = self.finish_saved or commit.finished
        self.touched = now
        self.seen = True


@dataclass(frozen=True)
class Share:
    """One session's part of a round trip, and who waits for it."""

    session: HeldSession
    commit: Commit
    waiters: list[Waiter]


def fail(waiters: Iterable[Waiter], error: GraftreeError) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error)
