"""`Tiers`: the sizes of steps that are recorded. A step is padded up to the smallest that holds it.

    sequences      1, 2, 4, 8, 16, 32, 64
    rows           1, 2, 3, 5, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513     of all sequences together
    length         1024, 4096, 16384, 65536, 262144     cached and new rows of the longest sequence

Rows are a root and a tree of a round number of nodes, and at most half as many again as a step has: up to some two
hundred of them, reading the weights is what takes the time. The length decides among how many programs attention is
shared; how much context there is a kernel reads from the step's inputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from graftree.models.rows import Rows

_USUAL_ROWS, _USUAL_LENGTHS = 129, 2  # of a session alone
_TREE_ROWS = 128  # room for a sequence's tree where the tier has fewer rows: trees that grow in steps


class Tier(NamedTuple):
    """A size of steps that one graph serves."""

    sequences: int
    rows: int
    length: int

    @property
    def tree_rows(self) -> int:
        """Room for the tree rows of one sequence."""
        return max(self.rows, _TREE_ROWS)


@dataclass(frozen=True)
class Tiers:
    """The table of sizes, ascending each."""

    sequences: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    rows: Sequence[int] = (1, 2, 3, 5, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513)  # trees and a root
    lengths: Sequence[int] = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)

    def of(self, batch: Sequence[Rows]) -> Tier | None:
        """The smallest tier that holds a step; None = it is not recorded."""
        sizes = [len(rows.token_ids) for rows in batch]
        trees = [rows.tree_len + size for rows, size in zip(batch, sizes, strict=True)]
        wanted = all(list(rows.logits) == list(range(size)) for rows, size in zip(batch, sizes, strict=True))
        if not wanted or not any(sizes):
            return None
        longest = max(rows.context_len + tree for rows, tree in zip(batch, trees, strict=True))
        sequences, rows, length = (
            _up(self.sequences, len(batch)),
            _up(self.rows, sum(sizes)),
            _up(self.lengths, longest),
        )
        if sequences is None or rows is None or length is None:
            return None
        tier = Tier(sequences, rows, length)
        return tier if max(trees) <= tier.tree_rows else None

    def usual(self, longest: int) -> list[Tier]:
        """What a session alone asks for, up to `longest` rows: worth recording before the first one does."""
        lengths = [length for below, length in pairwise((0, *self.lengths)) if below < longest][:_USUAL_LENGTHS]
        rows = [rows for rows in self.rows if rows <= _USUAL_ROWS]
        return [Tier(self.sequences[0], count, length) for length in lengths for count in rows]


def _up(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest of ascending sizes that is at least as large; None = there is none."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
