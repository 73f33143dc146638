"""`Levels`: a fixed number of children per level, SpecInfer's expansion <k1, k2, ..., km>."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from speculator_service.frontier import Frontier

if TYPE_CHECKING:
    from speculator_service.living_tree import LivingTree, Node


class Levels(Frontier):
    """Level by level, every node of a level with the same number of children, the best ones.

    After a commit the levels count from the new root: children that are too many there go with all below them, and
    where there are too few the best of the offers that were left over join them.

    Args:
        tree: whose nodes it admits and drops.
        widths: children of a node of level 0, 1, ...; deeper ones have none.
    """

    def __init__(self, tree: LivingTree, widths: Sequence[int]) -> None:
        super().__init__(tree)
        self._widths = tuple(widths)
        self._order = count()  # ties go to the node that came first, so the same inputs give the same tree
        self._leaves: list[tuple[int, float, int, Node]] = []

    def restart(self) -> None:
        self._leaves = []
        self.put_back(self.tree.root)

    def reroot(self) -> None:
        tree = self.tree
        tree.drop(
            [
                child
                for node in (tree.root, *tree.nodes())
                for child in list(node.children.values())[self._width(node) :]
            ]
        )
        self._leaves = []
        for node in (tree.root, *tree.nodes()):
            if node.expanded:
                self._fill(node)
            else:
                self.put_back(node)

    @property
    def exhausted(self) -> bool:
        return self.tree.room < 1 or not self._leaves

    def take(self, limit: int) -> list[Node]:
        level = self._leaves[0][0]
        taken: list[Node] = []
        while self._leaves and len(taken) < limit and self._leaves[0][0] == level:
            taken.append(heapq.heappop(self._leaves)[-1])
        return taken

    def put_back(self, node: Node) -> None:
        if self._width(node):
            heapq.heappush(self._leaves, (node.position, -node.score, next(self._order), node))

    def attach(self, node: Node) -> None:
        self._fill(node)

    def _width(self, node: Node) -> int:
        depth = self.tree.depth(node)
        return self._widths[depth] if depth < len(self._widths) and self.tree.may_have_children(node) else 0

    def _fill(self, node: Node) -> None:
        """Admit the best offers that are not there yet, up to the level's width."""
        width = self._width(node)
        for offer in node.offers:
            if len(node.children) >= width or self.tree.room < 1:
                return
            if offer.token_id not in node.children:
                self.put_back(self.tree.admit(node, offer, self.tree.score(node, offer.log_prob)))
