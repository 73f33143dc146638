"""Plans of the Triton kernel: their size, their contents, and steps that share one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import TreeLayout, chain_masks
from kernels.triton_plan import MAX_SPLITS, Plan, Tiling, choose_splits, refill, reserve
from tests.test_kernels_attention import Case, tree_masks
from tests.triton_cases import TOLERANCE, attend, error, exact

BRANCHES = tree_masks([-1, -1, 0, 1, 2, 0])
STEPS = (
    [(40, 0, BRANCHES), (3, 0, [1]), (17, 0, chain_masks(5))],
    [(90, 2, BRANCHES[2:]), (0, 0, [])],
    [(0, 0, chain_masks(16))],
    [(5, 0, [1]), (33, 0, [1]), (100, 0, [1]), (64, 0, [1])],
)


@pytest.mark.parametrize("splits", [1, 3])
def test_steps_in_turn_through_one_plan(splits: int) -> None:
    """What a CUDA graph replays: one plan takes steps of other shapes in turn; rows of nobody become zeros."""
    first = Case(STEPS[0], width=16)
    static = reserve(TreeLayout.of(first.sequences), rows=16, sequences=4, sequence_rows=6, tree_rows=16)
    plan = None
    for seed, shapes in enumerate((STEPS[0], *STEPS[1:], STEPS[0])):
        case = Case(shapes, width=16, seed=seed)
        if plan is not None:
            refill(static, TreeLayout.of(case.sequences))
        spare, expected = 16 - len(case.query), exact(case)
        # More sequences than the step has: the tables' other rows belong to nobody.
        case.tables = torch.nn.functional.pad(case.tables, (0, 0, 0, 4 - len(case.tables)))
        case.contexts = torch.nn.functional.pad(case.contexts, (0, 4 - len(case.contexts)))
        got = attend(case, layout=static, splits=splits, rows=spare)
        plans = [value for value in static.plans.values() if isinstance(value, Plan)]
        assert len(plans) == 1
        assert plan in (None, plans[0])
        plan = plans[0]
        assert error(got[: len(case.query)], expected) <= TOLERANCE[torch.float32]
        assert not got[len(case.query) :].any()


def test_sequences_without_rows_and_without_context_do_no_harm() -> None:
    """A padded batch: sequences whose length is 0 and whose rows see nothing give zeros, the others are right."""
    case = Case([(40, 0, BRANCHES), (0, 0, [0, 0]), (3, 0, [1])], width=16)
    got = attend(case, splits=2)
    alone = Case([(40, 0, BRANCHES)], width=16)
    alone.query, alone.keys, alone.values = case.query[:6], case.keys, case.values
    alone.tables = case.tables[:1]
    assert error(got[:6], exact(alone)) <= TOLERANCE[torch.float32]
    assert not got[6:8].any()
    assert got[8].isfinite().all()


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ([(0, 0, chain_masks(17))], "17 rows"),
        ([(5, 0, [1])] * 5, "5 sequences"),
        ([(5, 300, [1])], "mask words"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(shapes: list[tuple[int, int, list[int]]], what: str) -> None:
    """More rows, sequences or mask words than were reserved are an error, and the query must fill the plan."""
    case = Case(STEPS[3], width=16)
    static = reserve(TreeLayout.of(case.sequences), rows=4, sequences=4, sequence_rows=1, tree_rows=1)
    attend(case, layout=static, splits=1)
    with pytest.raises(ValueError, match=what):
        refill(static, TreeLayout.of([(before, masks) for _, before, masks in shapes]))
    with pytest.raises(ValueError, match="5 query rows for a step of 4"):
        attend(case, layout=static, splits=1, rows=1)


@given(programs=st.integers(1, 5000), longest=st.integers(0, 200_000), slots=st.integers(1, 400))
def test_splits_fill_the_gpu(programs: int, longest: int, slots: int) -> None:
    """No more splits than the context is worth; a last wave at least nine tenths as full as with fewer or more."""
    splits = choose_splits(programs, longest, slots)
    most = max(1, -(-longest // 128))
    assert 1 <= splits <= min(most, MAX_SPLITS)

    def busy(count: int) -> float:
        return count * programs / (-(-count * programs // slots) * slots)

    others = range(1, min(most, 1 + slots // programs, MAX_SPLITS) + 1)
    assert busy(splits) >= 0.9 * max(map(busy, others))


@given(
    rows=st.integers(1, 5000),
    head_dim=st.integers(1, 256),
    itemsize=st.sampled_from((2, 4)),
    shared=st.sampled_from((99 << 10, 163 << 10, 227 << 10)),
)
def test_tiles_suit_the_gpu(rows: int, head_dim: int, itemsize: int, shared: int) -> None:
    """At least 16 rows and no more than needed, powers of two, tree tiles inside mask words; buffers fit."""
    tiling = Tiling.choose(rows, head_dim, itemsize, shared)
    assert tiling.block_d >= max(16, head_dim)
    assert tiling.block_m == 16 or tiling.block_m < 2 * rows
    assert 64 % tiling.block_t == 0
    for size in (tiling.block_m, tiling.block_n, tiling.block_t, tiling.block_d):
        assert size >= 16
        assert size & (size - 1) == 0
    buffers = tiling.stages if tiling.block_m >= 64 else tiling.stages - 1
    rows_in_memory = tiling.block_m + 2 * tiling.block_n * buffers
    assert tiling.resident * rows_in_memory * tiling.block_d * itemsize <= shared
