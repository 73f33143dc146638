"""`Session`: one sample, from its record in Redis to its last token. The round loop is `run`.

    tree ──► verify step ──► verdict ──► stop conditions ──► re-root ──► next verify step
                                                                └─► speculators └─► Redis ──► client

The verifier decides every token, so losing it costs a recomputation elsewhere, at the same token; speculators
decide nothing. A token reaches the client behind its commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

import structlog

from graftree.errors import ContextTooLong, GraftreeError, NotFound, NoVerifier, ResourceExhausted, Stale, Unavailable
from graftree.store.sessions import SessionRecord
from graftree.tree import TokenTree
from graftree.v1 import generation_pb2 as pb
from graftree.v1.common_pb2 import TokenLogProb
from graftree.v1.verification_pb2 import Verdict
from router import log_probs as stored
from router import messages
from router.adaptive import AdaptiveSteering
from router.cut import Cut
from router.drafts import Drafts
from router.events import EventLog
from router.figures import Figures
from router.metrics import Outcome
from router.recollection import Recollection
from router.request import GenerationPlan
from router.steering import FixedSteering, Steering
from router.stops import Delivery, Finish, Stopper
from router.tools import Tools
from router.trail import Trail
from router.verifier_seat import VerifierSeat

MAX_TRIES = 8  # openings without a verdict in between
RETRY_SECONDS = (0.02, 1.0)

log = structlog.get_logger(__name__)


class Session:
    """One sample of one request.

    Args:
        plan: the sample's, with its own seed.
        events: where its events go.
        record: its record in Redis, as it was created or acquired.
        arrived_ns: when the request came, by `Tools.clock_ns`.
        sample: its index; sample 0 says that the request has started.
        sibling: another sample, whose verifier and prompt rows to share; opens before this one.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        record: SessionRecord,
        tools: Tools,
        events: EventLog,
        arrived_ns: int,
        *,
        sample: int = 0,
        sibling: Session | None = None,
    ) -> None:
        self._plan = plan
        self._record = record
        self._tools = tools
        self._events = events
        self._config = tools.config
        self._metrics = tools.metrics
        self._figures = Figures(tools.clock_ns, arrived_ns)
        self._token_ids = list(plan.prompt_token_ids)
        self._stopper = Stopper(plan.stops, tools.detokenizer(plan.prompt_token_ids))
        remembered = plan.remembered[sample] if plan.remembered else ()
        self._recollection = Recollection(remembered, plan.max_nodes, sample=sample)
        self._restored = self._restore()
        self._sample = sample
        self._sibling = sibling
        self._opened = asyncio.Event()
        self._wire_ids = _wire_ids(record)
        self._vocab_size = tools.pods.limits.vocab_size
        self._drafts = Drafts(
            plan,
            self._token_ids,
            pods=tools.pods,
            salt=record.salt,
            vocab_size=self._vocab_size,
            wire_ids=self._wire_ids,
            steering=_steering(plan, tools),
            priors=tools.priors,
            metrics=tools.metrics,
        )
        self._trail = Trail(
            record,
            tools.committer,
            self._figures,
            tools.metrics,
            tools.clock_ns,
            alternatives=plan.alternatives,
        )
        self._verifier: VerifierSeat | None = None
        self._tree = TokenTree(0)
        self._without = Outcome.PLAIN  # what a round is whose tree is empty
        self._prefills = True  # whether the step under way computes the text before the root too
        self._round_began_ns = 0
        self._tries = 0
        self._avoid: set[str] = set()

    async def run(self) -> pb.GenerationFinished:
        """Generate to the end.

        Returns:
            The last event, which is not sent yet.

        Raises:
            GraftreeError: it cannot go on.
        """
        try:
            if self._sibling is not None:
                await self._sibling._opened.wait()
            restored = self._restored
            if restored is None or restored.finish is None:
                await self._reach_verifier()
                self._drafts.seat()
                self._send_step(self._cut())
            if self._sample == 0:
                self._metrics.prompt_tokens += len(self._plan.prompt_token_ids)
                self._events.append(messages.started(self._plan, self._config.model))
            self._opened.set()
            if restored is not None:
                self._deliver(self._record.token_ids, self._restored_log_probs(), restored)
                if restored.finish is not None:
                    await self._end_record(restored)
                    return self._finished(restored.finish)
            while True:
                verdict = await self._verdict()
                delivery = self._stopper.take(verdict.token_ids)
                token_ids = list(verdict.token_ids[: delivery.count])
                self._count(verdict, delivery)
                length = self._length
                self._recollection.check(length, token_ids)
                log_probs = verdict.log_probs[: delivery.count]
                commit = self._trail.commit(length, token_ids, log_probs, finished=delivery.finish is not None)
                if delivery.finish is None:
                    await self._next_step(token_ids)
                else:
                    self.close()
                await self._trail.durable(commit)
                if delivery.finish is not None:
                    self._recollection.check_end(length + len(token_ids))
                self._deliver(verdict.token_ids, verdict.log_probs, delivery)
                if delivery.finish is not None:
                    return self._finished(delivery.finish)
        finally:
            self.close()

    def _restore(self) -> Delivery | None:
        """Begin with the record's tokens, as if they had just been verified; None = nothing to begin with."""
        tokens = self._record.token_ids
        if not tokens:
            return None
        delivery = self._stopper.take(tokens)
        self._recollection.check(0, tokens[: delivery.count])
        if self._record.finished and delivery.finish is None:  # by a router with another default length
            delivery = replace(delivery, finish=Finish(pb.FINISH_REASON_LENGTH))
        self._token_ids.extend(tokens[: delivery.count])
        self._figures.restore(delivery.count)
        return delivery

    def _restored_log_probs(self) -> Sequence[TokenLogProb]:
        if not self._plan.log_probs:
            return ()
        return stored.unpack(self._record.log_probs, self._record.token_ids, self._plan.alternatives)

    async def _end_record(self, restored: Delivery) -> None:
        """The router that committed the last token may not have come to say that it was the last."""
        if not self._record.finished and restored.count == len(self._record.token_ids):
            await self._trail.durable(self._trail.commit(restored.count, (), finished=True))

    def close(self) -> None:
        """Forget the session on every pod, at once."""
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = None
        self._drafts.close()

    # Verifying.

    async def _reach_verifier(self) -> None:
        sibling, self._sibling = self._sibling, None
        seat = sibling._verifier if sibling is not None else None
        if seat is not None and seat.open_to_others:
            link, prefix_of = seat.link, seat.wire_id
        else:
            link, prefix_of = await self._tools.pods.some_verifier(self._avoid), ""
        if link.hello.model_fingerprint != self._record.model_fingerprint:
            raise Unavailable("the verifiers serve another model than the one that began this generation")
        nodes = max(self._plan.max_nodes, self._recollection.rest(self._length))
        self._verifier = VerifierSeat(
            link,
            replace(self._plan, max_nodes=nodes),
            self._token_ids,
            wire_id=next(self._wire_ids),
            epoch=self._record.epoch,
            salt=self._record.salt,
            vocab_size=self._vocab_size,
            prefix_of=prefix_of,
        )
        self._drafts.reach(self._verifier)
        self._prefills = True

    @property
    def _length(self) -> int:
        """Tokens of the output that are there."""
        return len(self._token_ids) - len(self._plan.prompt_token_ids)

    def _cut(self) -> Cut:
        """The next step's tree: what the client remembers, then what the speculators say."""
        room = self._plan.max_length - len(self._token_ids) - 1  # the bonus token needs a place too
        return self._recollection.cut(self._drafts.tree.root_id, self._length, room) or self._drafts.cut()

    def _send_step(self, cut: Cut) -> None:
        assert self._verifier is not None, "a verifier was reached"
        tree = self._tree = cut.tree
        self._metrics.draft_tokens_demanded += self._plan.max_nodes
        if not len(tree):
            self._without = Outcome.FIRST if self._prefills else self._drafts.silence
        self._verifier.step(tree, len(self._token_ids), self._drafts.proposals(tree))
        self._drafts.sent(cut)

    async def _next_step(self, token_ids: Sequence[int]) -> None:
        """Re-root, send the next step, tell the speculators; in this order unless waiting for them pays."""
        self._token_ids.extend(token_ids)
        self._drafts.reroot(token_ids)
        self._figures.branch_hits += bool(len(self._drafts.tree))
        if not self._recollection.rest(self._length) and (wait := self._drafts.worth_waiting()):
            self._drafts.commit(token_ids)
            begun = self._tools.clock_ns()
            await self._drafts.wait(wait)
            self._figures.draft_wait_ns += self._tools.clock_ns() - begun
            self._send_step(self._cut())
        else:
            self._send_step(self._cut())
            self._drafts.commit(token_ids)
        self._drafts.seat()

    async def _verdict(self) -> Verdict:
        """The answer to the step under way, from whichever verifier gives it.

        Raises:
            NoVerifier: none came in time.
            GraftreeError: a verifier refused the session for good, or MAX_TRIES of them failed it.
        """
        while True:
            try:
                if self._verifier is None:
                    await self._reach_verifier()
                    self._send_step(self._cut())
                assert self._verifier is not None, "just reached"
                verdict = await self._verifier.verdict(self._config.step_timeout_seconds)
                if verdict.stale:
                    self._metrics.stale_steps += 1
                    raise Stale(f"{self._verifier.link.record.pod_id} disagrees about the committed length")
            except NoVerifier:
                raise
            except (Unavailable, NotFound, ResourceExhausted, Stale) as error:
                await self._lose_verifier(error)
            except ContextTooLong as error:
                if self._recollection.rest(self._length) <= self._plan.max_nodes:
                    raise
                self._recollection.narrow(self._plan.max_nodes)
                await self._lose_verifier(error)
            else:
                self._tries = 0
                self._avoid.clear()
                return verdict

    async def _lose_verifier(self, error: GraftreeError) -> None:
        """Give the verifier up and rest a little; raises `error` when it was the last try."""
        self._tries += 1
        if self._verifier is not None:
            log.info("verifier lost", pod=self._verifier.link.record.pod_id, reason=str(error), tries=self._tries)
            self._avoid.add(self._verifier.link.record.pod_id)
            self._verifier.close()
            self._verifier = None
            self._metrics.failovers += 1
        if self._tries >= MAX_TRIES:
            raise error
        if self._tries > 1 or isinstance(error, ResourceExhausted):
            pause = min(RETRY_SECONDS[1], RETRY_SECONDS[0] * 2 ** (self._tries - 1))
            await asyncio.sleep(pause * self._tools.random.uniform(0.5, 1.5))

    # Telling the client.

    def _finished(self, finish: Finish) -> pb.GenerationFinished:
        word = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
        self._metrics.finish_reasons[word] += 1
        self._metrics.length_share.observe(self._figures.completion_tokens / self._plan.stops.max_new_tokens)
        speculation = self._figures.speculation(
            stale_nodes=self._drafts.tree.stale_nodes, speculators=len(self._drafts)
        )
        return messages.finished(self._plan, finish, self._figures, speculation, self._sample)

    def _count(self, verdict: Verdict, delivery: Delivery) -> None:
        drafted = len(self._tree)
        if verdict.tree_error:
            self._metrics.refused_trees += 1
            log.warning("verifier refused a tree", session=self._record.session_id, reason=verdict.tree_error)
            drafted = 0
        self._drafts.answered(verdict)
        accepted = self._figures.step(verdict, drafted=drafted, delivered=delivery.count)
        now_ns = self._tools.clock_ns()
        self._metrics.count_round(
            drafted=drafted,
            accepted=accepted,
            delivered=delivery.count,
            without=self._without,
            seconds=None if self._prefills else (now_ns - self._round_began_ns) / 1e9,
        )
        self._prefills, self._round_began_ns = False, now_ns

    def _deliver(self, token_ids: Sequence[int], log_probs: Sequence[TokenLogProb], delivery: Delivery) -> None:
        chunk = pb.GenerationChunk(
            token_ids=token_ids[: delivery.count],
            text=delivery.text,
            log_probs=log_probs[: delivery.count],
            offset=self._figures.completion_tokens - delivery.count,
            index=self._sample,
        )
        self._events.append(pb.GenerateResponse(chunk=chunk), delivery.texts)
        figures, before_ns = self._figures, self._figures.last_ns
        figures.departed()
        self._metrics.tokens_left(
            delivery.count, arrived_ns=figures.arrived_ns, before_ns=before_ns, now_ns=figures.last_ns
        )


def _steering(plan: GenerationPlan, tools: Tools) -> Steering:
    config = tools.config
    longest, clock = config.draft_wait_ms / 1000, lambda: tools.clock_ns() / 1e9
    if config.adaptive:
        return AdaptiveSteering(tools.priors, tools.metrics, most=plan.max_nodes, longest_wait=longest, clock=clock)
    return FixedSteering(tools.priors, most=plan.max_nodes, longest_wait=longest, clock=clock)


def _wire_ids(record: SessionRecord) -> Iterator[str]:
    """A new name for every opening on any pod: what belongs to an earlier one is told apart by its name.

    Where a session begins anew under its first epoch, its salt is another.
    """
    for number in count(1):
        yield f"{record.session_id}.{record.epoch}.{record.salt % 2**32:x}.{number}"
