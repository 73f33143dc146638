"""`Engine`: the verifier without its thread and its network. One call of `iterate` is one forward.

    open, step, close  ->  Scheduler.plan  ->  forward  ->  accept  ->  compact  ->  verdicts

Nothing here raises because of what a router sent or what a model did: the session concerned fails, the others and
the streams go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import structlog

from graftree.errors import (
    AlreadyExists,
    ContextTooLong,
    GraftreeError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from graftree.grammar import Grammars
from graftree.models.blocks import BlockPool
from graftree.models.paged import PagedKV
from graftree.models.runner import Rows
from graftree.models.spec import ModelSpec
from graftree.observe.tracing import NO_TRACER, Tracer
from graftree.rpc.status import to_failure
from graftree.step_time import Sample, StepTime
from graftree.text.tokenizer import Tokenizer
from graftree.v1 import common_pb2, verification_pb2
from verifier_service.conclusion import conclude
from verifier_service.counters import Counters
from verifier_service.gathering import Gathering
from verifier_service.kv_exchange import Exchange, Remote
from verifier_service.picker import Picker, Picks
from verifier_service.reservation import Cache, Reservations
from verifier_service.scheduler import Scheduler
from verifier_service.session import Answer, Session, Share, Step, Stream
from verifier_service.spans import Spans
from verifier_service.step_times import StepTimes

log = structlog.get_logger(__name__)

Clock = Callable[[], int]


class Runner(Protocol):
    """What the engine needs of `graftree.models.runner.TreeRunner`."""

    @property
    def pool(self) -> BlockPool: ...
    @property
    def kv(self) -> Cache: ...
    @property
    def spec(self) -> ModelSpec: ...
    def forward(self, batch: Sequence[Rows]) -> Sequence[Any]: ...


class Engine:
    """Sessions of all streams over one runner. Not thread-safe: `verifier_service.worker` owns it."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_sessions: int,
        step_tokens: int,
        prefix_cache: bool = True,
        kv_reserve: float = 1.0,
        grammars: Grammars | None = None,
        step_times: StepTimes | None = None,
        remote: Remote | None = None,
        tracer: Tracer = NO_TRACER,
        sample_on_device: bool = False,
        clock: Clock = time.monotonic_ns,
    ) -> None:
        """
        Args:
            runner: the LLM.
            max_sessions: sessions open at once.
            step_tokens: most rows of one forward.
            prefix_cache: whether sessions find the rows of texts that others began with.
            kv_reserve: share of what a session may still generate that KV blocks are reserved for when it opens.
            grammars: for structured output; None = the model's own vocabulary, loaded on first use.
            step_times: follows what forwards take; None = nothing was measured.
            remote: where KV blocks of closed sessions and other verifiers are; None = nowhere.
            tracer: of sessions and steps.
            sample_on_device: choose tokens as on a GPU (`verifier_service.picker`) where the model is on a CPU too.
            clock: monotonic nanoseconds.
        """
        self.counters = Counters()
        self.step_times = step_times or StepTimes(None)
        self.sessions = 0
        self.draining = False
        self._runner, self._spec = runner, runner.spec
        self._grammars = grammars or Grammars(partial(Tokenizer.load, runner.spec.name))
        self._max_sessions, self._step_tokens, self._clock = max_sessions, step_tokens, clock
        self._scheduler = Scheduler(step_tokens)
        self._reservations = Reservations(
            runner.pool,
            runner.kv,
            fingerprint=self._spec.fingerprint,
            reuse=prefix_cache,
            reserve=kv_reserve,
            counters=self.counters,
        )
        self.exchange = None if remote is None else self._exchange(remote)
        self._picker = Picker(self._spec, everywhere=sample_on_device)
        self._spans = Spans(tracer)
        self._answers: dict[Stream, list[Answer]] = {}
        self._gathering = Gathering()
        self._joining: dict[Session, None] = {}  # sessions that wait for another's rows

    def open(self, stream: Stream, message: verification_pb2.VerifyOpen) -> None:
        """Open a session; its prefill begins with the next forward."""
        if stream.closed:
            return
        if session := stream.sessions.get(message.session_id):
            # A failure ends the id on this pod, so the session that had it cannot stay.
            self._fail(session, AlreadyExists("the session was open on this stream; it is closed now"))
            return
        try:
            self._admit(stream, message)
        except GraftreeError as error:
            self._refuse(stream, message.session_id, error)

    def step(self, stream: Stream, message: verification_pb2.VerifyStep, arrived_ns: int) -> None:
        """Queue a verify step, or answer that it is stale."""
        if stream.closed:
            return
        session = stream.sessions.get(message.session_id)
        if session is None:
            self._refuse(stream, message.session_id, NotFound("no such session on this stream"))
        elif session.step is not None:
            self._fail(session, InvalidArgument("step", message.step, f"after the verdict on {session.step.number}"))
        elif session.is_stale(message):
            self.counters.stale_steps += 1
            self._answer(
                stream,
                verification_pb2.Verdict(
                    session_id=session.session_id,
                    step=message.step,
                    stale=True,
                    timings=common_pb2.StageTimings(total_ns=self._clock() - arrived_ns),
                ),
            )
        elif len(session.token_ids) >= session.max_length:
            limit = f"fewer than max_length {session.max_length}: one token must fit behind"
            self._fail(session, ContextTooLong("committed_length", len(session.token_ids), limit))
        else:
            session.queue(message, vocab_size=self._spec.vocab_size, max_rows=self._step_tokens, now_ns=arrived_ns)
            self._gathering.returned(session, arrived_ns)
            if session.step is not None and session.step.tree_error:
                self.counters.invalid_trees += 1

    def close(self, stream: Stream, session_id: str) -> None:
        """Forget a session; one that is not there was closed already."""
        if session := stream.sessions.get(session_id):
            self.counters.sessions_closed += 1
            self.counters.dropped_steps += session.step is not None
            self._drop(session)

    def close_stream(self, stream: Stream) -> None:
        """Forget a stream and all its sessions; nothing is answered any more."""
        stream.closed = True
        for session_id in list(stream.sessions):
            self.close(stream, session_id)
        self._answers.pop(stream, None)

    def drain(self) -> None:
        """Take no new sessions."""
        self.draining = True

    def iterate(self) -> bool:
        """Run one forward.

        Returns:
            Whether there was anything to run.
        """
        for session in self._reservations.resume():
            self._seek(session)
        for session in list(self._joining):
            if session.can_join:
                self._join(session)
        planned = self._scheduler.plan()
        shares = self._reservations.fit(planned, self._park)
        if not shares:
            return bool(planned)
        self._gathering.began()
        span = self._spans.step(shares)
        started, context = self._clock(), sum(share.session.cached for share in shares)
        try:
            outputs = self._runner.forward([share.rows() for share in shares])
            picked = self._picker.pick(shares, outputs)
        except Exception as error:
            log.exception("forward failed", sessions=len(shares), rows=sum(map(len, shares)))
            for share in shares:
                self._fail(share.session, GraftreeError(f"the model's forward failed: {type(error).__name__}"))
            span.end(error)
            return True
        forwarded = self._clock()
        self.counters.forwards += 1
        self.counters.forward_ns += forwarded - started
        for share, logits, picks in zip(shares, outputs, picked, strict=True):
            session = share.session
            session.cached += share.chain
            self.counters.rows += len(share)
            self.counters.prefill_rows += share.chain - (share.step is not None)
            if share.step is None:
                self._publish(session)
                continue
            try:
                verdict = self._conclude(share, share.step, logits, picks, started, forwarded)
            except Exception as error:
                if not isinstance(error, GraftreeError):
                    log.exception("acceptance failed")
                    error = GraftreeError(f"acceptance failed: {type(error).__name__}")
                self._fail(session, error)
            else:
                self._publish(session)
                verdict.batch_sessions = len(shares)
                self._answer(session.stream, verdict)
                self._gathering.answered(session, self._clock())
        span.end()
        ended = self._clock()
        if all(share.step is not None and share.chain == 1 for share in shares):
            self._gathering.ran(ended - started)
        if ended > started:
            rows = sum(map(len, shares))
            self.step_times.observe(Sample(rows, len(shares), context, (ended - started) / 1e9))
        return True

    def patience_ns(self) -> int:
        """How long the next forward should still wait for sessions that the last one answered; 0 = not at all."""
        return self._gathering.wait(self._scheduler.ready, self._clock())

    def flush(self) -> None:
        """Hand what was answered since the last call to the streams' sinks."""
        answers, self._answers = self._answers, {}
        for stream, messages in answers.items():
            stream.sink(messages)

    @property
    def news(self) -> tuple[int, int, bool, StepTime | None]:
        """What routers are told and decide by: sessions, free blocks, draining, step time."""
        return self.sessions, self._runner.pool.free_blocks, self.draining, self.step_times.latest

    @property
    def scheduler(self) -> Scheduler:
        """To be read only."""
        return self._scheduler

    def load(self) -> common_pb2.PodLoad:
        """Figures for routers; may be read from any thread."""
        pool = self._runner.pool
        return common_pb2.PodLoad(
            sessions=self.sessions,
            max_sessions=self._max_sessions,
            free_blocks=pool.free_blocks,
            total_blocks=pool.num_blocks,
            queued=self._scheduler.waiting,
            draining=self.draining,
        )

    def check(self) -> None:
        """Integrity of the KV pool while no session is open; a leak is logged, and shows in `load`."""
        pool = self._runner.pool
        try:
            pool.check()
            if not self.sessions and pool.free_blocks != pool.num_blocks:
                raise GraftreeError(f"{pool.num_blocks - pool.free_blocks} KV blocks leaked")
        except GraftreeError as error:
            self.counters.pool_faults += 1
            log.error("KV pool integrity", reason=str(error))

    def _admit(self, stream: Stream, message: verification_pb2.VerifyOpen) -> None:
        if self.draining:
            raise Unavailable("this verifier is draining")
        if self.sessions >= self._max_sessions:
            raise ResourceExhausted(f"{self.sessions} sessions open, at most {self._max_sessions}")
        session = Session.open(message, stream, self._spec, self._grammars)
        self._reservations.take(session, self._park)
        self._spans.opened(session, message.traceparent)
        if source := stream.sessions.get(message.prefix_of):
            session.wait_for(source)
            self._joining[session] = None
        else:
            self._seek(session)
        stream.sessions[session.session_id] = session
        self._scheduler.add(session)
        self.sessions += 1
        self.counters.sessions_opened += 1

    def _exchange(self, remote: Remote) -> Exchange:
        kv = self._runner.kv
        assert isinstance(kv, PagedKV), "there is nothing to exchange"
        return Exchange(remote, kv, self._runner.pool, self._reservations, self.counters)

    def _seek(self, session: Session) -> None:
        if self.exchange is not None:
            self.exchange.seek(session)

    def _publish(self, session: Session) -> None:
        self._reservations.publish(session)
        if self.exchange is not None:
            self.exchange.offer(session)

    def _join(self, session: Session) -> None:
        """Take what there is of the rows that `session` waits for; from here on it is one like any other."""
        source, session.source = session.source, None
        assert source is not None, "it waits for one"
        del self._joining[session]
        self._reservations.join(session, source, min(source.cached, session.shared))

    def _park(self, session: Session) -> None:
        """Preempt: the session goes on where it was once there is room again."""
        self._leave_siblings(session)
        self._reservations.park(session)

    def _leave_siblings(self, session: Session) -> None:
        """The session's rows are about to go: it waits for nobody's, and who waits for them takes what there is."""
        self._joining.pop(session, None)
        session.source = None
        for waiting in [other for other in self._joining if other.source is session]:
            self._join(waiting)

    def _conclude(
        self, share: Share, step: Step, logits: Any, picks: Picks, started: int, forwarded: int
    ) -> verification_pb2.Verdict:
        begun = self._clock()
        verdict = conclude(share, step, logits, self._runner.kv, picks)
        self.counters.count_step(len(step.tree), len(verdict.accepted_nodes))
        now = self._clock()
        verdict.timings.CopyFrom(
            common_pb2.StageTimings(
                queue_ns=started - step.arrived_ns,
                forward_ns=forwarded - started,
                sample_ns=now - begun,
                total_ns=now - step.arrived_ns,
            )
        )
        return verdict

    def _answer(self, stream: Stream, message: Answer) -> None:
        self._answers.setdefault(stream, []).append(message)

    def _refuse(self, stream: Stream, session_id: str, error: GraftreeError) -> None:
        self.counters.refused += 1
        self._answer(stream, to_failure(session_id, error))

    def _fail(self, session: Session, error: GraftreeError) -> None:
        self.counters.sessions_failed += 1
        self._drop(session)
        self._answer(session.stream, to_failure(session.session_id, error))

    def _drop(self, session: Session) -> None:
        del session.stream.sessions[session.session_id]
        self._scheduler.remove(session)
        self._gathering.gone(session)
        self._leave_siblings(session)
        self._reservations.release(session)
        session.load = None
        self._spans.closed(session)
        self.sessions -= 1
