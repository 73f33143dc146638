"""`TreeLayout`: who sees whom in one ragged step, and what a kernel derives from that once per step.

A step runs the rows of B sequences packed into one (N, ...) batch. In the cache, sequence b's logical rows are

    0 ........ context_lens[b] ........................ context_lens[b] + tree_lens[b]
    committed context          tree rows of earlier steps | this step's rows

A query sees every context row, and the tree rows whose bit is set in its ancestor mask (SpecInfer, ASPLOS'24,
section 4.2: the topology-aware causal mask), its own bit included. A prefill chunk is a chain: each mask holds
all the bits below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """The tree part of a step.

    Attributes:
        query_lens: (B,) rows of each sequence in this step; sum = N. They are the last of its tree rows.
        tree_lens: (B,) tree rows of each sequence in the cache once this step's rows are written.
        masks: (N,) bit sets over the sequence's tree rows; bit j = tree row j, parents before children.
        plans: what an implementation worked out for this step, kept for the next layer.
    """

    query_lens: tuple[int, ...]
    tree_lens: tuple[int, ...]
    masks: tuple[int, ...]
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, Sequence[int]]]) -> TreeLayout:
        """Build from each sequence's (tree rows before this step, masks of this step's rows)."""
        return cls(
            query_lens=tuple(len(masks) for _, masks in sequences),
            tree_lens=tuple(before + len(masks) for before, masks in sequences),
            masks=tuple(mask for _, masks in sequences for mask in masks),
        )

    def __len__(self) -> int:
        return len(self.masks)

    def rows(self, sequence: int) -> range:
        """Packed rows of one sequence."""
        start = sum(self.query_lens[:sequence])
        return range(start, start + self.query_lens[sequence])

    def ancestors(self, sequence: int) -> npt.NDArray[np.bool_]:
        """(query_lens[b], tree_lens[b]) bool: which tree rows each query of a sequence sees."""
        rows, width = self.rows(sequence), self.tree_lens[sequence]
        size = (width + 7) // 8
        packed = b"".join(self.masks[row].to_bytes(size, "little") for row in rows)
        bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(len(rows), size), axis=1, bitorder="little")
        return bits[:, :width].astype(np.bool_)

    def visible(self, sequence: int, context_len: int, sliding_window: int | None) -> npt.NDArray[np.bool_]:
        """(query_lens[b], context_len + tree_lens[b]) bool: which cache rows each query of a sequence sees.

        With a sliding window a query at position p sees positions above p - sliding_window. A context row's
        position is its index. A tree row's, as one of q's ancestors sees it, is q's own minus the number of q's
        ancestors that lie behind it: ancestors form a path, so each is one position further back.
        """
        tree = self.ancestors(sequence)
        visible = np.concatenate([np.ones((len(tree), context_len), np.bool_), tree], axis=1)
        if sliding_window is None:
            return visible
        seen: npt.NDArray[np.int64] = np.cumsum(tree[:, ::-1], axis=1, dtype=np.int64)[:, ::-1]
        back = seen - tree  # q's ancestors behind each tree row
        position = context_len + tree.sum(axis=1) - 1
        visible[:, :context_len] = np.arange(context_len) > (position - sliding_window)[:, None]
        visible[:, context_len:] &= back < sliding_window
        return visible


def chain_masks(count: int, before: int = 0) -> list[int]:
    """Masks of `count` rows in a chain behind `before` rows of the same chain: a prefill chunk's."""
    return [(1 << (before + index + 1)) - 1 for index in range(count)]
