"""`Drafts`: one session's speculators and the tree they grow together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count

import structlog

from graftree.noise import mix64
from graftree.tree import MAX_TREE_DEPTH, MAX_TREE_NODES, TokenTree, root_id
from graftree.v1.speculation_pb2 import TreeDelta
from graftree.v1.verification_pb2 import Verdict, VerifyStep
from router.cut import Cut
from router.links import SpeculatorLink
from router.merge import MergedTree
from router.metrics import Metrics, Outcome
from router.patience import Wait
from router.pods import Pods
from router.priors import Priors
from router.request import GenerationPlan
from router.speculator_seat import SpeculatorSeat
from router.steering import Steering
from router.verifier_seat import VerifierSeat

# A living tree is allowed more than one step verifies, so that it outlives a commit.
LIVING_FACTOR = 2
BALANCE_SECONDS = 2.0  # between looks whether another pod of the same kind has much less to do
UNEVEN = 0.25  # of a pod's sessions, and two at least: less is not worth sending a whole text again
MAX_TRIES = 3  # openings of one session on one pod that keeps failing it: each sends the whole text

log = structlog.get_logger(__name__)


class Drafts:
    """Speculators come and go; the tree is what they said of the text as it is now.

    Args:
        token_ids: prompt and output; the session's own list, which it extends before `reroot`.
        salt: start of the node id chain.
        wire_ids: names for openings, each used once.
        steering: decides who drafts, how long steps wait, how large their trees are.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        token_ids: Sequence[int],
        *,
        pods: Pods,
        salt: int,
        vocab_size: int,
        wire_ids: Iterator[str],
        steering: Steering,
        priors: Priors,
        metrics: Metrics,
    ) -> None:
        self._plan = plan
        self._token_ids = token_ids
        self._pods = pods
        self._salt = salt
        self._vocab_size = vocab_size
        self._wire_ids = wire_ids
        self._steering = steering
        self._metrics = metrics
        self._max_nodes = min(LIVING_FACTOR * plan.max_nodes, MAX_TREE_NODES)
        self._max_depth = min(LIVING_FACTOR * plan.max_depth, MAX_TREE_DEPTH)
        self._seats: dict[str, SpeculatorSeat] = {}
        self._next: dict[str, SpeculatorSeat] = {}  # by kind: on another pod, the seat from its first word on
        self._looked_at = steering.clock()
        self._tries: dict[str, int] = {}
        self._draft_salts = (mix64(salt ^ mix64(number)) for number in count(1))
        self._seen = -1  # version of the set of pods that the seats were chosen from
        self._news = asyncio.Event()
        self._waited = 0.0
        self._waited_for: frozenset[str] = frozenset()
        self.tree = MergedTree(
            root_id(salt, token_ids) if plan.max_nodes else 0,
            vocab_size=vocab_size,
            max_nodes=2 * self._max_nodes,  # with those that better ones displaced
            max_depth=self._max_depth,
            tests_draws=plan.tests_draws,
            record=steering.record,
            agreement=priors.agreement,
        )

    def __len__(self) -> int:
        """Speculators now."""
        return sum(seat.error is None for seat in self._seats.values())

    @property
    def silence(self) -> Outcome:
        """What a round sent now is if it has no tree."""
        if not self._plan.max_nodes:
            return Outcome.PLAIN
        if not len(self):
            return Outcome.ALONE
        working = self._working()
        if not working:
            return Outcome.PLAIN
        return Outcome.EMPTY if all(seat.answered for seat in working) else Outcome.LATE

    # Speculators.

    def seat(self) -> None:
        """Let go of speculators that gave up, take in those that are new, move to pods that have less to do.

        Costs nothing while nothing changed.
        """
        if not self._plan.max_nodes:
            return
        lost = [(kind, seat) for kind, seat in self._seats.items() if seat.error is not None]
        for kind, seat in lost:
            del self._seats[kind]
            if (other := self._next.pop(kind, None)) is not None:
                self._seats[kind] = other
            self._metrics.lost_speculators += 1
            self._tries[seat.pod_id] = self._tries.get(seat.pod_id, 0) + 1
            log.debug("speculator lost", pod=seat.pod_id, reason=str(seat.error))
        now = self._steering.clock()
        if not lost and self._seen == self._pods.version and now < self._looked_at + BALANCE_SECONDS:
            return
        self._seen, self._looked_at = self._pods.version, now
        self._give_up_moves()
        hopeless = {pod_id for pod_id, tries in self._tries.items() if tries >= MAX_TRIES}
        for kind, link in self._pods.speculators(len(self._token_ids), hopeless).items():
            held = self._seats.get(kind)
            if held is None:
                self._steering.seated(kind)
            if not self._steering.active(kind):
                continue
            if held is None:
                self._seats[kind] = self._take_seat(link)
            elif kind not in self._next and _is_better(link, held.link):
                held.moves(away=True)
                self._next[kind] = self._take_seat(link)
        for kind, _ in lost:
            if kind not in self._seats:
                self._steering.unseated(kind)

    def _take_seat(self, link: SpeculatorLink) -> SpeculatorSeat:
        return SpeculatorSeat(
            link,
            self._plan,
            self._token_ids,
            wire_id=next(self._wire_ids),
            salt=self._salt,
            draft_salt=next(self._draft_salts),
            vocab_size=self._vocab_size,
            max_nodes=self._max_nodes,
            max_depth=self._max_depth,
            sink=self._merge,
            gone=self._news.set,
            clock=self._steering.clock,
        )

    def _give_up_moves(self) -> None:
        """To pods that refused."""
        for kind, seat in list(self._next.items()):
            if seat.error is not None:
                del self._next[kind]
                self._tries[seat.pod_id] = self._tries.get(seat.pod_id, 0) + 1
                self._seats[kind].moves(away=False)

    def _move(self, seat: SpeculatorSeat) -> None:
        """It has begun to draft: the seat before it is no longer needed."""
        self._next.pop(seat.kind)
        self._seats[seat.kind].close()
        self._seats[seat.kind] = seat
        self._metrics.moved_speculators += 1

    def commit(self, token_ids: Sequence[int]) -> None:
        """Tell the speculators what was committed, and which of them are to draft."""
        if not self._seats:
            return
        self._steering.committed(self.tree)
        living_nodes = self._steering.living_nodes
        for kind, seat in (*self._seats.items(), *self._next.items()):
            if seat.error is None:
                seat.commit(token_ids, living_nodes=living_nodes, paused=not self._steering.active(kind))

    def close(self) -> None:
        """No more steps, no more drafts."""
        self._steering.close()
        for seat in (*self._seats.values(), *self._next.values()):
            seat.close()

    def _working(self) -> list[SpeculatorSeat]:
        return [seat for seat in self._seats.values() if seat.error is None and self._steering.active(seat.kind)]

    def _merge(self, seat: SpeculatorSeat, delta: TreeDelta) -> None:
        if seat is self._next.get(seat.kind):
            self._move(seat)
        stale = self.tree.stale_nodes
        placed = self.tree.add(seat.name, delta, salt=seat.draft_salt)
        self._metrics.deltas += 1
        self._metrics.stale_nodes += self.tree.stale_nodes - stale
        if placed:
            self._steering.heard(seat.kind, self.tree)
        self._news.set()

    # A round.

    def reach(self, verifier: VerifierSeat) -> None:
        """Steps go there from now on."""
        self._steering.reach(verifier.link, verifier.wire_id)

    def answered(self, verdict: Verdict) -> None:
        """The verdict on the step that was sent is there."""
        if self._steering.answered(verdict):
            self._seen = -1  # a kind that is to draft again may need a seat

    def reroot(self, token_ids: Sequence[int]) -> None:
        """The tree follows committed tokens."""
        if self._plan.max_nodes:
            self.tree.reroot(token_ids)

    def worth_waiting(self) -> Wait | None:
        """The wait before the next step that pays, if one does."""
        if not self._seats:
            return None
        return self._steering.wait(self.tree, len(self._token_ids), self._working())

    async def wait(self, wait: Wait) -> None:
        """Wait for drafts: until there are enough, or those that tend to answer have nothing more to say."""
        clock, working = self._steering.clock, self._working()
        begun, before = clock(), len(self.tree)
        self._waited_for = frozenset(seat.kind for seat in self._steering.pending(working))
        self._metrics.draft_waits += 1
        try:
            async with asyncio.timeout(wait.seconds):
                while self.tree.outlook <= wait.tokens and self._steering.pending(working):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            for seat in self._steering.pending(working):
                if not seat.answered:
                    seat.missed(wait.seconds)
        self._waited = clock() - begun
        self._metrics.draft_wins += len(self.tree) > before

    def cut(self) -> Cut:
        """The next step's tree."""
        length = len(self._token_ids)
        room = self._plan.max_length - length - 1  # the bonus token needs a place too
        if not self._plan.max_nodes:
            return Cut(TokenTree(0))
        return self.tree.cut(
            self._steering.budget(length, self._waited), min(self._plan.max_depth, room), self._steering.shadows
        )

    def proposals(self, tree: TokenTree) -> list[VerifyStep.NodeProposals]:
        """What the nodes of a tree just cut were drawn from, where the verifier tests draws."""
        return self.tree.proposals(tree)

    def sent(self, cut: Cut) -> None:
        """The step left."""
        self._steering.sent(cut, len(self._token_ids), self._waited, self._waited_for)
        self._waited, self._waited_for = 0.0, frozenset()


def _is_better(link: SpeculatorLink, seat: SpeculatorLink) -> bool:
    """Whether a session should leave its seat for `link`.

    Every router evens out its own sessions: together they are even then, and no two correct the same gap.
    """
    if link is seat:
        return False
    gap = min(seat.staying - link.staying, seat.sessions - link.sessions)
    return seat.draining or gap >= max(2, UNEVEN * seat.staying)
