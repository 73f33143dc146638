"""Attention over a paged cache and a token tree.

implementation    where                what
reference         kernels/reference    the formula in float64, loop by loop
cpu               kernels/cpu          torch operators, padded groups; right on any device
invariant         kernels/invariant    torch operators in one order of summation; right on any device
static            kernels/static       torch operators over tensors of fixed shape; right on any device
triton            kernels/triton_*     one launch for the whole step, on a GPU (or in Triton's interpreter)
auto              here                 triton on a GPU where it can, cpu otherwise
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kernels.layout import TreeLayout, chain_masks

if TYPE_CHECKING:
    from torch import Tensor

IMPLEMENTATIONS = ("auto", "reference", "cpu", "invariant", "static", "triton")

__all__ = ["IMPLEMENTATIONS", "TreeLayout", "chain_masks", "tree_attention"]


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    tree: TreeLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Attention of a ragged step: each query sees its sequence's context and its own ancestors in the tree.

    The keys and values of this step's rows are in the cache already.

    Args:
        query: (N, H, D), the rows of all sequences one after another; H is a multiple of KVH.
        key_cache, value_cache: (num_blocks, block_size, KVH, D), contiguous, the query's dtype.
        block_tables: (B, M) int32, the blocks of each sequence; logical row r of sequence b lies in block
            block_tables[b, r // block_size]. Entries behind a sequence's last row are not read.
        context_lens: (B,) int32, committed rows of each sequence.
        tree: the tree rows behind them.
        scale: factor on query . key.
        sliding_window: a query at position p sees positions above p - sliding_window; None = all.
        softcap: scores become softcap * tanh(score / softcap); None = as they are.
        implementation: one of `IMPLEMENTATIONS`.

    Returns:
        (N, H, D), the query's dtype.

    Raises:
        ValueError: an unknown implementation, or what "triton" cannot run: head dims above 256, other dtypes than
            float16, bfloat16 and float32, query heads that are no multiple of the key/value heads.
    """
    # torch and triton are imported here so that a tier without a model can import the layout alone.
    if implementation == "reference":
        from kernels.reference import tree_attention as run
    elif implementation == "invariant":
        from kernels.invariant import tree_attention as run
    elif implementation == "static":
        from kernels.static import tree_attention as run
    elif implementation == "triton" or (implementation == "auto" and _triton_can(query, key_cache)):
        from kernels.triton_attention import tree_attention as run
    elif implementation in ("auto", "cpu"):
        from kernels.cpu import tree_attention as run
    else:
        raise ValueError(f"implementation = {implementation!r}: one of {', '.join(IMPLEMENTATIONS)}")
    return run(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        tree,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def _triton_can(query: Tensor, key_cache: Tensor) -> bool:
    if not query.is_cuda or find_spec("triton") is None:
        return False
    from kernels.triton_attention import refusal

    return refusal(query, key_cache) is None
