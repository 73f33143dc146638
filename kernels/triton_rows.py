"""Storing and moving rows of a paged cache, in Triton.

Both are copies: each byte is read once and written once. Pairs with a negative row are left out, so that padded steps
need no other launch.
"""
# mypy: allow-untyped-defs
# A kernel's parameters are Triton's values, which have no types in Python.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 16  # rows that a program has in its registers at once
_COLUMNS = 256


def write_rows(key_rows: Tensor, value_rows: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """See `kernels.rows.write_rows`. One program per row and 1024 of its elements."""
    count, kv_heads, width = key.shape
    if not count:
        return
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        key, value = key.contiguous(), value.contiguous()
    columns = min(1024, triton.next_power_of_2(kv_heads * width))
    _write[(count, triton.cdiv(kv_heads * width, columns))](
        key_rows,
        value_rows,
        slots,
        key,
        value,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        WIDTH=width,
        ROW=kv_heads * width,
        COLUMNS=columns,
        num_warps=4,
    )


def move_rows(rows: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See `kernels.rows.move_rows`. One program per plane and 256 of a row's elements, for all pairs."""
    planes, total, kv_heads, width = rows.shape
    if not len(sources):
        return
    _move[(triton.cdiv(kv_heads * width, _COLUMNS), planes)](
        rows,
        sources,
        targets,
        len(sources),
        total * kv_heads * width,
        ROW=kv_heads * width,
        PAIRS=_PAIRS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


@triton.jit
def _write(
    key_rows,
    value_rows,
    slots,
    key,
    value,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + row)
    inside = (column < ROW) & (slot >= 0)
    head, at = column // WIDTH, column % WIDTH
    k = tl.load(key + row * key_stride + head * key_head_stride + at, mask=inside)
    v = tl.load(value + row * value_stride + head * value_head_stride + at, mask=inside)
    tl.store(key_rows + slot * ROW + column, k, mask=inside)
    tl.store(value_rows + slot * ROW + column, v, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _move(rows, sources, targets, count, plane_size, ROW: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """A round reads all of its rows before it writes one: the barrier lies between."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    plane = rows + tl.program_id(1).to(tl.int64) * plane_size + column[None, :]
    for begin in range(0, count, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        source = tl.load(sources + pair, mask=pair < count, other=-1)
        target = tl.load(targets + pair, mask=pair < count, other=-1)
        inside = (source >= 0)[:, None] & (column < ROW)[None, :]
        moved = tl.load(plane + source[:, None] * ROW, mask=inside)
        tl.debug_barrier()
        tl.store(plane + target[:, None] * ROW, moved, mask=inside)
        tl.debug_barrier()
