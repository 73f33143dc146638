"""`Generation`: one request id, the sessions that serve it and the streams that read it.

It does not depend on the stream that started it: another stream with the same id and request joins and reads from
the first event. When the last one leaves before the end, nobody wants the answer: it is cancelled everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import structlog

from graftree.errors import Cancelled, GraftreeError
from graftree.grammar import Grammars
from graftree.observe import logs
from graftree.text.tokenizer import Tokenizer
from graftree.v1.generation_pb2 import GenerateRequest
from router import request as requests
from router.caller import NOBODY, Caller, public_id
from router.difference import refuse_another
from router.events import EventLog
from router.records import Records
from router.request import GenerationPlan
from router.samples import Samples
from router.tools import Tools

# Texts above this are tokenized on a thread: shorter ones take less than the switch costs other sessions.
LONG_TEXT = 16_384

log = structlog.get_logger(__name__)


class Generation:
    """Runs as a task of its own from `start` on.

    Args:
        message: checked already (`router.request.check`).
        over: called once, when nothing will follow.
        caller: on whose behalf; `identifier` is in its scope.
        after: tasks of earlier generations under this id, which still hold its record.
        admit: called where a request that may be one to resume starts anew; raises ResourceExhausted.
    """

    def __init__(
        self,
        identifier: str,
        message: GenerateRequest,
        *,
        tokenizer: Tokenizer,
        grammars: Grammars,
        records: Records,
        tools: Tools,
        over: Callable[[Generation], None],
        caller: Caller = NOBODY,
        after: Sequence[asyncio.Task[None]] = (),
        admit: Callable[[], None] | None = None,
    ) -> None:
        self.identifier = identifier
        self.events = EventLog()
        self.finished = False
        self._message = message
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._records = records
        self._tools = tools
        self._over = over
        self._caller = caller
        self._after, self._admit = after, admit
        self._readers = 0
        self._samples: Samples | None = None
        self.arrived_ns = tools.clock_ns()
        self._span = tools.tracer.start(
            "generate", parent=caller.traceparent, kind="server", request_id=public_id(identifier)
        )
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

    def check_same(self, message: GenerateRequest) -> None:
        """Raises AlreadyExists where another request than this one comes under its id; names the field."""
        refuse_another(public_id(self.identifier), self._message, message)

    @property
    def waits(self) -> bool:
        """Whether it has no verifier so far."""
        return not len(self.events)

    def cancel(self, error: GraftreeError) -> None:
        """Stop now; the pods learn it at once."""
        if self._samples is not None:
            self._samples.close()
        self.task.cancel()
        self._end(error)

    async def _run(self) -> None:
        logs.bind(request_id=public_id(self.identifier), tenant=self._caller.tenant, trace_id=self._span.trace_id)
        try:
            if self._after:
                await asyncio.wait(self._after)
            plan = await self._plan()
            seeded = self._message.sampling.HasField("seed")
            self._samples = Samples(
                plan,
                self._records,
                self._tools,
                self.events,
                self.arrived_ns,
                seeded=seeded,
                after=self._message.resume_after,
                admit=self._admit,
            )
            await self._samples.run()
            self.finished = True
            log.debug("generation finished")
        except GraftreeError as error:
            log.debug("generation failed", reason=error.reason)
            self._end(error)
        except Exception as error:
            log.exception("session failed", session=self.identifier)
            self._end(GraftreeError(f"the session failed: {type(error).__name__}"))
        else:
            self._end(None)

    def _end(self, error: GraftreeError | None) -> None:
        if not self.events.ended:
            if error is not None:
                reason = "abort" if isinstance(error, Cancelled) else "error"
                self._tools.metrics.finish_reasons[reason] += 1
            self.events.end(error)
            self._span.end(error)
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
            limits=replace(pods.limits, token_count=self._tokenizer.token_count),
            config=self._tools.config,
            source=self._tools.random,
            bad_words=requests.bad_words(message, self._tokenizer),
        )
        if plan.structured_output is not None:
            self._grammars.ends(plan.stops.stop_token_ids)
        self._span.set(prompt_tokens=len(prompt), samples=plan.samples)
        return replace(plan, tenant=self._caller.tenant, traceparent=self._span.traceparent)
