"""Reserved layouts of the attention in torch operators; that it is right otherwise test_kernels_attention.py says."""

from __future__ import annotations

import pytest
import torch

from kernels import TreeLayout, chain_masks, static
from tests.test_kernels_attention import Case, tree_masks


def attend(case: Case, layout: TreeLayout, query: torch.Tensor, window: int | None = None) -> torch.Tensor:
    return static.tree_attention(
        query, case.keys, case.values, case.tables, case.contexts, layout, scale=0.35, sliding_window=window
    )


@pytest.mark.parametrize("window", [None, 4])
def test_a_reserved_layout_takes_other_steps(window: int | None) -> None:
    """One layout, filled with steps of other sizes one after another, gives each its own result and 0 elsewhere."""
    full = TreeLayout.of([(0, chain_masks(2))])
    layout = static.reserve(full, rows=12, sequences=3, sequence_rows=4, tree_rows=40)
    steps = [
        [(5, 0, chain_masks(2))],
        [(17, 0, tree_masks([-1, 0, 0, 1, -1])), (0, 0, chain_masks(3)), (9, 1, tree_masks([-1, -1, 1])[1:])],
        [(0, 0, []), (3, 0, chain_masks(1))],
        [(1, 20, chain_masks(12, before=20))],
    ]
    for number, step in enumerate(steps):
        case = Case(step, seed=number)
        expected = case.run("reference", sliding_window=window)
        query = torch.zeros((12, 4, 8))
        query[: len(case.query)] = case.query
        case.tables = torch.nn.functional.pad(case.tables, (0, 4, 0, 3 - len(step)))
        contexts, case.contexts = case.contexts, torch.zeros(3, dtype=torch.int32)
        case.contexts[: len(step)] = contexts
        if number:
            static.refill(layout, TreeLayout.of(case.sequences))
        got = attend(case, layout, query, window)
        torch.testing.assert_close(got[: len(case.query)], expected)
        assert not got[len(case.query) :].any()


def test_a_step_that_does_not_fit_is_refused() -> None:
    """More rows, sequences or tree rows than were reserved."""
    layout = static.reserve(TreeLayout.of([(0, [1])]), rows=4, sequences=2, sequence_rows=2, tree_rows=8)
    attend(Case([(3, 0, [1]), (0, 0, [])]), layout, torch.zeros((4, 4, 8)))
    for step in ([(0, chain_masks(5))], [(0, [1])] * 3, [(8, chain_masks(1, before=8))]):
        with pytest.raises(ValueError, match="do not fit"):
            static.refill(layout, TreeLayout.of(step))
