"""`LivingTree`: one session's draft tree, grown all the time and re-rooted at every commit.

Growth is best first by path probability, the order of EAGLE-2 (arXiv 2406.16858) and OPT-Tree (arXiv
2406.17276): the optimum tree of N nodes holds the N most probable paths, and a child is never more probable than
its parent. Nodes leave as deltas while the tree still grows, so a node that entered stays; a candidate less
probable than a fair share of the budget therefore waits outside until nothing better is left to expand.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import count

from graftree.tree import node_id
from speculator_service.drafters.base import Candidate

# One step expands a session's best leaf, and with it those at least 1/8 as probable: a peaked tree grows as a
# chain, a flat one in layers.
_STEP_SPREAD = math.log(8.0)


class Node:
    """A node of a living tree.

    Attributes:
        id: content address, `graftree.tree.node_id`.
        token_id: draft token; -1 for the first root, whose token nobody asks for.
        log_prob: natural log probability of the token given its path.
        parent: None for the root.
        position: absolute index of the token in the sequence (0 = first prompt token).
        score: sum of log probabilities from an ancestor that all nodes of the tree share.
        children: by token id.
        expanded: its children have been drafted.
        alive: still below the root; a commit clears it.
    """

    __slots__ = ("alive", "children", "expanded", "id", "log_prob", "parent", "position", "score", "token_id")

    def __init__(self, id: int, token_id: int, log_prob: float, parent: Node | None, position: int) -> None:
        self.id, self.token_id, self.log_prob, self.parent, self.position = id, token_id, log_prob, parent, position
        self.score: float = log_prob + (parent.score if parent is not None else 0.0)
        self.children: dict[int, Node] = {}
        self.expanded = False
        self.alive = True


class LivingTree:
    """The draft tree of one session.

    Args:
        root_id: content address of the last committed token.
        committed_length: tokens committed so far, the root included.
        max_nodes: most nodes below the root.
        max_depth: deepest level; a child of the root has depth 1.
        max_position: no token is drafted for a position at or beyond this.
        vocab_size: ids at or above this are never drafted.
    """

    def __init__(
        self,
        root_id: int,
        committed_length: int,
        *,
        max_nodes: int,
        max_depth: int,
        max_position: int,
        vocab_size: int,
    ) -> None:
        self.max_nodes, self.max_depth = max_nodes, max_depth
        self.max_position, self.vocab_size = max_position, vocab_size
        self._floor = -math.log(max_nodes)
        self._order = count()  # ties go to the node that came first, so the same inputs give the same tree
        self._restart(Node(root_id, -1, 0.0, None, committed_length - 1))

    def _restart(self, root: Node) -> None:
        self.root = root
        self._nodes: list[Node] = []
        self._unsent: list[Node] = []
        self._leaves: list[tuple[float, int, Node]] = []
        self._waiting: list[tuple[float, int, Node, int, float]] = []
        self._push_leaf(root)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def committed_length(self) -> int:
        """Tokens committed so far, the root included."""
        return self.root.position + 1

    @property
    def complete(self) -> bool:
        """Nothing more comes before the next commit."""
        return len(self._nodes) >= self.max_nodes or not (self._leaves or self._waiting)

    @property
    def best(self) -> float:
        """Path log probability of the best node to expand next; -inf when complete."""
        if self.complete:
            return -math.inf
        return -(self._leaves[0][0] if self._leaves else self._waiting[0][0]) - self.root.score

    def nodes(self) -> Sequence[Node]:
        """The nodes below the root, parents before children."""
        return self._nodes

    def path(self, node: Node) -> tuple[int, ...]:
        """Tokens from the root's child down to `node`; () for the root."""
        tokens: list[int] = []
        while node is not self.root:
            assert node.parent is not None
            tokens.append(node.token_id)
            node = node.parent
        return tuple(reversed(tokens))

    def take(self, limit: int) -> list[Node]:
        """Up to `limit` best leaves to expand now. Each must come back through `attach` or `put_back`."""
        if self.complete or limit < 1:
            return []
        if not self._leaves:
            self._admit(-self._waiting[0][0] - _STEP_SPREAD)
        taken: list[Node] = []
        while self._leaves and len(taken) < limit:
            score, _, node = self._leaves[0]
            if taken and -score < taken[0].score - _STEP_SPREAD:
                break
            heapq.heappop(self._leaves)
            taken.append(node)
        return taken

    def put_back(self, node: Node) -> None:
        """`node` was taken and not expanded: it stays a leaf."""
        if node.alive:
            self._push_leaf(node)

    def attach(self, node: Node, candidates: Iterable[Candidate]) -> None:
        """Give a taken leaf its children. Ids outside the vocabulary and repeated ids are left out."""
        node.expanded = True
        if not node.alive:
            return
        seen: set[int] = set()
        for token_id, log_prob in candidates:
            if 0 <= token_id < self.vocab_size and token_id not in seen:
                seen.add(token_id)
                score = node.score + log_prob
                heapq.heappush(self._waiting, (-score, next(self._order), node, token_id, log_prob))
        self._admit(self.root.score + self._floor)

    def unsent(self) -> list[Node]:
        """Nodes that entered since the last call and are still alive, parents before children."""
        nodes = [node for node in self._unsent if node.alive and node is not self.root]
        self._unsent = []
        return nodes

    def commit(self, token_ids: Sequence[int]) -> bool:
        """Re-root at the last of the tokens just committed.

        Returns:
            True if a branch survived; False if the tree restarts, because the last token was not in it.
        """
        root: Node | None = self.root
        identifier, position = self.root.id, self.root.position + len(token_ids)
        for token in token_ids:
            identifier = node_id(identifier, token)
            root = root.children.get(token) if root is not None else None
        old = self._nodes
        for node in old:
            node.alive = False
        self.root.alive = False
        if root is None:
            self._restart(Node(identifier, token_ids[-1], 0.0, None, position))
            return False
        root.alive, root.parent = True, None
        self.root = root
        for node in old:  # parents come before children
            if node.parent is not None and node.parent.alive:
                node.alive = True
        self._nodes = [node for node in old if node.alive and node is not root]
        self._waiting = [entry for entry in self._waiting if entry[2].alive]
        heapq.heapify(self._waiting)
        self._leaves = []
        for node in (root, *self._nodes):
            if not node.expanded:
                self._push_leaf(node)
        self._admit(root.score + self._floor)
        return True

    def _admit(self, floor: float) -> None:
        """Let waiting candidates of at least score `floor` in, best first, while there is room."""
        while self._waiting and len(self._nodes) < self.max_nodes and -self._waiting[0][0] >= floor:
            _, _, parent, token_id, log_prob = heapq.heappop(self._waiting)
            node = Node(node_id(parent.id, token_id), token_id, log_prob, parent, parent.position + 1)
            parent.children[token_id] = node
            self._nodes.append(node)
            self._unsent.append(node)
            self._push_leaf(node)

    def _push_leaf(self, node: Node) -> None:
        if node.position + 1 < self.max_position and node.position - self.root.position < self.max_depth:
            heapq.heappush(self._leaves, (-node.score, next(self._order), node))
