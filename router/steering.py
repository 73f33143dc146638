"""`Steering`: what one session decides about speculation, and what it learns from its rounds.

    which speculators draft            `router.roster`
    how long the step waits for them   `router.patience`
    how many nodes the step verifies   `router.budget`

None of it changes a token: it says which nodes are verified, the verifier says what follows. `FixedSteering` decides
by configuration alone, `router.adaptive` by evidence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from graftree.v1.verification_pb2 import Verdict
from router.budget import FixedBudget
from router.cut import Cut, Taker
from router.links import VerifierLink
from router.merge import MergedTree
from router.pace import Rounds, Sent
from router.patience import Wait
from router.priors import Priors
from router.record import Record
from router.speculator_seat import SpeculatorSeat

NO_KINDS: frozenset[str] = frozenset()


class Steering(ABC):
    """`reach` comes first, then, round by round: wait, budget, sent, answered, committed.

    Args:
        most: nodes of a step at most; 0 = plain decoding.
        longest_wait: for drafts, in seconds.
        clock: monotonic seconds.
    """

    def __init__(self, priors: Priors, *, most: int, longest_wait: float, clock: Callable[[], float]) -> None:
        self.most, self.longest_wait, self.clock = most, longest_wait, clock
        self._priors = priors
        self._records: dict[str, Record] = {}
        self._link: VerifierLink | None = None
        self._rounds: Rounds | None = None

    def record(self, kind: str) -> Record:
        """The session's record of a kind of speculator."""
        if kind not in self._records:
            self._records[kind] = self._priors.record(kind)
        return self._records[kind]

    def reach(self, link: VerifierLink, wire_id: str) -> None:
        """The session's steps go there from now on."""
        self.close()
        self._link, self._rounds = link, Rounds(link.pace, wire_id)

    def close(self) -> None:
        """There will be no more steps."""
        if self._rounds is not None:
            self._rounds.close()

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of speculators at work."""
        return NO_KINDS

    @property
    def shadows(self) -> frozenset[str]:
        """Of these, the ones whose nodes are not to be verified: they are only compared with what the LLM says."""
        return NO_KINDS

    @property
    def living_nodes(self) -> int:
        """Nodes that living trees should grow to; 0 = as many as they were opened for."""
        return 0

    def active(self, kind: str) -> bool:
        """Whether a kind of speculator is to draft."""
        return True

    def seated(self, kind: str) -> None:  # noqa: B027
        """A speculator of this kind has the session."""

    def unseated(self, kind: str) -> None:  # noqa: B027
        """No speculator of this kind has it any more."""

    def heard(self, kind: str, tree: MergedTree) -> None:  # noqa: B027
        """Nodes of one were merged."""

    def committed(self, tree: MergedTree) -> None:  # noqa: B027
        """The speculators are told of a commit, which the tree has followed."""

    @abstractmethod
    def wait(self, tree: MergedTree, length: int, seats: Collection[SpeculatorSeat]) -> Wait | None:
        """How long the next step should wait for drafts; None = not at all.

        Args:
            length: committed tokens.
            seats: the speculators at work.
        """

    @abstractmethod
    def pending(self, seats: Collection[SpeculatorSeat]) -> list[SpeculatorSeat]:
        """Of these, the ones worth waiting for; none that has failed."""

    @abstractmethod
    def budget(self, length: int, waited: float) -> Taker:
        """Of the next step's tree.

        Args:
            length: committed tokens.
            waited: seconds that the step has been kept waiting for drafts.
        """

    def sent(self, cut: Cut, length: int, waited: float, waited_for: Collection[str] = ()) -> None:
        """The step leaves.

        Args:
            waited_for: kinds that it was kept waiting for.
        """
        if self._rounds is not None:
            tokens = 1.0 + cut.expected
            self._rounds.sent(Sent(self.clock(), self.kinds, 1 + len(cut.tree), tokens, length, waited))

    def answered(self, verdict: Verdict) -> bool:
        """The verdict is there.

        Returns:
            Whether `kinds` has changed.
        """
        if self._rounds is not None and self._link is not None:
            self._rounds.answered(verdict, self._link.step_time, len(verdict.token_ids))
        return False


class FixedSteering(Steering):
    """As many nodes as there are, every speculator, and a wait whenever a step would have no tree."""

    def wait(self, tree: MergedTree, length: int, seats: Collection[SpeculatorSeat]) -> Wait | None:
        """As `Steering.wait`: the longest one for an empty tree, if some speculator tends to answer within it."""
        prompt = not len(tree) and self._prompt(seats)
        return Wait(self.longest_wait, 0.0) if prompt else None

    def pending(self, seats: Collection[SpeculatorSeat]) -> list[SpeculatorSeat]:
        """As `Steering.pending`: those that tend to answer, and have not."""
        return [seat for seat in self._prompt(seats) if not seat.answered and seat.error is None]

    def budget(self, length: int, waited: float) -> FixedBudget:
        """As `Steering.budget`."""
        return FixedBudget(self.most)

    def _prompt(self, seats: Collection[SpeculatorSeat]) -> list[SpeculatorSeat]:
        return [seat for seat in seats if seat.latency is not None and seat.latency < self.longest_wait]
