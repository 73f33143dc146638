"""Tree attention: the reference against the formula, the CPU path against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import TreeLayout, chain_masks, tree_attention

SIZES = (0, 1, 7, 31, 32, 33, 63, 64, 65, 128)


def tree_masks(parents: list[int]) -> list[int]:
    """Ancestor masks of a tree given as parents."""
    masks: list[int] = []
    for index, parent in enumerate(parents):
        masks.append(1 << index | (masks[parent] if parent >= 0 else 0))
    return masks


class Case:
    """Random caches and queries of a ragged step: one (context rows, earlier tree rows, masks) per sequence."""

    def __init__(
        self,
        sequences: list[tuple[int, int, list[int]]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 8,
        block_size: int = 16,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        shuffled: bool = True,
    ) -> None:
        random = np.random.default_rng(seed)
        torch_random = torch.Generator().manual_seed(seed)
        needs = [-(-(context + before + len(masks)) // block_size) or 1 for context, before, masks in sequences]
        blocks = sum(needs) + 1
        order = random.permutation(blocks) if shuffled else np.arange(blocks)
        self.tables = torch.zeros((len(sequences), max(needs)), dtype=torch.int32)
        start = 0
        for index, need in enumerate(needs):
            self.tables[index, :need] = torch.from_numpy(order[start : start + need].astype(np.int32))
            start += need
        shape = (blocks, block_size, kv_heads, width)
        self.keys = torch.randn(shape, generator=torch_random, dtype=dtype) * 2
        self.values = torch.randn(shape, generator=torch_random, dtype=dtype)
        self.contexts = torch.tensor([context for context, _, _ in sequences], dtype=torch.int32)
        self.sequences = [(before, masks) for _, before, masks in sequences]
        rows = sum(len(masks) for _, masks in self.sequences)
        self.query = torch.randn((rows, heads, width), generator=torch_random, dtype=dtype)

    def run(
        self,
        implementation: str,
        *,
        scale: float = 0.35,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        return tree_attention(
            self.query,
            self.keys,
            self.values,
            self.tables,
            self.contexts,
            TreeLayout.of(self.sequences),
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            implementation=implementation,
        )


def test_reference_is_causal_attention_on_a_chain() -> None:
    """On a chain in one piece of cache the reference is the textbook softmax(QK'/sqrt(D) + causal mask)V."""
    context, count, heads, width = 5, 6, 4, 8
    case = Case([(context, 0, chain_masks(count))], kv_heads=heads, dtype=torch.float64, shuffled=False)
    total = context + count
    key = case.keys.view(-1, heads, width)[:total]
    value = case.values.view(-1, heads, width)[:total]
    scores = torch.einsum("qhd,khd->hqk", case.query, key) / math.sqrt(width)
    hidden = torch.arange(total)[None] > context + torch.arange(count)[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value)
    torch.testing.assert_close(case.run("reference", scale=width**-0.5), expected, rtol=1e-12, atol=1e-12)


def test_reference_follows_a_branch() -> None:
    """A node sees its context and its own path, computed by hand: uncle and cousin rows have no weight."""
    masks = tree_masks([-1, -1, 0, 1, 2])  # 0-2-4 and 1-3
    case = Case([(3, 0, masks)], heads=1, kv_heads=1, dtype=torch.float64, shuffled=False)
    rows = [0, 1, 2, 3 + 0, 3 + 2, 3 + 4]
    key, value = case.keys.view(-1, 8)[rows], case.values.view(-1, 8)[rows]
    weights = torch.exp(0.5 * key @ case.query[4, 0])
    expected = weights @ value / weights.sum()
    torch.testing.assert_close(case.run("reference", scale=0.5)[4, 0], expected, rtol=1e-12, atol=1e-12)


def test_reference_window_counts_positions_inside_the_tree() -> None:
    """With a window of 3 the node at depth 2 of a branch sees its parent and the node before, however many rows
    of other branches lie between."""
    masks = tree_masks([-1, 0, 0, 0, 2])  # 4's path is 0, 2, 4
    case = Case([(4, 0, masks)], heads=1, kv_heads=1, dtype=torch.float64, shuffled=False)
    rows = [4 + 0, 4 + 2, 4 + 4]
    key, value = case.keys.view(-1, 8)[rows], case.values.view(-1, 8)[rows]
    weights = torch.softmax(0.5 * key @ case.query[4, 0], dim=0)
    got = case.run("reference", scale=0.5, sliding_window=3)[4, 0]
    torch.testing.assert_close(got, weights @ value, rtol=1e-12, atol=1e-12)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """(context, tree rows before this step, this step's masks) with a random tree."""
    context = draw(st.sampled_from((0, 1, 15, 16, 17, 40)))
    size = draw(st.sampled_from((0, 1, 2, 7, 12, 33)))
    parents = [draw(st.integers(-1, index - 1)) for index in range(size)]
    before = draw(st.integers(0, size))
    return context, before, tree_masks(parents)[before:]


@pytest.mark.parametrize("implementation", ["cpu", "static"])
@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(sequences(), min_size=1, max_size=5),
    heads=st.sampled_from(((4, 4), (4, 2), (6, 1))),
    block_size=st.sampled_from((1, 4, 16)),
    window=st.sampled_from((None, 1, 3, 20)),
    softcap=st.sampled_from((None, 2.0)),
    seed=st.integers(0, 99),
)
def test_torch_equals_reference(
    implementation: str,
    batch: list[tuple[int, int, list[int]]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    """On random ragged batches, head groupings, block sizes, windows and softcaps they are the reference."""
    case = Case(batch, heads=heads[0], kv_heads=heads[1], block_size=block_size, seed=seed)
    got = case.run(implementation, sliding_window=window, softcap=softcap)
    expected = case.run("reference", sliding_window=window, softcap=softcap)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_tree_sizes_around_machine_words(size: int) -> None:
    """Trees of 0 to 128 nodes, around every power of two, beside a sequence of another shape."""
    random = np.random.default_rng(size)
    parents = [int(random.integers(-1, index)) if index else -1 for index in range(size)]
    case = Case([(20, 0, tree_masks(parents)), (3, 0, chain_masks(2))], seed=size, width=4)
    torch.testing.assert_close(case.run("cpu"), case.run("reference"), rtol=1e-5, atol=1e-5)


def test_garbage_of_others_stays_out() -> None:
    """NaN in blocks that belong to nobody in the step, and behind the last row, reaches no output."""
    case = Case([(5, 0, chain_masks(2)), (30, 0, chain_masks(3))])
    expected = case.run("reference")
    owned = torch.zeros(case.keys.shape[:2], dtype=torch.bool)
    for sequence, total in enumerate((7, 33)):
        for row in range(total):
            owned[case.tables[sequence, row // 16], row % 16] = True
    case.keys[~owned] = math.nan
    case.values[~owned] = math.nan
    for implementation in ("cpu", "static"):
        torch.testing.assert_close(case.run(implementation), expected, rtol=1e-5, atol=1e-5)


def test_one_sequence_does_not_feel_another() -> None:
    """A sequence's result is the same alone and beside longer and shorter ones."""
    batch = [(9, 0, chain_masks(4)), (200, 0, chain_masks(1)), (0, 0, chain_masks(40))]
    case = Case(batch)
    together = case.run("cpu")
    start = 0
    for index, (context, before, masks) in enumerate(batch):
        alone = Case([(context, before, masks)])
        alone.keys, alone.values, alone.tables = case.keys, case.values, case.tables[index : index + 1]
        alone.query = case.query[start : start + len(masks)]
        torch.testing.assert_close(together[start : start + len(masks)], alone.run("cpu"), rtol=1e-5, atol=1e-5)
        start += len(masks)


def test_nothing_to_do() -> None:
    """A step in which no sequence has rows returns no rows."""
    assert Case([(4, 0, []), (0, 0, [])]).run("cpu").shape == (0, 4, 8)


def test_half_precision() -> None:
    """In bfloat16 the CPU path stays within that format's rounding of the float64 reference."""
    case = Case([(50, 0, tree_masks([-1, 0, 0, 1])), (4, 0, chain_masks(9))], dtype=torch.bfloat16)
    torch.testing.assert_close(case.run("cpu"), case.run("reference"), rtol=0.05, atol=0.05)


def test_unknown_implementation() -> None:
    """An implementation that does not exist is refused by name."""
    with pytest.raises(ValueError, match="fastest"):
        Case([(1, 0, [1])]).run("fastest")
