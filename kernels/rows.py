"""Rows of a paged cache: storing a step's keys and values, and moving accepted rows into place.

On a GPU Triton kernels do it (`kernels.triton_rows`), elsewhere torch's own operators.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def write_rows(
    key_rows: Tensor, value_rows: Tensor, slots: Tensor, key: Tensor, value: Tensor, *, implementation: str = "auto"
) -> None:
    """Store one layer's keys and values.

    Args:
        key_rows, value_rows: (R, KVH, D), one layer's cache by physical rows, contiguous.
        slots: (N,) int64, where each row goes, no two in one place. On a GPU a negative one goes nowhere.
        key, value: (N, KVH, D), the cache's dtype.
        implementation: "torch", "triton", or "auto" by the device.
    """
    if _on_gpu(key_rows, implementation):
        from kernels.triton_rows import write_rows as write

        write(key_rows, value_rows, slots, key, value)
    else:
        key_rows.index_copy_(0, slots, key)
        value_rows.index_copy_(0, slots, value)


def move_rows(rows: Tensor, sources: Tensor, targets: Tensor, *, implementation: str = "auto") -> None:
    """Copy physical rows `sources` to `targets` in all planes, as if all at once where the order below is kept.

    Args:
        rows: (planes, R, KVH, D), contiguous; planes = keys and values of all layers.
        sources, targets: (n,) int64; no target twice. With Triton an earlier target may be a later source only within
            16 pairs, which holds where rows of a sequence move down in order (compaction), or none is both.
            Pairs with a negative source are left out there.
        implementation: as in `write_rows`.
    """
    if _on_gpu(rows, implementation):
        from kernels.triton_rows import move_rows as move

        move(rows, sources, targets)
    else:
        rows.index_copy_(1, targets, rows.index_select(1, sources))


def _on_gpu(tensor: Tensor, implementation: str) -> bool:
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation = {implementation!r}: one of auto, torch, triton")
    return implementation == "triton" or (implementation == "auto" and tensor.is_cuda and HAS_TRITON)
