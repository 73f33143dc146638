"""`MergedTree`: one session's guesses from all its speculators, merged by content address.

The union depends on what arrived, never on the order in which it did, so the same deltas give the same tree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graftree.codec import check_proposals
from graftree.errors import InvalidTree
from graftree.proposals import MAX_PER_NODE
from graftree.tree import TokenTree, node_id
from graftree.v1.common_pb2 import Proposals
from graftree.v1.speculation_pb2 import TreeDelta
from graftree.v1.verification_pb2 import VerifyStep


@dataclass(slots=True)
class Node:
    """A guessed token. The root is a `Node` too: the last committed token, with no guesses on it.

    Attributes:
        depth: levels below the first root of the tree's life; re-rooting does not change it.
        children: token -> node.
        log_probs: speculator -> its log probability of this token given the path.
        proposals: speculator -> its salt, and what it drew the node's children from. They stay as long as the node,
            whatever became of the children: dropping draws by their values would leave others than q says.
    """

    identifier: int
    token_id: int
    depth: int
    children: dict[int, Node] = field(default_factory=dict)
    log_probs: dict[str, float] = field(default_factory=dict)
    proposals: dict[str, tuple[int, Proposals]] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """How right one speculator has been lately: acceptances it promised against acceptances it got.

    A node is tested when the LLM's pick at its parent is known. `predicted` sums the probabilities of tested
    nodes, `accepted` counts those that were right; both fade, so the record follows the text. The weight is
    their ratio, pulled towards 1 by `PRIOR` observations.
    """

    predicted: float = 0.0
    accepted: float = 0.0

    PRIOR = 2.0
    FADE = 0.95
    RANGE = (0.01, 4.0)

    def observe(self, predicted: float, accepted: bool) -> None:
        self.predicted += predicted
        self.accepted += accepted

    def fade(self) -> None:
        self.predicted *= self.FADE
        self.accepted *= self.FADE

    def weight(self) -> float:
        """Factor that calibrates this speculator's probabilities."""
        low, high = self.RANGE
        return min(max((self.accepted + self.PRIOR) / (self.predicted + self.PRIOR), low), high)


