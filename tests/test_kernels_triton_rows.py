"""The write and the compaction kernel against plain indexing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rows import move_rows, write_rows
from tests.triton_cases import DEVICE


def numbers(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "width"), [(1, 8), (3, 80), (8, 256)])
def test_rows_are_written_where_they_belong(kv_heads: int, width: int, dtype: torch.dtype) -> None:
    """Keys and values of any layout in memory land in their slots, negative slots nowhere, nothing else changes."""
    keys, values = (numbers(50, kv_heads, width, seed=seed, dtype=dtype) for seed in (1, 2))
    key = numbers(kv_heads, 6, width, seed=3, dtype=dtype).transpose(0, 1)  # as a model hands it over
    value = numbers(6, kv_heads, 2 * width, seed=4, dtype=dtype)[..., :width]
    slots = torch.tensor([49, -1, 0, 17, 3, -1], device=DEVICE)
    kept = slots >= 0
    expected = [cache.index_copy(0, slots[kept], rows[kept]) for cache, rows in ((keys, key), (values, value))]
    write_rows(keys, values, slots, key, value, implementation="triton")
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def moved(rows: torch.Tensor, sources: Sequence[int], targets: Sequence[int], implementation: str) -> torch.Tensor:
    result = rows.clone()
    index = (torch.tensor(which, dtype=torch.int64, device=DEVICE) for which in (sources, targets))
    move_rows(result, *index, implementation=implementation)
    return result


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_accepted_rows_move_down_in_place(data: st.DataObject) -> None:
    """Any accepted path moves as if all its rows moved at once, though they overwrite rows that others leave."""
    accepted = sorted(data.draw(st.sets(st.integers(0, 69), min_size=1, max_size=50)))
    pairs = [(10 + node, 10 + place) for place, node in enumerate(accepted) if node != place]
    rows = numbers(3, 80, 2, 8)
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    expected = rows.clone()
    for source, target in pairs:
        expected[:, target] = rows[:, source]
    assert torch.equal(moved(rows, sources, targets, "triton"), expected)
    assert torch.equal(moved(rows, sources, targets, "torch"), expected)


def test_rows_change_places() -> None:
    """Within one round even a rotation is right: everything is read before anything is written."""
    rows = numbers(2, 20, 3, 80)
    sources, targets = [4, 5, 6, 7], [5, 6, 7, 4]
    assert torch.equal(moved(rows, sources, targets, "triton"), moved(rows, sources, targets, "torch"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_copied_to_another_sequence(dtype: torch.dtype) -> None:
    """Many rows, to places that none of them comes from; pairs without a source stay out."""
    rows = numbers(2, 100, 2, 80, dtype=dtype)
    sources, targets = list(range(0, 40)), list(range(99, 59, -1))
    assert torch.equal(moved(rows, sources, targets, "triton"), moved(rows, sources, targets, "torch"))
    assert torch.equal(moved(rows, [-1, 3], [5, 6], "triton"), moved(rows, [3], [6], "torch"))


def test_nothing_to_move_or_write() -> None:
    """No pairs and no rows are no launch."""
    rows = numbers(2, 10, 2, 8)
    assert torch.equal(moved(rows, [], [], "triton"), rows)
    none = torch.empty((0, 2, 8), device=DEVICE)
    write_rows(
        rows[0], rows[1], torch.empty(0, dtype=torch.int64, device=DEVICE), none, none, implementation="triton"
    )
    assert torch.equal(rows, numbers(2, 10, 2, 8))


def test_unknown_implementation() -> None:
    """An implementation that does not exist is refused by name."""
    with pytest.raises(ValueError, match="fastest"):
        moved(numbers(1, 4, 1, 8), [1], [0], "fastest")
