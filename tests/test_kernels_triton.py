"""Triton's tree attention against the reference in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.models.load import load
from graftree.models.runner import Rows, TreeRunner, chain_rows
from kernels import TreeLayout, chain_masks
from kernels.triton_attention import refusal
from tests.test_kernels_attention import Case, sequences, tree_masks
from tests.test_kernels_pieces import run
from tests.triton_cases import DEVICE, TOLERANCE, attend, check, error, exact

BRANCHES = tree_masks([-1, -1, 0, 1, 2, 0])


def random_tree(size: int, seed: int = 0) -> list[int]:
    random = np.random.default_rng(seed)
    return tree_masks([int(random.integers(-1, index)) if index else -1 for index in range(size)])


@pytest.mark.parametrize("size", [1, 31, 32, 33, 63, 64, 65, 128, 130])
def test_tree_sizes_around_mask_words(size: int) -> None:
    """Trees of 1 to 130 nodes, around every word of a mask, beside a sequence of another shape."""
    shapes = [(3, 0, random_tree(size)), (20, 0, chain_masks(2))]
    check(Case(shapes, heads=2, kv_heads=1, seed=size, width=16))


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 3000])
def test_contexts_around_blocks_and_tiles(context: int) -> None:
    """Contexts of 0 to thousands of rows, at, before and behind the borders of blocks and tiles."""
    check(Case([(context, 0, tree_masks([-1, 0, 0]))], heads=1, kv_heads=1, width=16, seed=context))


@settings(max_examples=15, deadline=None)
@given(
    batch=st.lists(sequences(), min_size=1, max_size=4),
    heads=st.sampled_from(((2, 2), (4, 2), (3, 1))),
    block_size=st.sampled_from((1, 4, 16)),
    window=st.sampled_from((None, 1, 3, 20)),
    softcap=st.sampled_from((None, 2.0)),
    splits=st.sampled_from((None, 1, 3)),
    seed=st.integers(0, 99),
)
def test_equals_reference(
    batch: list[tuple[int, int, list[int]]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    splits: int | None,
    seed: int,
) -> None:
    """On random ragged batches, head groupings, block sizes, windows, softcaps and splits."""
    case = Case(batch, heads=heads[0], kv_heads=heads[1], block_size=block_size, seed=seed)
    check(case, sliding_window=window, softcap=softcap, splits=splits)


@pytest.mark.parametrize("window", [None, 40])
def test_prefill_chunks_beside_trees(window: int | None) -> None:
    """One launch for a chunk behind a context, a first chunk, trees, a tree grown on earlier rows, and nothing."""
    grown = random_tree(70)
    shapes = [(90, 0, chain_masks(50)), (0, 0, chain_masks(40)), (30, 0, BRANCHES), (7, 60, grown[60:]), (9, 0, [])]
    check(Case(shapes, heads=2, kv_heads=1, width=16), sliding_window=window)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_query_heads_of_a_group(group: int) -> None:
    """Query heads that share a kv head share a tile, also where a tile's border cuts a query's heads apart."""
    check(Case([(20, 0, random_tree(23)), (5, 0, [1])], heads=2 * group, kv_heads=2, width=16))


@pytest.mark.parametrize("width", [8, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims(width: int, dtype: torch.dtype) -> None:
    """Head dims up to 256, those that are no power of two among them."""
    shapes = [(70, 0, BRANCHES), (3, 0, chain_masks(2))]
    check(Case(shapes, heads=4, kv_heads=2, width=width, dtype=dtype), scale=width**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 30}, {"softcap": 3.0}, {"splits": 1}])
def test_dtypes(dtype: torch.dtype, options: dict[str, float]) -> None:
    """All three dtypes, as exact as they allow."""
    check(Case([(150, 0, random_tree(40)), (0, 0, BRANCHES)], heads=2, kv_heads=1, width=16, dtype=dtype), **options)


def test_splits_change_nothing_but_rounding() -> None:
    """Any number of splits gives the same answer, also more than there are tiles; the same number the same bits."""
    case = Case([(300, 0, random_tree(12)), (10, 0, [1])], heads=1, kv_heads=1, width=16)
    expected = exact(case)
    for splits in (1, 2, 3, 4, 20):
        assert error(attend(case, splits=splits), expected) <= TOLERANCE[torch.float32]
    assert torch.equal(attend(case, splits=3), attend(case, splits=3))


def test_large_scores() -> None:
    """Scores of hundreds, of one sign and of both, neither overflow nor vanish."""
    case = Case([(70, 0, BRANCHES)], width=16)
    for scale in (20.0, -20.0):
        assert error(attend(case, scale=scale, splits=2), exact(case, scale=scale)) <= 1e-4  # exp of a rounded 800


def test_every_mask_bit_counts() -> None:
    """With one bit of one mask the other way round the answer is far from the right one."""
    case = Case([(12, 0, random_tree(70, seed=3))], heads=1, kv_heads=1, width=16)
    expected = exact(case, scale=0.1)
    before, masks = case.sequences[0]
    for row, bit in ((0, 0), (40, 5), (40, 39), (69, 0), (69, 31), (69, 32), (69, 63), (69, 64)):
        wrong = list(masks)
        wrong[row] ^= 1 << bit
        got = attend(case, layout=TreeLayout.of([(before, wrong)]), scale=0.1)
        off = (got.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert off[row] > 100 * TOLERANCE[torch.float32]
        assert off[torch.arange(70) != row].max() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("splits", [1, 4])
def test_every_block_counts(splits: int) -> None:
    """With another block in the place of any one, or a row of context more or less, the answer is far off."""
    case = Case([(200, 0, BRANCHES)], heads=1, kv_heads=1, width=16)
    expected = exact(case, scale=0.1)
    tables, contexts = case.tables.clone(), case.contexts.clone()
    (unused,) = set(range(len(case.keys))) - set(tables[0].tolist())
    for place in range(tables.shape[1]):
        case.tables = tables.clone()
        case.tables[0, place] = unused
        assert error(attend(case, scale=0.1, splits=splits), expected) > 100 * TOLERANCE[torch.float32]
    case.tables = tables
    for change in (-1, 1):
        case.contexts = contexts + change
        assert error(attend(case, scale=0.1, splits=splits), expected) > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("splits", [1, 3])
def test_garbage_of_others_stays_out(splits: int) -> None:
    """NaN in blocks of nobody, behind the last row, and table entries behind it, reach no output."""
    case = Case([(5, 0, chain_masks(2)), (30, 0, chain_masks(3)), (0, 0, BRANCHES)], width=16)
    expected = exact(case)
    owned = torch.zeros(case.keys.shape[:2], dtype=torch.bool)
    used = torch.cat([case.tables[0, :1], case.tables[1, :3], case.tables[2, :1]]).tolist()
    (spare,) = set(range(len(case.keys))) - set(used)
    wide = torch.full((3, 20), spare, dtype=torch.int32)
    for sequence, total in enumerate((7, 33, 6)):
        blocks = -(-total // 16)
        wide[sequence, :blocks] = case.tables[sequence, :blocks]
        for row in range(total):
            owned[case.tables[sequence, row // 16], row % 16] = True
    case.keys[~owned] = math.nan
    case.values[~owned] = math.nan
    case.tables = wide
    assert error(attend(case, splits=splits), expected) <= TOLERANCE[torch.float32]


def test_query_in_another_order_of_memory() -> None:
    """A query that is a transposed view, as models hand it over, gives what its copy gives."""
    case = Case([(40, 0, BRANCHES)], width=16)
    copied = attend(case)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(case), copied)


def test_nothing_to_do() -> None:
    """A step in which no sequence has rows returns no rows."""
    assert attend(Case([(4, 0, []), (0, 0, [])], width=16)).shape == (0, 4, 16)


def test_what_is_refused() -> None:
    """Head dims above 256, float64, heads that do not divide: refused by name, and run by the automatic choice."""
    shapes = [(4, 0, [1])]
    for case, message in (
        (Case(shapes, width=264), "head dim 264"),
        (Case(shapes, dtype=torch.float64), "float64"),
        (Case(shapes, heads=3, kv_heads=2), "3 query heads"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(case)
        assert message in str(refusal(case.query, case.keys))
    case = Case(shapes, width=264)
    torch.testing.assert_close(case.run("auto"), case.run("reference"), rtol=1e-5, atol=1e-5)


def test_one_entry_point() -> None:
    """`tree_attention` runs it under its name, and several layers of a step share a plan."""
    case = Case([(40, 0, BRANCHES), (3, 0, [1])], width=16)
    layout, expected = TreeLayout.of(case.sequences), exact(case)
    for name in ("query", "keys", "values", "tables", "contexts"):
        setattr(case, name, getattr(case, name).to(DEVICE))
    for _ in range(2):
        assert error(run(case, layout, "triton").cpu(), expected) <= TOLERANCE[torch.float32]
    assert len(layout.plans) == 1


def test_a_model_on_it() -> None:
    """A model's logits for a prefill and a batch of trees are those that the CPU path gives."""
    uri = "random:llama?layers=2&hidden=64&heads=4&kv_heads=2&vocab=100&context=256&intermediate=64"
    logits = []
    for implementation in ("cpu", "triton"):
        device = str(DEVICE) if implementation == "triton" else "cpu"
        runner = TreeRunner(load(uri, device=device), kv_tokens=256, implementation=implementation)
        blocks = [runner.pool.allocate(4) for _ in range(2)]
        runner.forward([chain_rows(own, 0, range(1, 30 + index)) for index, own in enumerate(blocks)])
        trees = [
            Rows(own, 29 + index, 0, range(6), [30, 30, 31, 31, 32, 31], BRANCHES, range(6))
            for index, own in enumerate(blocks)
        ]
        logits.append(torch.cat(runner.forward(trees)).cpu())
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
