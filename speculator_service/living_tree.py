"""`LivingTree`: one session's draft tree, grown all the time and re-rooted at every commit.

Which nodes it grows is its shape's business (`speculator_service.shapes`); here is what all shapes share: nodes by
content address, limits, what is still to be sent, re-rooting, and the record of how right the drafter was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from graftree.calibration import Calibration
from graftree.tree import node_id
from speculator_service.drafters.base import Candidate
from speculator_service.shapes import BEST_FIRST, Shape

_NOTED = math.log(0.03)  # least promise that is held against the outcome: those below are many and say little
_TAUGHT = 4  # commits of a session for one that teaches the prior


class Node:
    """A node of a living tree.

    Attributes:
        id: content address, `graftree.tree.node_id`.
        token_id: draft token; -1 for the first root, whose token nobody asks for.
        log_prob: natural log probability of the token given its path, as the drafter said it.
        parent: None for the root.
        position: absolute index of the token in the sequence (0 = first prompt token).
        score: sum of log chances, calibrated, from an ancestor that all nodes of the tree share.
        children: by token id, the best first.
        offers: the candidates it was expanded with; children are some of them.
        expanded: its children have been drafted.
        sent: it has left with a delta.
        alive: still below the root; a commit or a better node clears it.
    """

    __slots__ = (
        "alive",
        "children",
        "expanded",
        "id",
        "log_prob",
        "offers",
        "parent",
        "position",
        "score",
        "sent",
        "token_id",
    )

    def __init__(
        self, id: int, token_id: int, log_prob: float, parent: Node | None, position: int, score: float
    ) -> None:
        self.id, self.token_id, self.log_prob, self.parent, self.position = id, token_id, log_prob, parent, position
        self.score = score
        self.children: dict[int, Node] = {}
        self.offers: Sequence[Candidate] = ()
        self.expanded = False
        self.sent = False
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
        shape: which nodes it grows.

    Attributes:
        budget: most nodes below the root at present, at most `max_nodes`.
        calibration: of the chances that the drafter promises; what was committed teaches it.
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
        shape: Shape = BEST_FIRST,
    ) -> None:
        self.max_nodes, self.max_depth = max_nodes, max_depth
        self.max_position, self.vocab_size = max_position, vocab_size
        self.budget = max_nodes
        self.calibration = Calibration()
        self._curves: dict[int, Callable[[float], float]] = {}  # by depth, as the calibration stands now
        self.root = Node(root_id, -1, 0.0, None, committed_length - 1, 0.0)
        self._nodes: list[Node] = []
        self._unsent: list[Node] = []
        self._away: dict[int, Node] = {}  # id -> parent, of nodes that were sent and then displaced
        self._prior: Calibration | None = None
        self._commits = 0
        self._frontier = shape.frontier(self)
        self._frontier.restart()

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def committed_length(self) -> int:
        """Tokens committed so far, the root included."""
        return self.root.position + 1

    @property
    def room(self) -> int:
        """Nodes that may still enter; negative if a smaller budget came."""
        known = len(self._nodes) + len(self._away)  # the receiver has not forgotten what was displaced
        return min(self.budget - len(self._nodes), 2 * self.max_nodes - known)

    @property
    def may_displace(self) -> bool:
        """A better node may take the place of a worse one in a full tree."""
        known = len(self._nodes) + len(self._away)
        return len(self._nodes) == self.budget and known < 2 * self.max_nodes

    @property
    def complete(self) -> bool:
        """Nothing more comes before the next commit."""
        return self._frontier.exhausted

    def nodes(self) -> Sequence[Node]:
        """The nodes below the root, parents before children."""
        return self._nodes

    def depth(self, node: Node) -> int:
        """Levels below the root."""
        return node.position - self.root.position

    def may_have_children(self, node: Node) -> bool:
        """Depth and position allow it."""
        return node.position + 1 < self.max_position and self.depth(node) < self.max_depth

    def path(self, node: Node) -> tuple[int, ...]:
        """Tokens from the root's child down to `node`; () for the root."""
        tokens: list[int] = []
        while node is not self.root:
            assert node.parent is not None
            tokens.append(node.token_id)
            node = node.parent
        return tuple(reversed(tokens))

    def take(self, limit: int) -> list[Node]:
        """Up to `limit` leaves to expand now. Each must come back through `attach` or `put_back`."""
        return [] if limit < 1 or self.complete else self._frontier.take(limit)

    def put_back(self, node: Node) -> None:
        """`node` was taken and not expanded: it stays a leaf."""
        if node.alive:
            self._frontier.put_back(node)

    def attach(self, node: Node, candidates: Iterable[Candidate]) -> None:
        """Give a taken leaf its children. Ids outside the vocabulary and repeated ids are left out."""
        node.expanded = True
        if not node.alive:
            return
        offers: dict[int, Candidate] = {}
        for candidate in candidates:
            if 0 <= candidate[0] < self.vocab_size:
                offers.setdefault(candidate[0], Candidate(*candidate))
        node.offers = tuple(offers.values())
        self._frontier.attach(node)

    def unsent(self) -> list[Node]:
        """Nodes that entered since the last call and are still alive, parents before children."""
        nodes = [node for node in self._unsent if node.alive and node is not self.root]
        self._unsent = []
        for node in nodes:
            node.sent = True
        return nodes

    def foreseen(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens about to be committed have been sent as drafts, from the first one on."""
        node: Node | None = self.root
        for count, token in enumerate(token_ids):
            node = node.children.get(token) if node is not None else None
            if node is None or not node.sent:
                return count
        return len(token_ids)

    def calibrate(self, prior: Calibration) -> None:
        """Begin with what other sessions have learnt, and teach them."""
        self._prior, self.calibration = prior, Calibration(prior)
        self._curves.clear()

    def commit(self, token_ids: Sequence[int], budget: int = 0) -> bool:
        """Re-root at the last of the tokens just committed.

        Args:
            token_ids: (n,) n >= 1.
            budget: most nodes from now on; 0 or more than `max_nodes` = `max_nodes`.

        Returns:
            True if a branch survived; False if the tree restarts, because the last token was not in it.
        """
        self.budget = min(budget or self.max_nodes, self.max_nodes)
        self._commits += 1
        self._curves.clear()
        root: Node | None = self.root
        identifier, position = self.root.id, self.root.position + len(token_ids)
        for depth, token in enumerate(token_ids, 1):
            identifier = node_id(identifier, token)
            if root is not None:
                self._learn(root, depth, token)
                root = root.children.get(token)
        old = self._nodes
        for node in (self.root, *old):
            node.alive = False
        if root is None:
            self._restart(identifier, token_ids[-1], position)
            return False
        root.alive, root.parent = True, None
        self.root = root
        for node in old:  # parents come before children
            if node.parent is not None and node.parent.alive:
                node.alive = True
        self._nodes = [node for node in old if node.alive and node is not root]
        self._away = {identifier: parent for identifier, parent in self._away.items() if parent.alive}
        self._frontier.reroot()
        return True

    def _restart(self, identifier: int, token: int, position: int) -> None:
        self.root = Node(identifier, token, 0.0, None, position, 0.0)
        self._nodes, self._unsent = [], []
        # Below a node that was displaced the receiver may still hold some, and which is not known here any more.
        self._away = dict.fromkeys(self._away, self.root) if identifier in self._away else {}
        self._frontier.restart()

    def _learn(self, node: Node, depth: int, picked: int) -> None:
        """The LLM picked its token behind `node`: what was offered there was right or wrong, in the tree or not."""
        for token, log_prob in node.offers:
            if log_prob < _NOTED:
                continue
            promised = math.exp(log_prob)
            self.calibration.observe(depth, promised, token == picked)
            if self._prior is not None and self._commits % _TAUGHT == 0:
                self._prior.observe(depth, promised, token == picked)

    # For the frontier.

    def score(self, parent: Node, log_prob: float) -> float:
        """Of a candidate below `parent`: the log of its survival probability, from where all scores are counted."""
        depth = self.depth(parent) + 1
        curve = self._curves.get(depth)
        if curve is None:
            curve = self._curves[depth] = self.calibration.curve(depth)
        chance = curve(math.exp(log_prob))
        return parent.score + (math.log(chance) if chance > 0.0 else -700.0)

    def admit(self, parent: Node, candidate: Candidate, score: float) -> Node:
        """A candidate of `parent` becomes a node."""
        token_id, log_prob = candidate
        node = Node(node_id(parent.id, token_id), token_id, log_prob, parent, parent.position + 1, score)
        parent.children[token_id] = node
        self._nodes.append(node)
        self._unsent.append(node)
        self._away.pop(node.id, None)
        return node

    def drop(self, nodes: Iterable[Node]) -> None:
        """Nodes go, and with them all below them. Those that were sent stay known to the receiver."""
        for node in nodes:
            node.alive = False
            assert node.parent is not None
            del node.parent.children[node.token_id]
        for node in self._nodes:
            assert node.parent is not None
            node.alive = node.alive and node.parent.alive
            if not node.alive and node.sent:
                self._away[node.id] = node.parent if node.parent.alive else self._away[node.parent.id]
        self._nodes = [node for node in self._nodes if node.alive]
