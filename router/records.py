"""`Records`: the sessions' records in Redis, from their beginning or take-over to their end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from graftree.errors import AlreadyExists, GraftreeError, LeaseLost
from graftree.store.sessions import SessionRecord, SessionStore
from router.request import GenerationPlan
from router.tools import Tools


class Records:
    """Of one router."""

    def __init__(self, store: SessionStore, tools: Tools) -> None:
        self._store = store
        self._tools = tools

    async def begin(self, plan: GenerationPlan, *, sample: int = 0, seeded: bool) -> SessionRecord:
        """Create a sample's record, or take over the one that an earlier life of its request left.

        Args:
            plan: the sample's.
            seeded: its seed is the one that was asked for; else the seed of a record that is there counts.

        Raises:
            AlreadyExists: the id belongs to another request, or another router is at work on it.
        """
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
        try:
            await self._tools.committer.create(record)
        except AlreadyExists:
            held = await self._take_over(record, seeded)
            self._tools.metrics.resumed += 1
            return held
        return record

    async def _take_over(self, wanted: SessionRecord, seeded: bool) -> SessionRecord:
        # The tokens are a function of the record: they are generated again, and committed where they are new. Where
        # they are not, the session begins with those that the record holds.
        held = await self._store.load(wanted.session_id)
        if held is not None:
            same = replace(held, token_ids=(), finished=False, salt=wanted.salt, epoch=1, owner=wanted.owner)
            if same != (wanted if seeded else replace(wanted, seed=held.seed)):
                raise AlreadyExists(f"request {wanted.session_id} exists and is a different one")
        try:
            held = await self._store.acquire(wanted.session_id, wanted.owner, self._tools.config.lease_seconds)
        except LeaseLost as error:
            raise AlreadyExists(f"request {wanted.session_id} is being served by another router: {error}") from None
        self._tools.committer.adopt(held)
        return held

    async def leave(self, record: SessionRecord, *, finished: bool) -> None:
        """A session that was not finished may be taken up again by whoever gets its request."""
        if finished:
            self._tools.committer.forget(record.session_id)
            return
        with suppress(GraftreeError):
            await self._tools.committer.release(record.session_id)
