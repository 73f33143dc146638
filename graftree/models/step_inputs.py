"""What a step's forward reads: packed rows, where they go, and where and how their sequences' rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftree.models.rows import Rows
from kernels import TreeLayout

Arrays = dict[str, NDArray[Any]]


def step_layout(batch: Sequence[Rows]) -> TreeLayout:
    """Who sees whom."""
    return TreeLayout.of([(rows.tree_len, rows.masks) for rows in batch])


def step_arrays(batch: Sequence[Rows], block_size: int) -> Arrays:
    """A step as it is: N rows, B sequences, M blocks of the one that has most.

    Returns:
        token_ids, positions: (N,) int64.
        slots: (N,) int64 physical rows of the cache that the rows' keys and values go to.
        block_tables: (B, M) int32; context_lens: (B,) int32.
    """
    return padded_arrays(
        batch,
        block_size,
        rows=sum(len(rows.token_ids) for rows in batch),
        sequences=len(batch),
        width=max(len(rows.blocks) for rows in batch),
        scrap=0,
    )


def padded_arrays(
    batch: Sequence[Rows], block_size: int, *, rows: int, sequences: int, width: int, scrap: int
) -> Arrays:
    """A step among rows and sequences that are nobody's.

    Args:
        rows, sequences: N and B; the batch's own come first. The others are token 0 at position 0.
        width: M; of longer tables the first entries are taken.
        scrap: the block that rows of nobody are written to, and that fills the tables.
    """
    tables = np.full((sequences, width), scrap, np.int32)
    token_ids, positions = np.zeros((2, rows), np.int64)
    slots = np.full(rows, scrap * block_size, np.int64)
    context_lens = np.zeros(sequences, np.int32)
    start = 0
    for index, own in enumerate(batch):
        blocks, count = own.blocks[:width], len(own.token_ids)
        tables[index, : len(blocks)] = blocks
        context_lens[index] = own.context_len
        logical = own.context_len + own.tree_len + np.arange(count)
        slots[start : start + count] = tables[index, logical // block_size].astype(np.int64) * block_size
        slots[start : start + count] += logical % block_size
        start += count
    token_ids[:start] = list(chain.from_iterable(own.token_ids for own in batch))
    positions[:start] = list(chain.from_iterable(own.positions for own in batch))
    return {
        "token_ids": token_ids,
        "positions": positions,
        "slots": slots,
        "block_tables": tables,
        "context_lens": context_lens,
    }
