"""`Records`: the sessions' records in Redis, from their beginning or take-over to their end.

A session whose request comes again goes on from its record, at the same token: under the next epoch, so that whoever
had it can never write to it again. A request that only repeats its id waits for the lease of a router that is at work
on it; one that says what it has (`resume_after`) is the client's word that its stream there is no more, and takes the
session at once. Streams that are left on the other router end with LeaseLost. Where the client remembers its tokens a
record that is gone, or out of reach, is begun anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from graftree.errors import AlreadyExists, GraftreeError, Incompatible, LeaseLost, NotFound, Unavailable
from graftree.store.sessions import SessionRecord, SessionStore
from graftree.v1.generation_pb2 import GenerateRequest
from router.caller import public_id
from router.difference import refuse_another, refuse_another_prompt
from router.events import check_resume
from router.request import GenerationPlan
from router.tools import Tools

# Longest that one who remembers its tokens waits for the record, usually and while Redis is known to be away:
# computing them again takes hardly longer.
PATIENCE_SECONDS = (0.5, 0.1)


class Records:
    """Of one router."""

    def __init__(self, store: SessionStore, tools: Tools) -> None:
        self._store = store
        self._tools = tools

    async def begin(
        self,
        plan: GenerationPlan,
        *,
        sample: int = 0,
        seeded: bool,
        after: int | None = None,
        admit: Callable[[], None] | None = None,
    ) -> SessionRecord:
        """Create a sample's record, or take over the one that an earlier life of its request left.

        Args:
            plan: the sample's.
            seeded: its seed is the one that was asked for; else the seed of a record that is there counts.
            after: tokens of the sample that the client has; None = it may be a new one.
            admit: called before a record is begun; what it raises is raised.

        Raises:
            AlreadyExists: the id belongs to another request.
            Incompatible: it began with another model.
            InvalidArgument: the client cannot have so many tokens.
            NotFound: nobody began it, or it is over for too long.
            Unavailable: another router is at work on it, or Redis cannot be reached and knows more than the client.
        """
        remembers = after is not None and bool(plan.remembered)
        record = SessionRecord(
            session_id=f"{plan.request_id}#{sample}" if sample else plan.request_id,
            model_fingerprint=self._tools.pods.identity.model_fingerprint,
            prompt_token_ids=plan.prompt_token_ids,
            token_ids=(),
            parameters=plan.parameters,
            seed=plan.seed,
            salt=self._tools.random.getrandbits(64),
            epoch=1,
            owner=self._tools.config.pod_id,
            finished=False,
        )
        admit = admit or _anyone
        if after is not None:
            greedy = plan.sampling.greedy
            held = await self._resume(record, seeded, after, remembers=remembers, admit=admit, any_seed=greedy)
            if held is not None:
                return held
        # Later samples may not have been begun.
        if after is not None and not remembers and (sample == 0 or after > 0):
            seconds = self._tools.config.replay_seconds
            raise NotFound(
                f"request_id = {public_id(plan.request_id)!r}: no such generation to resume; "
                f"one that has ended can be resumed for {seconds:g} s"
            )
        admit()
        try:
            await self._tools.committer.create(record)
        except AlreadyExists:
            held = await self._take_over(record, seeded, after if remembers else None, remembers=remembers)
            if held is None:
                raise
            return held
        return record

    async def _resume(
        self,
        wanted: SessionRecord,
        seeded: bool,
        after: int,
        *,
        remembers: bool,
        admit: Callable[[], None],
        any_seed: bool,
    ) -> SessionRecord | None:
        """As `_take_over`. Where the client remembers its tokens and Redis is away the session begins anew, to be
        written when Redis is back; if another's record turns out to be there its next commit raises LeaseLost."""
        if remembers:
            committer = self._tools.committer
            try:
                async with asyncio.timeout(PATIENCE_SECONDS[committer.degraded]):
                    await self._store.ping()
            except (Unavailable, TimeoutError):
                admit()
                committer.adopt(wanted, seen=False, any_seed=any_seed)
                return wanted
        return await self._take_over(wanted, seeded, after, remembers=remembers)

    async def _take_over(
        self, wanted: SessionRecord, seeded: bool, after: int | None, *, remembers: bool = False
    ) -> SessionRecord | None:
        """None = there is no record.

        Args:
            remembers: the client has the first `after` tokens, so that the record may have less.
        """
        name = public_id(wanted.session_id)
        found = await self._store.load(wanted.session_id)
        if found is None:
            return None
        _check_same(name, found, wanted, seeded)
        if after is not None and not remembers:
            check_resume(_sample(wanted.session_id), after, len(found.token_ids))
        try:
            held = await self._store.acquire(
                wanted.session_id, wanted.owner, self._tools.config.lease_seconds, force=after is not None
            )
        except LeaseLost as error:
            text = f"request {name} is being served by another router, whose lease ends in {error.remaining_s:g} s"
            raise Unavailable(text, retry_after_s=error.remaining_s) from None
        except NotFound:  # it ran out in between
            return None
        self._tools.committer.adopt(held)
        self._tools.metrics.resumed += 1
        return held

    async def leave(self, record: SessionRecord, *, finished: bool) -> None:
        """A session that was not finished may be taken up again by whoever gets its request."""
        if finished:
            self._tools.committer.forget(record.session_id)
            return
        with suppress(GraftreeError):
            await self._tools.committer.release(record.session_id)


def _anyone() -> None:
    """Admits."""


def _sample(session_id: str) -> int:
    return int(session_id.rpartition("#")[2]) if "#" in session_id else 0


def _check_same(name: str, found: SessionRecord, wanted: SessionRecord, seeded: bool) -> None:
    if found.model_fingerprint != wanted.model_fingerprint:
        theirs, ours = found.model_fingerprint, wanted.model_fingerprint
        raise Incompatible(f"request {name} began with the model {theirs}; {ours} is served here")
    refuse_another_prompt(name, found.prompt_token_ids, wanted.prompt_token_ids)
    if found.parameters != wanted.parameters:
        began, asked = (GenerateRequest.FromString(each.parameters) for each in (found, wanted))
        if asked.HasField("sampling") and not began.sampling.HasField("seed"):
            asked.sampling.ClearField("seed")  # naming the seed in force changes nothing
        refuse_another(name, began, asked)
    if seeded and found.seed != wanted.seed:
        raise AlreadyExists(f"request {name} exists and is a different one: its seed is {found.seed}")
