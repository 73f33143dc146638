"""Static trees for a node budget: the best of SpecInfer's and of MCSD's expansions.

An expansion <k1, ..., km> gives every node of level i - 1 its k_i most likely children (SpecInfer, arXiv 2305.09781,
section 3; multi-candidate speculative decoding, arXiv 2401.06706). Where a node's k most likely children hold the
LLM's token with chance S(k), whatever its depth, an expansion gives

    E[accepted] = sum over i of S(k_1) ... S(k_i)        for        sum over i of k_1 ... k_i nodes.

`best` looks through all expansions of a family. `STATIC` and `CARTESIAN` are what it finds for S of the default SSM
on held-out text of the LLM's own, `SUCCESS`; the prompts that are measured had no part in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

Shape = tuple[int, ...]
Family = Literal["static", "cartesian"]

BUDGETS = (4, 8, 16, 32, 64)
DEEPEST = 16
WIDEST = 8

# Chance that the k most likely tokens of the default SSM hold the LLM's, as its card has it for k = 1 to 5; the rest
# goes on as the last steps do.
SUCCESS = (0.441, 0.569, 0.635, 0.677, 0.704, 0.722, 0.736, 0.747)


def width(k: int) -> Shape:
    """SpecInfer's expansion of width k (section 6.4)."""
    return (1, 1, k, 1, 1, 1, 1, 1)


def nodes(shape: Shape) -> int:
    """Nodes of an expansion."""
    total, level = 0, 1
    for k in shape:
        level *= k
        total += level
    return total


def expected(shape: Shape, success: Sequence[float]) -> float:
    """E[accepted] of an expansion; success[k - 1] = S(k)."""
    total, reached = 0.0, 1.0
    for k in shape:
        reached *= success[k - 1]
        total += reached
    return total


def best(budget: int, family: Family, success: Sequence[float] = SUCCESS) -> Shape:
    """The expansion of at most `budget` nodes from which most is expected.

    Args:
        budget: nodes, at least 1.
        family: "static", SpecInfer's <1, 1, k, 1, ..., 1>; "cartesian", MCSD's: no level is wider than the one above.
        success: S, at least one entry.
    """
    candidates = _third_wide(budget, len(success)) if family == "static" else _narrowing(budget, len(success))
    return max(candidates, key=lambda shape: (expected(shape, success), -len(shape)))


def _third_wide(budget: int, widest: int) -> Iterator[Shape]:
    for depth in range(1, min(budget, DEEPEST) + 1):
        for k in range(1, widest + 1 if depth > 2 else 2):
            shape = (1, 1, k, *(1,) * (depth - 3))[:depth]
            if nodes(shape) <= budget:
                yield shape


def _narrowing(budget: int, widest: int, above: Shape = ()) -> Iterator[Shape]:
    for k in range(1, min(widest, above[-1] if above else widest) + 1):
        shape = (*above, k)
        if len(shape) <= DEEPEST and nodes(shape) <= budget:
            yield shape
            yield from _narrowing(budget, widest, shape)


# best(budget, family) with SUCCESS.
STATIC: dict[int, Shape] = {
    4: (1, 1, 1, 1),
    8: (1, 1, 2, 1, 1),
    16: (1, 1, 4, 1, 1),
    32: (1, 1, 6, 1, 1, 1, 1),
    64: (1, 1, 8, 1, 1, 1, 1, 1, 1),
}
CARTESIAN: dict[int, Shape] = {4: (2, 1), 8: (2, 1, 1, 1), 16: (4, 1, 1, 1), 32: (6, 2, 1), 64: (6, 3, 1, 1)}


def kind(name: str, shape: Shape) -> str:
    """As a speculator's configuration has it."""
    return f"{name}:{','.join(map(str, shape))}"
