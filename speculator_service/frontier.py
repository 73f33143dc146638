"""`Frontier`: what of one living tree is grown next. Each shape of trees has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculator_service.living_tree import LivingTree, Node


class Frontier(ABC):
    """Chooses the leaves that are expanded and the candidates that become nodes.

    Args:
        tree: whose nodes it admits and drops.
    """

    def __init__(self, tree: LivingTree) -> None:
        self.tree = tree

    @abstractmethod
    def restart(self) -> None:
        """The tree is its root alone, not expanded yet."""

    @abstractmethod
    def reroot(self) -> None:
        """One of the tree's nodes has become its root."""

    @property
    @abstractmethod
    def exhausted(self) -> bool:
        """Nothing is to be expanded before the next commit."""

    @abstractmethod
    def take(self, limit: int) -> list[Node]:
        """Up to `limit` leaves to expand now; called only while not exhausted. None: candidates entered instead."""

    @abstractmethod
    def put_back(self, node: Node) -> None:
        """A living leaf was taken and not expanded."""

    @abstractmethod
    def attach(self, node: Node) -> None:
        """A living node that was taken has its offers."""
