"""Tree attention over tensors of fixed shape: what a step is stands in tensors alone, nothing of it in Python.

So a launch that was recorded once (a CUDA graph) is right for every later step that is written into the same
tensors (`reserve`, `refill`, as in `kernels.triton_plan`). Torch operators on any device; each sequence's queries are
padded to the rows of the whole step and its context to the width of its block table, so it is for small steps, and
for checking what other implementations make of reserved layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.layout import TreeLayout

_PLAN, _CAPACITY = "static", "static capacity"

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class _Capacity:
    """Room for N rows, B sequences and so many tree rows of each."""

    rows: int
    sequences: int
    tree_rows: int


@dataclass(frozen=True)
class _Plan:
    """P = N, the padded queries of each sequence.

    Attributes:
        rows: (B, P) int64 packed row of each padded query; what is left over repeats row 0.
        places: (N,) int64 where each packed row is among the padded queries, counted over all sequences.
        sequences: (N,) int64 whose each packed row is; rows of nobody count as the first one's.
        nobody: (N, 1, 1) bool, the packed rows that no sequence has.
        ancestors: (N, W) uint8 bit sets over W * 8 tree rows of the row's sequence, lowest bit first.
        tree_lens: (B,) int64.
    """

    rows: Tensor
    places: Tensor
    sequences: Tensor
    nobody: Tensor
    ancestors: Tensor
    tree_lens: Tensor


def reserve(tree: TreeLayout, *, rows: int, sequences: int, sequence_rows: int, tree_rows: int) -> TreeLayout:
    """A layout like this one whose plan has room for other steps. The query has `rows` rows.

    Args:
        rows, sequences: of a step, at most.
        sequence_rows: of one sequence, as expected; of no effect here.
        tree_rows: of one sequence in the cache, at most.
    """
    return TreeLayout(tree.query_lens, tree.tree_lens, tree.masks, {_CAPACITY: _Capacity(rows, sequences, tree_rows)})


def refill(static: TreeLayout, tree: TreeLayout) -> None:
    """Put a step into the plan of a layout from `reserve`; it is there after its first use.

    Raises:
        ValueError: the step does not fit.
    """
    plan: _Plan = static.plans[_PLAN]
    for name, array in _arrays(tree, static.plans[_CAPACITY]).items():
        getattr(plan, name).copy_(torch.from_numpy(array))


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
) -> Tensor:
    """See `kernels.tree_attention`. Rows that no sequence has give 0."""
    plan = tree.plans.get(_PLAN)
    if plan is None:
        capacity = tree.plans.get(_CAPACITY) or _Capacity(
            len(tree), len(tree.query_lens), max(tree.tree_lens, default=0)
        )
        arrays = _arrays(tree, capacity)
        plan = _Plan(**{name: torch.from_numpy(array).to(query.device) for name, array in arrays.items()})
        tree.plans[_PLAN] = plan
    # At every layer anew: what a recorded launch was given from outside it would keep.
    slots, visible = _view(plan, block_tables, context_lens, key_cache.shape[1], sliding_window)
    (heads, width), kv_heads, batch = query.shape[1:], key_cache.shape[2], len(block_tables)
    folded = heads // kv_heads
    # (B, P, KVH, G, D) -> (B, KVH, G * P, D): query heads that share keys are rows of one query.
    q = query[plan.rows].view(batch, -1, kv_heads, folded, width).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, -1, width)
    k = key_cache.view(-1, kv_heads, width)[slots].transpose(1, 2)
    v = value_cache.view(-1, kv_heads, width)[slots].transpose(1, 2)
    mask = visible.repeat(1, 1, folded, 1)
    if softcap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
        out = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ v
    out = out.view(batch, kv_heads, folded, -1, width).permute(0, 3, 1, 2, 4).reshape(-1, heads, width)
    return out[plan.places].masked_fill_(plan.nobody, 0)


def _arrays(tree: TreeLayout, capacity: _Capacity) -> Arrays:
    count, most, width = len(tree), capacity.rows, -(-capacity.tree_rows // 8)
    lens = np.array(tree.query_lens, np.int64)
    longest = max(tree.tree_lens, default=0)
    if count > most or len(lens) > capacity.sequences or longest > capacity.tree_rows:
        raise ValueError(f"{count} rows, {len(lens)} sequences, {longest} tree rows do not fit {capacity}")
    owner = np.repeat(np.arange(len(lens)), lens)
    within = np.arange(count) - np.repeat(np.cumsum(lens) - lens, lens)
    rows = np.zeros((capacity.sequences, most), np.int64)
    rows[owner, within] = np.arange(count)
    sequences, places = np.zeros((2, most), np.int64)
    sequences[:count], places[:count] = owner, owner * most + within
    ancestors = np.zeros((most, width), np.uint8)
    bits = b"".join(mask.to_bytes(width, "little") for mask in tree.masks)
    ancestors[:count] = np.frombuffer(bits, np.uint8).reshape(count, width)
    tree_lens = np.zeros(capacity.sequences, np.int64)
    tree_lens[: len(lens)] = tree.tree_lens
    return {
        "rows": rows,
        "places": places,
        "sequences": sequences,
        "nobody": (np.arange(most) >= count)[:, None, None],
        "ancestors": ancestors,
        "tree_lens": tree_lens,
    }


def _view(
    plan: _Plan, block_tables: Tensor, context_lens: Tensor, block_size: int, sliding_window: int | None
) -> tuple[Tensor, Tensor]:
    """(B, T) cache rows of each sequence's logical rows, and (B, 1, P, T) who sees which; T = the tables' width."""
    logical = torch.arange(block_tables.shape[1] * block_size, device=block_tables.device)
    contexts = context_lens.long()
    # Behind its last row a sequence reads its first one again: what was never written may be NaN.
    inside = torch.where(logical < (contexts + plan.tree_lens)[:, None], logical, 0)
    slots = block_tables.long().gather(1, inside // block_size) * block_size + inside % block_size

    bits = torch.arange(8, device=block_tables.device, dtype=torch.uint8)
    tree = (plan.ancestors[:, :, None] >> bits & 1).flatten(1).long()  # (N, W * 8)
    own = contexts[plan.sequences][:, None]
    node = logical - own
    in_tree = (node >= 0) & (node < tree.shape[1])
    node = node.clamp(0, tree.shape[1] - 1)
    sees_context, sees_tree = logical < own, tree.bool()
    if sliding_window is not None:
        depth = tree.sum(1, keepdim=True)
        sees_context = sees_context & (logical > own + depth - 1 - sliding_window)
        behind = tree.flip(1).cumsum(1).flip(1) - tree  # ancestors behind each tree row: each is a position further
        sees_tree = sees_tree & (behind < sliding_window)
    seen = sees_context | (in_tree & sees_tree.gather(1, node))  # (N, T)
    padded = seen[plan.rows]
    padded[:, :, 0] |= ~padded.any(2)  # a padded query may see nothing: a softmax over nothing would be NaN
    return slots, padded[:, None]
