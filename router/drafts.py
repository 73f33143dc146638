"""`Drafts`: one session's speculators and the tree they grow together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import structlog

from graftree.noise import mix64
from graftree.tree import MAX_TREE_DEPTH, MAX_TREE_NODES, TokenTree, root_id
from graftree.v1.speculation_pb2 import TreeDelta
from graftree.v1.verification_pb2 import VerifyStep
from router.budget import FixedBudget
from router.merge import MergedTree
from router.metrics import Metrics, Outcome
from router.pods import Pods
from router.request import GenerationPlan
from router.speculator_seat import SpeculatorSeat

# A living tree is allowed more than one step verifies, so that it outlives a commit.
LIVING_FACTOR = 2
MAX_TRIES = 3  # openings of one session on one pod that keeps failing it: each sends the whole text

log = structlog.get_logger(__name__)


class Drafts:
    """Speculators come and go; the tree is what they said of the text as it is now.

    Args:
        token_ids: prompt and output; the session's own list, which it extends before `advance`.
        salt: start of the node id chain.
        wire_ids: names for openings, each used once.
        wait_seconds: longest `wait`.
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
        wait_seconds: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._token_ids = token_ids
        self._pods = pods
        self._salt = salt
        self._vocab_size = vocab_size
        self._wire_ids = wire_ids
        self._wait_seconds = wait_seconds
        self._metrics = metrics
        self._clock = clock
        self._max_nodes = min(LIVING_FACTOR * plan.max_nodes, MAX_TREE_NODES)
        self._max_depth = min(LIVING_FACTOR * plan.max_depth, MAX_TREE_DEPTH)
        self._seats: dict[str, SpeculatorSeat] = {}
        self._tries: dict[str, int] = {}
        self._draft_salts = (mix64(salt ^ mix64(number)) for number in count(1))
        self._seen = -1  # version of the set of pods that the seats were chosen from
        self._news = asyncio.Event()
        self.tree = MergedTree(
            root_id(salt, token_ids) if plan.max_nodes else 0,
            vocab_size=vocab_size,
            max_nodes=2 * self._max_nodes,  # with those that better ones displaced
            max_depth=self._max_depth,
            tests_draws=plan.tests_draws,
        )

    def __len__(self) -> int:
        """Speculators now."""
        return sum(seat.error is None for seat in self._seats.values())

    def seat(self) -> None:
        """Let go of speculators that gave up, take in those that are new. Costs nothing while nothing changed."""
        if not self._plan.max_nodes:
            return
        lost = [(kind, seat) for kind, seat in self._seats.items() if seat.error is not None]
        for kind, seat in lost:
            del self._seats[kind]
            self._metrics.lost_speculators += 1
            self._tries[seat.pod_id] = self._tries.get(seat.pod_id, 0) + 1
            log.debug("speculator lost", pod=seat.pod_id, reason=str(seat.error))
        if not lost and self._seen == self._pods.version:
            return
        self._seen = self._pods.version
        hopeless = {pod_id for pod_id, tries in self._tries.items() if tries >= MAX_TRIES}
        for kind, link in self._pods.speculators(len(self._token_ids), hopeless).items():
            if kind not in self._seats:
                self._seats[kind] = SpeculatorSeat(
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
                    clock=self._clock,
                )

    @property
    def silence(self) -> Outcome:
        """What a round sent now is if it has no tree."""
        if not self._plan.max_nodes:
            return Outcome.PLAIN
        seats = [seat for seat in self._seats.values() if seat.error is None]
        if not seats:
            return Outcome.ALONE
        return Outcome.EMPTY if all(seat.answered for seat in seats) else Outcome.LATE

    def cut(self) -> TokenTree:
        """The next step's tree."""
        room = self._plan.max_length - len(self._token_ids) - 1  # the bonus token needs a place too
        return self.tree.cut(FixedBudget(self._plan.max_nodes), min(self._plan.max_depth, room)).tree

    def proposals(self, tree: TokenTree) -> list[VerifyStep.NodeProposals]:
        """What the nodes of a tree just cut were drawn from, where the verifier tests draws."""
        return self.tree.proposals(tree)

    def reroot(self, token_ids: Sequence[int]) -> None:
        """The tree follows committed tokens."""
        if self._plan.max_nodes:
            self.tree.reroot(token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Tell the speculators what was committed."""
        for seat in self._seats.values():
            if seat.error is None:
                seat.commit(token_ids)

    def worth_waiting(self) -> bool:
        """The tree is empty, and some speculator tends to answer a commit within the wait."""
        return bool(self._seats) and not len(self.tree) and bool(self._prompt_ones())

    async def wait(self) -> None:
        """Wait for a first delta: until the tree has a node, or those that tend to answer have nothing to say."""
        self._metrics.draft_waits += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                while not len(self.tree) and any(not seat.answered for seat in self._prompt_ones()):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            for seat in self._prompt_ones():
                if not seat.answered:
                    seat.missed(self._wait_seconds)
        self._metrics.draft_wins += bool(len(self.tree))

    def close(self) -> None:
        for seat in self._seats.values():
            seat.close()

    def _prompt_ones(self) -> list[SpeculatorSeat]:
        return [
            seat
            for seat in self._seats.values()
            if seat.error is None and seat.latency is not None and seat.latency < self._wait_seconds
        ]

    def _merge(self, seat: SpeculatorSeat, delta: TreeDelta) -> None:
        stale = self.tree.stale_nodes
        self.tree.add(seat.name, delta, salt=seat.draft_salt)
        self._metrics.deltas += 1
        self._metrics.stale_nodes += self.tree.stale_nodes - stale
        self._news.set()
