"""Attention in one order of summation: right, and bit for bit the same whatever a query shares its step with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import TreeLayout, chain_masks, tree_attention
from tests.test_kernels_attention import Case, tree_masks

CONTEXTS = (0, 1, 17, 62, 63, 64, 65, 130)


def path_rows(case: Case, sequence: int, query: int) -> torch.Tensor:
    """Physical cache rows that one query of a sequence sees, in the order of their positions."""
    before, masks = case.sequences[sequence]
    context, size = int(case.contexts[sequence]), case.keys.shape[1]
    rows = [*range(context), *(context + row for row in range(before + len(masks)) if masks[query] >> row & 1)]
    return torch.tensor([int(case.tables[sequence, row // size]) * size + row % size for row in rows])


def alone(case: Case, sequence: int, query: int, packed: int, chunk: int, **options: float | None) -> torch.Tensor:
    """(H, D) what the query gets as the last row of a chain of `chunk` rows in a cache that holds its path only."""
    rows = path_rows(case, sequence, query)
    chunk = min(chunk, len(rows))
    kv_heads, width = case.keys.shape[2:]
    shape = (1, len(rows), kv_heads, width)
    return tree_attention(
        torch.cat([case.query[:1].expand(chunk - 1, -1, -1), case.query[packed : packed + 1]]),
        case.keys.view(-1, kv_heads, width)[rows].view(shape),
        case.values.view(-1, kv_heads, width)[rows].view(shape),
        torch.zeros((1, 1), dtype=torch.int32),
        torch.tensor([len(rows) - chunk], dtype=torch.int32),
        TreeLayout.of([(0, chain_masks(chunk))]),
        scale=0.35,
        implementation="invariant",
        **options,  # type: ignore[arg-type]
    )[-1]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """(context, tree rows before this step, this step's masks): a random tree, or a chain."""
    context, size = draw(st.sampled_from(CONTEXTS)), draw(st.sampled_from((1, 2, 7, 20, 70)))
    bushy = draw(st.booleans())
    parents = [draw(st.integers(-1, index - 1)) if bushy else index - 1 for index in range(size)]
    before = draw(st.integers(0, size - 1))
    return context, before, tree_masks(parents)[before:]


@settings(max_examples=25, deadline=None)
@given(
    batch=st.lists(sequences(), min_size=1, max_size=4),
    heads=st.sampled_from(((4, 4), (4, 2), (6, 1), (40, 2))),
    width=st.sampled_from((8, 20, 64)),
    block_size=st.sampled_from((1, 16)),
    options=st.sampled_from(({}, {"sliding_window": 20}, {"softcap": 2.0})),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    chunk=st.sampled_from((1, 3, 70)),
    data=st.data(),
)
def test_a_query_has_the_same_bits_alone(
    batch: list[tuple[int, int, list[int]]],
    heads: tuple[int, int],
    width: int,
    block_size: int,
    options: dict[str, float | None],
    dtype: torch.dtype,
    chunk: int,
    data: st.DataObject,
) -> None:
    """Random trees and chains side by side: a query's output is what it gets decoded alone, or behind a chunk of its
    own text, from a cache that lies otherwise; and the whole is the reference's."""
    case = Case(batch, heads=heads[0], kv_heads=heads[1], width=width, block_size=block_size, dtype=dtype)
    together = case.run("invariant", **options)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(together, case.run("reference", **options), rtol=tolerance, atol=tolerance)
    start = 0
    for index, (_, _, masks) in enumerate(batch):
        query = data.draw(st.integers(0, len(masks) - 1))
        assert torch.equal(together[start + query], alone(case, index, query, start + query, chunk, **options))
        start += len(masks)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows(threads: int) -> None:
    """As many rows as threads divide among themselves: each of 120 decodes and of a 40-row chunk as it is alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = Case([*((70 + index % 60, 0, [1]) for index in range(120)), (130, 0, chain_masks(40))], width=64)
        together = case.run("invariant")
        for packed in range(0, 160, 7):
            sequence, query = (packed, 0) if packed < 120 else (120, packed - 120)
            assert torch.equal(together[packed], alone(case, sequence, query, packed, 1))
    finally:
        torch.set_num_threads(before)


def test_garbage_of_others_stays_out() -> None:
    """NaN in blocks that belong to nobody in the step, and behind the last row, reaches no output."""
    case = Case([(5, 0, chain_masks(2)), (30, 0, tree_masks([-1, -1, 0]))])
    expected = case.run("reference")
    owned = torch.zeros(case.keys.shape[:2], dtype=torch.bool)
    for sequence, total in enumerate((7, 33)):
        rows = np.arange(total)
        owned[case.tables[sequence, rows // 16].long(), rows % 16] = True
    case.keys[~owned] = math.nan
    case.values[~owned] = math.nan
    torch.testing.assert_close(case.run("invariant"), expected, rtol=1e-5, atol=1e-5)


def test_nothing_to_do() -> None:
    """A step in which no sequence has rows returns no rows."""
    assert Case([(4, 0, []), (0, 0, [])]).run("invariant").shape == (0, 4, 8)
