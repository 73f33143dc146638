"""`MergedTree`: one session's guesses from all its speculators, merged by content address.

The union depends on what arrived, never on the order in which it did, so the same deltas give the same tree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from graftree.calibration import exclusive
from graftree.errors import InvalidTree
from graftree.proposals import MAX_PER_NODE
from graftree.tree import TokenTree, node_id
from graftree.v1.common_pb2 import Proposals
from graftree.v1.speculation_pb2 import TreeDelta
from graftree.v1.verification_pb2 import VerifyStep
from router.cut import Cut, Taker
from router.deltas import check_delta
from router.record import Agreement, Record


@dataclass(slots=True)
class Node:
    """A guessed token. The root is a `Node` too: the last committed token, with no guesses on it.

    Attributes:
        depth: levels below the first root of the tree's life; re-rooting does not change it.
        children: token -> node.
        said: speculator -> the chance it promises for this token given the path.
        chance: the same from all of them, calibrated; as of the tree's `version` in `stamp`.
        survival: product of the chances down the path, roughly: as they were when the nodes came.
        proposals: speculator -> its salt, and what it drew the node's children from. They stay as long as the node,
            whatever became of the children: dropping draws by their values would leave others than q says.
    """

    identifier: int
    token_id: int
    depth: int
    children: dict[int, Node] = field(default_factory=dict)
    said: dict[str, float] = field(default_factory=dict)
    chance: float = 1.0
    stamp: int = 0
    survival: float = 1.0
    proposals: dict[str, tuple[int, Proposals]] | None = None


@dataclass(slots=True)
class _Source:
    """One opening of a speculator: the record of its kind, the bit that stands for the kind, its live nodes."""

    record: Record
    bit: int
    count: int = 0


class MergedTree:
    """Living union of the speculators' trees below the session's root.

    Args:
        root_id: content address of the last committed token.
        vocab_size: token ids at or above it are garbage.
        max_nodes: most live nodes one speculator may have here.
        max_depth: deepest level below the root.
        tests_draws: whether the verifier needs what children were drawn from; if not, it must not come.
        record: kind of speculator -> its record in this session.
        agreement: how the chances that several give are combined.

    Attributes:
        outlook: what is expected of all nodes together in accepted tokens, roughly.
        stale_nodes: nodes that came without a place.
    """

    def __init__(
        self,
        root_id: int,
        *,
        vocab_size: int,
        max_nodes: int,
        max_depth: int,
        tests_draws: bool = False,
        record: Callable[[str], Record] | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self._root = Node(root_id, -1, 0)
        self._nodes: dict[int, Node] = {root_id: self._root}
        self._sources: dict[str, _Source] = {}
        self._kinds: dict[str, int] = {}
        self._version = 0  # of the records
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._tests_draws = tests_draws
        self._record = record or Record
        self._agreement = agreement or Agreement()
        self.outlook = 0.0
        self.stale_nodes = 0

    def __len__(self) -> int:
        return len(self._nodes) - 1

    @property
    def root_id(self) -> int:
        return self._root.identifier

    def add(self, speculator: str, delta: TreeDelta, *, salt: int = 0) -> int:
        """Merge what one speculator sent; nodes with an unknown parent are stale: dropped and counted.

        Args:
            speculator: name of the opening the delta belongs to: the kind, and behind a slash what tells it apart.
            salt: of its draws.

        Returns:
            Number of nodes that found their place.

        Raises:
            InvalidTree: the delta breaks an invariant; nothing of it was merged.
        """
        check_delta(delta, vocab_size=self._vocab_size, max_nodes=self._max_nodes, with_proposals=self._tests_draws)
        staged: dict[int, int] = {}  # id -> depth, of nodes this delta brings
        placed: list[tuple[int, int, float, int]] = []
        nodes, deepest, mine = self._nodes, self._root.depth + self._max_depth, 0
        for parent_id, token, log_prob in zip(delta.parent_ids, delta.token_ids, delta.log_probs, strict=True):
            parent = nodes.get(parent_id)
            depth = (parent.depth if parent is not None else staged.get(parent_id, -1)) + 1
            if depth == 0:
                continue
            if depth > deepest:
                raise InvalidTree("delta.parent_ids", depth - self._root.depth, f"at most {self._max_depth} deep")
            known = parent.children.get(token) if parent is not None else None
            if known is None:
                identifier = node_id(parent_id, token)
                if identifier in nodes or identifier in staged:
                    raise InvalidTree("delta.token_ids", token, "siblings carry different tokens")
                staged[identifier] = depth
                mine += 1
            else:
                identifier = known.identifier
                mine += speculator not in known.said
            placed.append((parent_id, token, log_prob, identifier))
        source = self._sources.get(speculator) or self._source(speculator)
        if (count := source.count + mine) > self._max_nodes:
            raise InvalidTree("delta.token_ids", count, f"at most {self._max_nodes} nodes")
        source.count = count
        for parent_id, token, log_prob, identifier in placed:
            self._place(speculator, nodes[parent_id], token, math.exp(min(log_prob, 0.0)), identifier)
        for entry in delta.proposals:
            node = self._nodes.get(entry.node_id)
            # The first word counts: a second list of one speculator would repeat its draws.
            if node is not None:
                lists = node.proposals = node.proposals or {}
                if speculator not in lists and len(lists) < MAX_PER_NODE:
                    lists[speculator] = salt, entry.proposals
        self.stale_nodes += len(delta.token_ids) - len(placed)
        return len(placed)

    def _source(self, speculator: str) -> _Source:
        kind = speculator.rpartition("/")[0] or speculator
        index = self._kinds.setdefault(kind, len(self._kinds))
        self._sources[speculator] = source = _Source(self._record(kind), 1 << index)
        return source

    def _place(self, speculator: str, parent: Node, token: int, promised: float, identifier: int) -> None:
        node = parent.children.get(token)
        if node is None:
            node = Node(identifier, token, parent.depth + 1, {}, {speculator: promised}, survival=0.0)
            parent.children[token] = node
            self._nodes[identifier] = node
        else:
            # A speculator that says it twice is taken at its best word: the maximum knows no order.
            node.said[speculator] = max(promised, node.said.get(speculator, 0.0))
        self._judge(node)
        survival = parent.survival * node.chance
        self.outlook += survival - node.survival
        node.survival = survival

    def _judge(self, node: Node) -> None:
        """Bring `chance` up to date with what was said and with the records."""
        node.stamp = self._version
        depth, sources, said = node.depth - self._root.depth, self._sources, node.said
        if len(said) == 1:
            for name, promised in said.items():
                node.chance = sources[name].record.chance(depth, promised)
        else:
            chances = [sources[name].record.chance(depth, promised) for name, promised in said.items()]
            node.chance = self._agreement.combine(chances)

    def reroot(self, token_ids: Sequence[int]) -> None:
        """Follow committed tokens: the branch they name survives, the rest goes; off the tree it restarts.

        What the speculators said at each step of the way is held against the LLM's pick there.
        """
        node = self._root
        for depth, token in enumerate(token_ids, 1):
            self._observe(node, depth, token)
            child = node.children.get(token)
            node = child or Node(node_id(node.identifier, token), token, node.depth + 1)
        self._version += 1
        for record in {source.record.kind: source.record for source in self._sources.values()}.values():
            record.round()
        node.said = {}
        self._root = node
        self._nodes = {}
        for source in self._sources.values():
            source.count = 0
        scale = 1.0 / node.survival if node.survival > 0.0 else 0.0
        self.outlook = 0.0
        node.survival = 0.0  # of itself, nothing is expected
        for survivor in _below(node):
            self._nodes[survivor.identifier] = survivor
            survivor.survival *= scale
            self.outlook += survivor.survival
            for speculator in survivor.said:
                self._sources[speculator].count += 1
        node.survival = 1.0

    def _observe(self, node: Node, depth: int, picked: int) -> None:
        for token, child in sorted(node.children.items()):
            chances = []
            for speculator, promised in sorted(child.said.items()):
                record = self._sources[speculator].record
                if len(child.said) > 1:
                    chances.append(record.chance(depth, promised))
                record.observe(depth, promised, token == picked)
            if chances:
                self._agreement.observe(chances, token == picked)

    def cut(self, budget: Taker, max_depth: int, leave_out: Collection[str] = ()) -> Cut:
        """The nodes most likely to be accepted, as many as the budget takes, at most `max_depth` deep.

        A node's survival probability is the product, down its path, of the chance that each token is the LLM's pick
        given that its parent was accepted: the speculators' promises, calibrated by their records, combined by
        `graftree.calibration.combine`, and of siblings no more than 1 in sum. So ancestors score at least as high and
        the kept set is connected. Ties go to the shallower node, then to the one whose parent came first, then to the
        smaller token; the order is canonical.

        Args:
            leave_out: kinds whose word is not enough for a node to be taken.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        log_probs: list[float] = []
        survivals: list[float] = []
        alone: list[int] = []
        sources = self._sources
        # (-survival, depth, parent's index, token) is unique: a comparison never gets as far as the node.
        heap: list[tuple[float, int, int, int, float, Node]] = []
        frontier, depth, parent, survival, bits = self._root, 0, -1, 1.0, 0
        wanted = max_depth > 0
        counting = ~sum(1 << self._kinds[kind] for kind in leave_out if kind in self._kinds)
        while wanted:
            if depth < max_depth and (children := frontier.children):
                if leave_out:
                    children = self._said_by(children, counting)
                self._push(heap, children, survival, depth + 1, parent)
            if not heap:
                break
            negative, depth, above, token, chance, frontier = heapq.heappop(heap)
            survival, parent = -negative, len(token_ids)
            bits = 0
            for name in frontier.said:
                bits |= sources[name].bit
            if bits & (bits - 1):
                bits = 0  # several say so
            token_ids.append(token)
            parents.append(above)
            log_probs.append(math.log(chance) if chance > 1e-300 else -690.0)
            survivals.append(survival)
            alone.append(bits | alone[above] if above >= 0 else bits)
            wanted = budget.offer(survival)
        count = budget.nodes
        return Cut(
            TokenTree(self.root_id, tuple(token_ids[:count]), tuple(parents[:count]), tuple(log_probs[:count])),
            tuple(survivals[:count]),
            tuple(alone[:count]),
            tuple(self._kinds),
        )

    def _said_by(self, children: dict[int, Node], kinds: int) -> dict[int, Node]:
        """Those that one of the kinds, given as bits, has named."""
        sources = self._sources
        return {
            token: child for token, child in children.items() if any(sources[name].bit & kinds for name in child.said)
        }

    def _push(
        self,
        heap: list[tuple[float, int, int, int, float, Node]],
        children: dict[int, Node],
        survival: float,
        depth: int,
        parent: int,
    ) -> None:
        version = self._version
        for child in children.values():
            if child.stamp != version:
                self._judge(child)
        chances = [child.chance for child in children.values()]
        if len(chances) > 1:
            chances = exclusive(chances)
        for (token, child), chance in zip(children.items(), chances, strict=True):
            heapq.heappush(heap, (-survival * chance, depth, parent, token, chance, child))

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
            for _, (salt, proposals) in sorted((node.proposals or {}).items())
        ]


def _below(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
