"""`Cut`: the part of a merged tree that one verify step takes, and whose nodes they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graftree.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Cut:
    """The tree of one step.

    Attributes:
        tree: log_probs = the combined, calibrated conditional log probabilities.
        survivals: (N,) probability that each node is accepted.
        alone: (N,) bits of the kinds without whom the node, or an ancestor of it, would not be there.
        kinds: the kind that each bit stands for.
    """

    tree: TokenTree
    survivals: tuple[float, ...] = ()
    alone: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def expected(self) -> float:
        """E[accepted]."""
        return sum(self.survivals)

    def brought(self) -> dict[str, tuple[float, int]]:
        """Of each kind that brought nodes alone: accepted tokens expected of these, and how many they are."""
        sums: dict[int, tuple[float, int]] = {}
        for survival, bits in zip(self.survivals, self.alone, strict=True):
            if bits:
                tokens, rows = sums.get(bits, (0.0, 0))
                sums[bits] = tokens + survival, rows + 1
        return {
            kind: (sum(sums[bits][0] for bits in own), sum(sums[bits][1] for bits in own))
            for index, kind in enumerate(self.kinds)
            if (own := [bits for bits in sums if bits >> index & 1])
        }

    def taken(self, accepted: Sequence[int]) -> dict[str, int]:
        """Of each kind, how many of the `accepted` nodes would not have been there without it."""
        return {
            kind: sum(self.alone[node] >> index & 1 for node in accepted) for index, kind in enumerate(self.kinds)
        }


class Taker(Protocol):
    """What a cut needs of `router.budget.Budget`."""

    nodes: int

    def offer(self, survival: float) -> bool: ...
