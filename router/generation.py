"""`Generation`: one request id, the session that serves it and the streams that read it.

It does not depend on the stream that started it: another stream with the same id and request joins and reads from
the first event. When the last one leaves before the end, nobody wants the answer: it is cancelled everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import structlog

from graftree.errors import AlreadyExists, Cancelled, GraftreeError, LeaseLost
from graftree.grammar import Grammars
from graftree.store.sessions import SessionRecord, SessionStore
from graftree.text.tokenizer import Tokenizer
from graftree.v1.generation_pb2 import GenerateRequest
from router import request as requests
from router.events import EventLog
from router.request import GenerationPlan
from router.session import Session, Tools

# Texts above this are tokenized on a thread: shorter ones take less than the switch costs other sessions.
LONG_TEXT = 16_384

log = structlog.get_logger(__name__)


class Generation:
    """Runs as a task of its own from `start` on.

    Args:
        message: checked already (`router.request.check`).
        over: called once, when nothing will follow.
        after: tasks of earlier generations under this id, which still hold its record.
    """

    def __init__(
        self,
        identifier: str,
        message: GenerateRequest,
        *,
        tokenizer: Tokenizer,
        grammars: Grammars,
        store: SessionStore,
        tools: Tools,
        over: Callable[[Generation], None],
        after: Sequence[asyncio.Task[None]] = (),
    ) -> None:
        self.identifier = identifier
        self.digest = requests.digest(message)
        self.events = EventLog()
        self.finished = False
        self._message = message
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._store = store
        self._tools = tools
        self._over = over
        self._after = after
        self._readers = 0
        self._session: Session | None = None
        self._arrived_ns = tools.clock_ns()
        self.task = asyncio.create_task(self._run(), name=f"generation {identifier}")

    @contextmanager
    def reading(self) -> Iterator[EventLog]:
        """A stream's stay. The last one to leave an unfinished generation cancels it."""
        self._readers += 1
        try:
            yield self.events
        finally:
            self._readers -= 1
            if not self._readers and not self.events.ended:
                self._tools.metrics.cancelled += 1
                self.cancel(Cancelled("the client left"))

    def cancel(self, error: GraftreeError) -> None:
        """Stop now; the pods learn it at once."""
        if self._session is not None:
            self._session.close()
        self.task.cancel()
        self._end(error)

    async def _run(self) -> None:
        try:
            if self._after:
                await asyncio.wait(self._after)
            plan = await self._plan()
            plan, record = await self._begin(plan)
            try:
                self._session = Session(plan, record, self._tools, self.events, self._arrived_ns)
                await self._session.run()
                self.finished = True
            finally:
                await self._leave(record)
        except GraftreeError as error:
            self._end(error)
        except Exception as error:
            log.exception("session failed", session=self.identifier)
            self._end(GraftreeError(f"the session failed: {type(error).__name__}"))
        else:
            self._end(None)

    def _end(self, error: GraftreeError | None) -> None:
        if not self.events.ended:
            self.events.end(error)
            self._over(self)

    async def _plan(self) -> GenerationPlan:
        message, pods = self._message, self._tools.pods
        if message.HasField("structured_output"):
            await asyncio.to_thread(self._grammars.compile, message.structured_output)
        if not pods.limits.vocab_size:
            await pods.some_verifier()  # the first one says what the limits are
        if len(message.prompt) > LONG_TEXT or message.HasField("chat"):
            prompt = await asyncio.to_thread(requests.tokenize, message, self._tokenizer)
        else:
            prompt = requests.tokenize(message, self._tokenizer)
        plan = requests.plan(
            message,
            prompt,
            identifier=self.identifier,
            eos_token_ids=self._tokenizer.eos_token_ids,
            limits=pods.limits,
            config=self._tools.config,
            source=self._tools.random,
        )
        if plan.structured_output is not None:
            self._grammars.ends(plan.stops.stop_token_ids)
        return plan

    async def _begin(self, plan: GenerationPlan) -> tuple[GenerationPlan, SessionRecord]:
        """Create the session's record, or take over the one that an earlier life of this request left.

        Raises:
            AlreadyExists: the id belongs to another request, or another router is at work on it.
        """
        record = SessionRecord(
            session_id=plan.request_id,
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
            held = await self._take_over(record)
            self._tools.metrics.resumed += 1
            return replace(plan, sampling=replace(plan.sampling, seed=held.seed)), held
        return plan, record

    async def _take_over(self, wanted: SessionRecord) -> SessionRecord:
        # The tokens are a function of the record: they are generated again, and committed where they are new.
        held = await self._store.load(wanted.session_id)
        if held is not None:
            same = replace(held, token_ids=(), finished=False, salt=wanted.salt, epoch=1, owner=wanted.owner)
            seeded = self._message.sampling.HasField("seed")
            if same != (wanted if seeded else replace(wanted, seed=held.seed)):
                raise AlreadyExists(f"request {wanted.session_id} exists and is a different one")
        try:
            held = await self._store.acquire(wanted.session_id, wanted.owner, self._tools.config.lease_seconds)
        except LeaseLost as error:
            raise AlreadyExists(f"request {wanted.session_id} is being served by another router: {error}") from None
        self._tools.committer.adopt(held)
        return held

    async def _leave(self, record: SessionRecord) -> None:
        """A session that was not finished may be taken up again by whoever gets its request."""
        if self.finished:
            self._tools.committer.forget(record.session_id)
            return
        with suppress(GraftreeError):
            await self._tools.committer.release(record.session_id)