class MergedTree:
    """Living union of the speculators' trees below the session's root.

    Args:
        root_id: content address of the last committed token.
        vocab_size: token ids at or above it are garbage.
        max_nodes: most live nodes one speculator may have here.
        max_depth: deepest level below the root.
        tests_draws: whether the verifier needs what children were drawn from; if not, it must not come.
    """

    def __init__(
        self, root_id: int, *, vocab_size: int, max_nodes: int, max_depth: int, tests_draws: bool = False
    ) -> None:
        self._root = Node(root_id, -1, 0)
        self._nodes: dict[int, Node] = {root_id: self._root}
        self._counts: dict[str, int] = {}
        self._records: dict[str, Record] = {}
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._tests_draws = tests_draws
        self.stale_nodes = 0

    def __len__(self) -> int:
        return len(self._nodes) - 1

    @property
    def root_id(self) -> int:
        return self._root.identifier

    @property
    def weights(self) -> dict[str, float]:
        """Calibration factor of each speculator seen so far."""
        return {speculator: record.weight() for speculator, record in self._records.items()}

    def add(self, speculator: str, delta: TreeDelta, *, salt: int = 0) -> int:
        """Merge what one speculator sent; nodes with an unknown parent are stale: dropped and counted.

        Args:
            speculator: name of the opening the delta belongs to.
            salt: of its draws.

        Returns:
            Number of nodes that found their place.

        Raises:
            InvalidTree: the delta breaks an invariant; nothing of it was merged.
        """
        self._validate(delta)
        staged: dict[int, int] = {}  # id -> depth, of nodes this delta brings
        placed: list[tuple[int, int, float]] = []
        mine = 0
        for parent_id, token, log_prob in zip(delta.parent_ids, delta.token_ids, delta.log_probs, strict=True):
            parent = self._nodes.get(parent_id)
            depth = (parent.depth if parent is not None else staged.get(parent_id, -1)) + 1
            if depth == 0:
                continue
            if depth - self._root.depth > self._max_depth:
                raise InvalidTree("delta.parent_ids", depth - self._root.depth, f"at most {self._max_depth} deep")
            known = parent.children.get(token) if parent is not None else None
            if known is None:
                identifier = node_id(parent_id, token)
                if identifier in self._nodes or identifier in staged:
                    raise InvalidTree("delta.token_ids", token, "siblings carry different tokens")
                staged[identifier] = depth
            if known is None or speculator not in known.log_probs:
                mine += 1
            placed.append((parent_id, token, log_prob))
        if (count := self._counts.get(speculator, 0) + mine) > self._max_nodes:
            raise InvalidTree("delta.token_ids", count, f"at most {self._max_nodes} nodes")
        self._counts[speculator] = count
        self._records.setdefault(speculator, Record())
        for parent_id, token, log_prob in placed:
            self._place(speculator, self._nodes[parent_id], token, log_prob)
        for entry in delta.proposals:
            node = self._nodes.get(entry.node_id)
            # The first word counts: a second list of one speculator would repeat its draws.
            if node is not None and speculator not in node.proposals and len(node.proposals) < MAX_PER_NODE:
                node.proposals[speculator] = salt, entry.proposals
        self.stale_nodes += len(delta.token_ids) - len(placed)
        return len(placed)

    def _validate(self, delta: TreeDelta) -> None:
        count = len(delta.token_ids)
        for name in ("parent_ids", "log_probs"):
            if len(getattr(delta, name)) != count:
                raise InvalidTree(f"delta.{name}", len(getattr(delta, name)), f"one entry per node, {count}")
        if count > self._max_nodes:
            raise InvalidTree("delta.token_ids", count, f"at most {self._max_nodes} nodes")
        for token, log_prob in zip(delta.token_ids, delta.log_probs, strict=True):
            if token >= self._vocab_size:
                raise InvalidTree("delta.token_ids", token, f"0 <= token < {self._vocab_size}")
            if not math.isfinite(log_prob) or log_prob > 1e-6:
                raise InvalidTree("delta.log_probs", log_prob, "finite and <= 0")
        if len(set(zip(delta.parent_ids, delta.token_ids, strict=True))) != count:
            raise InvalidTree("delta.token_ids", count, "siblings carry different tokens")
        most = self._max_nodes + 1 if self._tests_draws else 0
        if len(delta.proposals) > most:
            raise InvalidTree("delta.proposals", len(delta.proposals), f"at most {most} in this mode")
        for entry in delta.proposals:
            check_proposals(entry.proposals, vocab_size=self._vocab_size)

    def _place(self, speculator: str, parent: Node, token: int, log_prob: float) -> None:
        node = parent.children.get(token)
        if node is None:
            node = Node(node_id(parent.identifier, token), token, parent.depth + 1)
            parent.children[token] = node
            self._nodes[node.identifier] = node
        # A speculator that says it twice is taken at its best word: the maximum knows no order.
        node.log_probs[speculator] = max(log_prob, node.log_probs.get(speculator, -math.inf))

    def reroot(self, token_ids: Sequence[int]) -> None:
        """Follow committed tokens: the branch they name survives, the rest goes; off the tree it restarts.

        What the speculators said at each step of the way is held against the LLM's pick there.
        """
        node = self._root
        for token in token_ids:
            self._observe(node, token)
            child = node.children.get(token)
            node = child or Node(node_id(node.identifier, token), token, node.depth + 1)
        node.log_probs = {}
        self._root = node
        self._nodes = {}
        self._counts = {}
        for survivor in _below(node):
            self._nodes[survivor.identifier] = survivor
            for speculator in survivor.log_probs:
                self._counts[speculator] = self._counts.get(speculator, 0) + 1

    def _observe(self, node: Node, picked: int) -> None:
        if not node.children:
            return
        for record in self._records.values():
            record.fade()
        for token, child in sorted(node.children.items()):
            for speculator, log_prob in child.log_probs.items():
                self._records[speculator].observe(math.exp(min(log_prob, 0.0)), token == picked)

    def cut(self, budget: int, max_depth: int) -> TokenTree:
        """The `budget` nodes most likely to be reached, at most `max_depth` deep.

        A node's survival probability is the product, down its path, of the chance that each token is the LLM's
        pick given that its parent was reached: 1 - prod over speculators of (1 - weight * p), their guesses taken
        as independent evidence. So ancestors score at least as high and the kept set is connected. Ties go to the
        shallower node, then to the smaller path; the order is canonical.

        Returns:
            Tree with log_probs = the combined conditional log probabilities.
        """
        weights = self.weights
        token_ids: list[int] = []
        parents: list[int] = []
        log_probs: list[float] = []
        # Paths are unique, so a comparison never gets as far as the nodes.
        heap: list[tuple[float, int, tuple[int, ...], float, Node, int]] = []
        frontier, parent, survival = self._root, -1, 1.0
        path: tuple[int, ...] = ()
        while len(token_ids) < budget:
            if len(path) < max_depth:
                for token, child in frontier.children.items():
                    conditional = _combine(child.log_probs, weights)
                    entry = (-survival * conditional, len(path) + 1, (*path, token), conditional, child, parent)
                    heapq.heappush(heap, entry)
            if not heap:
                break
            negative, _, path, conditional, frontier, above = heapq.heappop(heap)
            survival, parent = -negative, len(token_ids)
            token_ids.append(frontier.token_id)
            parents.append(above)
            log_probs.append(math.log(max(conditional, 1e-300)))
        return TokenTree(self._root.identifier, tuple(token_ids), tuple(parents), tuple(log_probs))

    def proposals(self, tree: TokenTree) -> list[VerifyStep.NodeProposals]:
        """All that was proposed at the root and the nodes of a tree just cut, a node's in canonical order."""
        if not self._tests_draws:
            return []
        nodes = [self._root]
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            nodes.append(nodes[parent + 1].children[token])
        return [
            VerifyStep.NodeProposals(node=index - 1, salt=salt, proposals=proposals)
            for index, node in enumerate(nodes)
            for _, (salt, proposals) in sorted(node.proposals.items())
        ]


def _combine(log_probs: dict[str, float], weights: dict[str, float]) -> float:
    miss = 1.0
    for speculator in sorted(log_probs) if len(log_probs) > 1 else log_probs:
        miss *= 1.0 - min(1.0, weights[speculator] * math.exp(min(log_probs[speculator], 0.0)))
    return 1.0 - miss


def _below(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
