"""Attention that reads the cache in pieces: right where it is used, and used where it should be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import TreeLayout, chain_masks, pieces, tree_attention
from kernels.pieces import Pieces
from tests.test_kernels_attention import Case, tree_masks

BRANCHES = tree_masks([-1, -1, 0, 1, 2, 0])


def run(case: Case, layout: TreeLayout, implementation: str, **options: float | None) -> torch.Tensor:
    return tree_attention(
        case.query,
        case.keys,
        case.values,
        case.tables,
        case.contexts,
        layout,
        scale=0.35,
        implementation=implementation,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 5])
def test_every_layer_uses_the_buffer_again(softcap: float | None, window: int | None) -> None:
    """Several layers of one step, lengths and numbers of queries mixed: each equals the reference."""
    shapes = [(40, 0, chain_masks(1)), (55, 2, BRANCHES[2:]), (0, 0, BRANCHES), (33, 0, chain_masks(3))]
    layout = None
    for layer in range(3):
        case = Case(shapes, seed=layer)
        layout = layout or TreeLayout.of(case.sequences)
        case.tables = Case(shapes, seed=0).tables
        options = {"softcap": softcap, "sliding_window": window}
        got = run(case, layout, "cpu", **options)
        torch.testing.assert_close(got, run(case, layout, "reference", **options), rtol=1e-5, atol=1e-5)
    assert layout is not None
    (plan,) = layout.plans.values()
    assert any(isinstance(group, Pieces) for group in plan)


def test_scattered_and_whole_sequences_side_by_side() -> None:
    """A sequence in too many pieces is copied, the others are not; both are right."""
    shapes = [(30, 0, chain_masks(2)), (6, 0, BRANCHES)]
    case = Case(shapes, block_size=1)
    case.tables[1] = torch.arange(len(case.tables[1]))  # in one piece, wherever the first one's rows are
    layout = TreeLayout.of(case.sequences)
    torch.testing.assert_close(run(case, layout, "cpu"), run(case, layout, "reference"), rtol=1e-5, atol=1e-5)
    (plan,) = layout.plans.values()
    assert [isinstance(group, Pieces) for group in plan] == [True, False]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=30))
def test_groups_are_at_least_half_full(shapes: list[tuple[int, int]]) -> None:
    """Every sequence is in one group, and no group's buffer is mostly padding or too large."""
    counts, lengths = [count for count, _ in shapes], [length for _, length in shapes]
    groups = pieces.partition(range(len(shapes)), counts, lengths, heads=9)
    assert sorted(sequence for group in groups for sequence in group) == list(range(len(shapes)))
    for group in groups:
        padded = sum(counts[s] for s in group) * max(lengths[s] for s in group)
        assert padded <= 2 * sum(counts[s] * lengths[s] for s in group)
        assert len(group) == 1 or padded * 9 <= 1 << 22
