"""`Growth`: a session's tree together with the engine's bookkeeping of it."""

from __future__ import annotations

from collections.abc import Sequence

from graftree.calibration import Calibration
from graftree.codec import proposals_to_proto
from graftree.v1.common_pb2 import Proposals
from speculator_service.drafters.base import Candidate, Leaf
from speculator_service.events import Commit, Grown, Open
from speculator_service.living_tree import Node


class Growth:
    """One session while it is drafted.

    Attributes:
        arrived_ns: when the open or the last commit came; queue_ns: from then to the first step, -1 before it;
            forward_ns: in the drafter since the last event.
        announced: that the tree is complete has been said.
        pauses: times in a row that the drafter was not ready.
        branching: most children of a node.
        paused: nothing is drafted and nothing said until a commit clears it.

    Args:
        opened: the session.
        prior: what other sessions have learnt about the drafter's chances.
    """

    __slots__ = (
        "_drawing",
        "_proposed",
        "announced",
        "arrived_ns",
        "branching",
        "forward_ns",
        "paused",
        "pauses",
        "queue_ns",
        "session_id",
        "tree",
    )

    def __init__(self, opened: Open, prior: Calibration | None = None) -> None:
        self.session_id, self.tree = opened.session.session_id, opened.tree
        self._drawing = opened.drawing
        self._proposed: list[tuple[Node, Proposals]] = []
        self.branching = opened.session.branching if opened.drawing is None else opened.drawing.count
        self.pauses = 0
        self.paused = False
        if prior is not None:
            self.tree.calibrate(prior)
        self.restart_clock(opened.arrived_ns)

    def restart_clock(self, arrived_ns: int) -> None:
        self.arrived_ns, self.queue_ns, self.forward_ns, self.announced = arrived_ns, -1, 0, False

    @property
    def growing(self) -> bool:
        """There is something to draft."""
        return not self.paused and not self.tree.complete

    def commit(self, commit: Commit) -> None:
        """Follow committed tokens."""
        self.tree.commit(commit.token_ids, commit.budget)
        self.paused = commit.paused
        self.restart_clock(commit.arrived_ns)

    def leaf(self, node: Node) -> Leaf:
        parent = node if node.parent is None else node.parent
        return Leaf(self.session_id, node.id, parent.id, self.tree.path(node), node.position + 1)

    def attach(self, node: Node, candidates: Sequence[Candidate]) -> None:
        """Give a leaf its children: the best candidates, or draws from them."""
        if self._drawing is not None and node.alive:
            candidates, q = self._drawing.children(node, candidates)
            if q is not None:
                self._proposed.append((node, proposals_to_proto(q, self._drawing.count)))
        self.tree.attach(node, candidates[: self.branching])

    def event(self, now_ns: int) -> Grown | None:
        """What is new since the last event, if anything is. While paused it waits."""
        if self.paused:
            return None
        nodes, complete = self.tree.unsent(), self.tree.complete
        proposed, self._proposed = [entry for entry in self._proposed if entry[0].alive], []
        if not nodes and not proposed and (self.announced or not complete):
            return None
        self.announced = complete
        forward_ns, self.forward_ns = self.forward_ns, 0
        return Grown(
            session_id=self.session_id,
            nodes=nodes,
            committed_length=self.tree.committed_length,
            complete=complete,
            proposed=proposed,
            queue_ns=max(0, self.queue_ns),
            forward_ns=forward_ns,
            total_ns=max(0, now_ns - self.arrived_ns),
        )
