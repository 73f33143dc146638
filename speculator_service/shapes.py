"""Shapes of living trees: what a budget of nodes is spent on. Chosen by the speculator's configuration key `tree`.

    best_first                     the nodes most likely to be reached, whatever shape that gives
    static:1,1,3,1,1,1,1,1         SpecInfer's expansion <k1, ..., km> (arXiv 2305.09781, section 4): every node
                                   of level i - 1 gets its k_i best children
    cartesian:4,2,2,1              full products as in MCSD (arXiv 2401.06706): read the same, wide first

`static` and `cartesian` alone mean the numbers shown. A tree never exceeds its budget and depth: a larger shape loses
its last levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from graftree.config import TREE_WORDS
from graftree.errors import ConfigError
from graftree.tree_limits import MAX_TREE_DEPTH, MOST_CHILDREN
from speculator_service.best_first import BestFirst
from speculator_service.frontier import Frontier
from speculator_service.levels import Levels

if TYPE_CHECKING:
    from speculator_service.living_tree import LivingTree

WIDTHS = {"static": (1, 1, 3, 1, 1, 1, 1, 1), "cartesian": (4, 2, 2, 1)}


@dataclass(frozen=True, slots=True)
class Shape:
    """How trees grow.

    Attributes:
        frontier: makes what chooses a tree's nodes.
        children: most children of a node; 0 = as configured (`branching`).
    """

    frontier: Callable[[LivingTree], Frontier]
    children: int = 0


BEST_FIRST = Shape(BestFirst)


def parse(spec: str) -> Shape:
    """The shape that a configuration names.

    Raises:
        ConfigError: names `tree`, the spec and what would have been accepted.
    """
    kind, colon, numbers = spec.partition(":")
    if spec == "best_first":
        return BEST_FIRST
    if kind not in WIDTHS:
        raise ConfigError("tree", spec, TREE_WORDS)
    return levels(_numbers(spec, numbers) if colon else WIDTHS[kind])


def levels(widths: Sequence[int]) -> Shape:
    """<k1, ..., km>: widths[i] is the number of children of a node of level i."""
    return Shape(partial(Levels, widths=tuple(widths)), max(widths))


def _numbers(spec: str, text: str) -> list[int]:
    try:
        widths = [int(number) for number in text.split(",")]
    except ValueError:
        widths = []
    if not 1 <= len(widths) <= MAX_TREE_DEPTH or not all(1 <= width <= MOST_CHILDREN for width in widths):
        raise ConfigError("tree", spec, TREE_WORDS)
    return widths
