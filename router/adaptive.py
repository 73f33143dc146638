"""`AdaptiveSteering`: a session's decisions on speculation, by what its rounds have shown so far."""

from __future__ import annotations

from collections.abc import Callable, Collection

from graftree.tree import TokenTree
from graftree.v1.verification_pb2 import Verdict
from router.budget import Budget
from router.cut import Cut
from router.ema import Mean
from router.merge import MergedTree
from router.metrics import Metrics
from router.pace import Costs, Rounds
from router.patience import Patience, Wait
from router.priors import Priors
from router.record import Trust
from router.roster import Roster
from router.speculator_seat import SpeculatorSeat
from router.steering import Steering

MESSAGE_SECONDS = 0.0002  # of the router's own time that a speculator's messages take in a round
# Living trees are this many times as large as the step's usually are, so that they outlive a commit.
LIVING_FACTOR = 3
LEAST_LIVING = 32


class AdaptiveSteering(Steering):
    """As `Steering`.

    Attributes:
        roster: which speculators are at work.
    """

    def __init__(
        self, priors: Priors, metrics: Metrics, *, most: int, longest_wait: float, clock: Callable[[], float]
    ) -> None:
        super().__init__(priors, most=most, longest_wait=longest_wait, clock=clock)
        self._metrics = metrics
        self.roster = Roster(self._unseen)
        self._patience = Patience(longest_wait, priors.races)
        self._trust = Trust()
        self._nodes = Mean(0.2, most)
        self._costs: Costs | None = None
        self._budget: Budget | None = None
        self._cut = Cut(TokenTree(0))
        self._brought: dict[str, tuple[float, int]] = {}
        self._scores: dict[str, float] = {}

    # Speculators.

    @property
    def kinds(self) -> frozenset[str]:
        """As `Steering.kinds`."""
        return self.roster.kinds

    @property
    def living_nodes(self) -> int:
        """As `Steering.living_nodes`."""
        return max(LEAST_LIVING, round(LIVING_FACTOR * self._nodes.value))

    @property
    def shadows(self) -> frozenset[str]:
        """As `Steering.shadows`."""
        return self.roster.shadows

    def active(self, kind: str) -> bool:
        """As `Steering.active`."""
        return self.roster.active(kind)

    def seated(self, kind: str) -> None:
        """As `Steering.seated`."""
        self.roster.add(kind)

    def unseated(self, kind: str) -> None:
        """As `Steering.unseated`."""
        self.roster.remove(kind)

    def heard(self, kind: str, tree: MergedTree) -> None:
        """As `Steering.heard`."""
        self.roster.heard(kind)
        self._patience.heard(kind, self.clock(), tree.outlook)

    def committed(self, tree: MergedTree) -> None:
        """As `Steering.committed`."""
        kinds = self.kinds - self.roster.trials
        self._patience.committed(self.clock(), kinds, empty=not len(tree))

    # A round.

    def wait(self, tree: MergedTree, length: int, seats: Collection[SpeculatorSeat]) -> Wait | None:
        """As `Steering.wait`: for first drafts that are worth more than the time."""
        kinds = self.kinds - self.roster.trials  # a commit wakes them all; those on trial are not waited for
        if len(tree) or not any(seat.kind in kinds for seat in seats):
            return None
        rounds, costs = self._next_costs(length)
        own = max(1.0 / (costs.overhead + costs.step(0)), rounds.rate)
        return self._patience.wait(
            kinds,
            rate=own * max(1.0, rounds.sequences.value),  # the verifier gathers its sessions: all wait
            trust=self._trust.ratio,
            row=costs.step(1) - costs.step(0),
        )

    def pending(self, seats: Collection[SpeculatorSeat]) -> list[SpeculatorSeat]:
        """As `Steering.pending`: whose trees still grow."""
        trials = self.roster.trials
        return [seat for seat in seats if not seat.complete and seat.error is None and seat.kind not in trials]

    def budget(self, length: int, waited: float) -> Budget:
        """As `Steering.budget`: as many as give the most tokens per second."""
        _, costs = self._next_costs(length)
        self._costs = costs
        self._budget = Budget(
            self.most,
            costs.table,
            rows=costs.rows,
            seconds=(costs.overhead + waited) / costs.stretch,
            tokens=costs.tokens,
            trust=self._trust.ratio,
        )
        return self._budget

    def sent(self, cut: Cut, length: int, waited: float, waited_for: Collection[str] = ()) -> None:
        """As `Steering.sent`."""
        super().sent(cut, length, waited, waited_for)
        self._cut, self._brought = cut, cut.brought()
        self._scores = self._judge(cut, waited, waited_for)
        budget = self._budget
        if budget is not None and budget.count:
            self._nodes.observe(budget.nodes)
            self._metrics.offered_nodes += budget.count
            self._metrics.cut_rounds += self._cut_by_load(budget)
            self._metrics.budget = self._nodes.value

    def answered(self, verdict: Verdict) -> bool:
        """As `Steering.answered`."""
        super().answered(verdict)
        accepted = () if verdict.tree_error else verdict.accepted_nodes
        self._trust.observe(self._cut.expected, len(accepted))
        if not len(self.roster):
            return False
        brought, taken = self._brought, self._cut.taken(accepted)
        for kind in self.kinds:
            self.record(kind).trust.observe(brought.get(kind, (0.0, 0))[0], taken.get(kind, 0))
        roster, before = self.roster, self.kinds
        dropped, readmitted = roster.dropped, roster.readmitted
        changed = roster.round(self._scores)
        self._metrics.dropped_speculators += roster.dropped - dropped
        self._metrics.readmitted_speculators += roster.readmitted - readmitted
        for kind in self.kinds - before:
            if kind in roster.trials:
                self.record(kind).renew()
        return changed

    def _judge(self, cut: Cut, waited: float, waited_for: Collection[str]) -> dict[str, float]:
        """Net tokens that each kind at work brings by this step: what only it proposed, less what its time costs."""
        kinds, costs, rounds = self.kinds, self._costs, self._rounds
        if not kinds or costs is None or rounds is None:
            return {}
        nodes, trust = len(cut.tree), self._trust.ratio
        step = costs.step(nodes)
        seconds = costs.overhead + waited + step
        expected = trust * cut.expected
        rate, own_rate = (costs.tokens + expected) / seconds, (1.0 + expected) / seconds
        scores = {}
        for kind in kinds:
            tokens, rows = self._brought.get(kind, (0.0, 0))
            spared = step - costs.step(nodes - rows)
            if costs.alone:
                spared += rounds.contention(kinds, kind) / costs.stretch * step
            kept = MESSAGE_SECONDS + (waited / len(waited_for) if kind in waited_for else 0.0)
            scores[kind] = self.record(kind).trust.ratio * tokens - rate * spared - own_rate * kept
        return scores

    def _cut_by_load(self, budget: Budget) -> bool:
        """Whether the first node left out would have been taken if the session had the verifier to itself."""
        costs, nodes = self._costs, budget.nodes
        if costs is None or costs.alone or not budget.left:
            return False
        seconds = costs.table.seconds
        rate = (1.0 + self._trust.ratio * self._cut.expected) / (costs.overhead + seconds[1 + nodes])
        return budget.left > rate * (seconds[2 + nodes] - seconds[1 + nodes])

    def _next_costs(self, length: int) -> tuple[Rounds, Costs]:
        assert self._rounds is not None, "reach() comes first"
        assert self._link is not None
        return self._rounds, self._rounds.costs(self._link.step_time, length, self.kinds)

    def _unseen(self, kinds: frozenset[str]) -> int:
        return self._rounds.unseen(kinds) if self._rounds is not None else 0
