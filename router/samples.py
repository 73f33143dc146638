"""`Samples`: the sessions of one request, one for each sample of its prompt.

Sample 0 opens first; the others open on its verifier while they can, and there take the prompt's KV rows from it.
From then on each is a session like any other: its own trees, commits, failovers and end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from graftree.observe.tracing import Span
from graftree.store.sessions import SessionRecord
from graftree.v1.generation_pb2 import GenerateResponse, Usage
from router.events import EventLog
from router.records import Records
from router.request import GenerationPlan
from router.session import Session
from router.tools import Tools


class Samples:
    """All of them succeed, or the first error is the request's.

    Args:
        plan: the request's.
        seeded: whether the request names its seed.
        events: where the events of all samples go.
        arrived_ns: when the request came, by `Tools.clock_ns`.
        after: tokens of each sample that the client has; empty = it may be a new request.
        admit: asked where the client has nothing and there is no record: the request is a new one.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        records: Records,
        tools: Tools,
        events: EventLog,
        arrived_ns: int,
        *,
        seeded: bool,
        after: Sequence[int] = (),
        admit: Callable[[], None] | None = None,
    ) -> None:
        self._plan = plan
        self._records = records
        self._tools = tools
        self._events = events
        self._arrived_ns = arrived_ns
        self._seeded = seeded
        self._after = after
        self._admit = None if any(after) else admit  # what was taken in once is finished
        self._sessions: list[Session] = []
        self._spans: list[Span] = []
        self._unfinished = plan.samples
        self._completion_tokens = 0

    async def run(self) -> None:
        """Generate to the end.

        Raises:
            GraftreeError: a sample cannot go on.
        """
        held: list[SessionRecord] = []
        try:
            await self._begin(held)
            await self._generate(held)
        finally:
            for record in held:
                await self._records.leave(record, finished=not self._unfinished)

    def close(self) -> None:
        """Forget all sessions on every pod, at once."""
        for session in self._sessions:
            session.close()

    async def _begin(self, held: list[SessionRecord]) -> None:
        """Fill `held` with the samples' records; the first one says which seed is in force."""
        after: Sequence[int | None] = [*self._after] or [None] * self._plan.samples
        begun = self._records.begin(self._plan, seeded=self._seeded, after=after[0], admit=self._admit)
        held.append(await begun)
        self._plan = replace(self._plan, sampling=replace(self._plan.sampling, seed=held[0].seed))
        for sample in range(1, self._plan.samples):
            plan = self._plan.sample(sample)
            held.append(await self._records.begin(plan, sample=sample, seeded=True, after=after[sample]))
        remembered = self._plan.remembered or [()] * self._plan.samples
        pairs = zip(held, remembered, strict=True)
        self._events.begin([max(len(record.token_ids), len(known)) for record, known in pairs])

    async def _generate(self, held: list[SessionRecord]) -> None:
        for sample, record in enumerate(held):
            span = self._tools.tracer.start("session", parent=self._plan.traceparent, sample=sample)
            self._spans.append(span)
            self._sessions.append(
                Session(
                    replace(self._plan.sample(sample), traceparent=span.traceparent),
                    record,
                    self._tools,
                    self._events,
                    self._arrived_ns,
                    sample=sample,
                    sibling=self._sessions[0] if sample else None,
                )
            )
        served = zip(self._sessions, self._spans, strict=True)
        tasks = [asyncio.create_task(self._serve(session, span)) for session, span in served]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, session: Session, span: Span) -> None:
        try:
            finished = await session.run()
        except BaseException as error:
            span.end(error)
            raise
        figures = finished.speculation
        span.set(
            completion_tokens=finished.usage.completion_tokens,
            steps=figures.num_spec_steps,
            draft_tokens=figures.num_draft_tokens,
            accepted_tokens=figures.num_accepted_tokens,
        )
        span.end()
        self._unfinished -= 1
        self._completion_tokens += finished.usage.completion_tokens
        if not self._unfinished:
            prompt_tokens = finished.usage.prompt_tokens
            total = Usage(prompt_tokens=prompt_tokens, completion_tokens=self._completion_tokens)
            finished.total_usage.CopyFrom(total)
        self._events.append(GenerateResponse(finished=finished))
