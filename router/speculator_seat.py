"""`SpeculatorSeat`: one session's place on one speculator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graftree.errors import GraftreeError
from graftree.v1.speculation_pb2 import DraftCommit, DraftOpen, TreeDelta
from router.links import SpeculatorLink
from router.request import GenerationPlan

MEMORY = 0.7  # of the latency average

Sink = Callable[["SpeculatorSeat", TreeDelta], None]


class SpeculatorSeat:
    """Sends commits, hands deltas on, and knows how soon after a commit the first delta tends to come.

    Args:
        wire_id: the session's id on this link.
        draft_salt: key of the speculator's draws, no other opening's of the session.
        token_ids: prompt and output so far.
        max_nodes, max_depth: bounds of the living tree.
        sink: called with every delta; raises InvalidTree for one that breaks an invariant.
        gone: called once it has failed.
        clock: monotonic seconds.

    Attributes:
        kind: of the speculator.
        paused: it does not draft.
        complete: nothing more comes before the next commit.
        latency: average seconds from a commit to the first delta grown from it; None = not seen yet.
        answered: a delta has come since the last commit.
        error: why the speculator gave the session up, once it has.
    """

    def __init__(
        self,
        link: SpeculatorLink,
        plan: GenerationPlan,
        token_ids: Sequence[int],
        *,
        wire_id: str,
        salt: int,
        draft_salt: int,
        vocab_size: int,
        max_nodes: int,
        max_depth: int,
        sink: Sink,
        gone: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.link = link
        self.draft_salt = draft_salt
        self.latency: float | None = None
        self.answered = self.complete = self.paused = False
        self.error: GraftreeError | None = None
        self._wire_id = wire_id
        self._max_nodes = max_nodes
        self._length = len(token_ids)
        self._sink, self._gone = sink, gone
        self._clock = clock
        self._held: list[int] = []  # committed while it is paused, and not told
        self._committed_at: float | None = None  # an open's first delta says nothing about a commit's
        link.join(
            self,
            DraftOpen(
                session_id=wire_id,
                salt=salt,
                token_ids=token_ids,
                prompt_tokens=len(plan.prompt_token_ids),
                sampling=plan.sampling.to_proto(),
                max_nodes=max_nodes,
                max_depth=max_depth,
                vocab_size=vocab_size,
                max_length=plan.max_length,
                mode=plan.rule.to_proto(),
                draft_salt=draft_salt,
                structured_output=plan.structured_output,
                stop_token_ids=sorted(plan.stops.stop_token_ids) if plan.structured_output is not None else (),
                traceparent=plan.traceparent,
                tenant=plan.tenant,
            ),
        )

    @property
    def pod_id(self) -> str:
        return self.link.record.pod_id

    @property
    def kind(self) -> str:
        return self.link.record.kind

    @property
    def name(self) -> str:
        """Of this opening: what another one says must not be taken for this one's."""
        return f"{self.kind}/{self._wire_id}"

    def commit(self, token_ids: Sequence[int], *, living_nodes: int = 0, paused: bool = False) -> None:
        """Tell the speculator what was committed; while it is paused, only once it is not.

        Args:
            living_nodes: what its tree is to grow to; 0 = as far as it was opened for.
            paused: it is to draft nothing from now on.
        """
        self._held.extend(token_ids)
        self.answered = self.complete = paused
        if paused and self.paused:
            return
        self.paused = paused
        told, self._held = self._held, []
        commit = DraftCommit(session_id=self._wire_id, token_ids=told, committed_length=self._length, paused=paused)
        commit.budget_nodes = min(living_nodes, self._max_nodes)
        self.link.commit(commit)
        self._length += len(told)
        self._committed_at = self._clock()

    def moves(self, *, away: bool) -> None:
        """The session is on its way to another pod of this kind, or no longer."""
        self.link.moves(self._wire_id, away=away)

    def missed(self, waited: float) -> None:
        """Nothing came within `waited` seconds of a commit."""
        self._learn(2 * waited)

    def close(self) -> None:
        self.answered = self.complete = True  # nothing is to be waited for
        self.link.leave(self._wire_id)

    # What the link calls.

    def failed(self, error: GraftreeError) -> None:
        self.error = error
        self._gone()

    def drafted(self, delta: TreeDelta) -> None:
        current = delta.committed_length == self._length and not self.paused
        self.complete = self.complete or (current and delta.complete)
        if current and not self.answered:
            self.answered = True
            if self._committed_at is not None:
                seconds = self._clock() - self._committed_at
                self.link.metrics.draft_seconds.observe(seconds)
                self._learn(seconds)
        self._sink(self, delta)

    def _learn(self, seconds: float) -> None:
        self.latency = seconds if self.latency is None else MEMORY * self.latency + (1 - MEMORY) * seconds
