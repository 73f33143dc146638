"""Tree attention from torch's own operators: the CPU's path, and a correct one on every other device.

What does not depend on the layer (which cache rows to read, who sees whom) is a `_Plan`, worked out at the first
layer of a step and kept in `TreeLayout.plans`. On the CPU in float32, sequences with few queries read the cache where
it is (`kernels.pieces`); of the others those of like shape share one padded call over a copy. Query heads that
share a key/value head are folded into the rows of one query, so keys are never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels import pieces
from kernels.layout import TreeLayout
from kernels.pieces import Pieces


@dataclass(frozen=True)
class _Group:
    """Sequences that one padded call serves.

    Attributes:
        rows: (B * n,) packed query row of each padded query; None = the packed rows in order, nothing padded.
        kept, targets: where the real ones are among the padded queries, and in the packed batch.
        slots: (B * T,) cache rows to read, or (start, stop) when they lie in one piece.
        mask: (B, 1, G * n, T) additive, the query's dtype.
    """

    batch: int
    rows: Tensor | None
    kept: Tensor | None
    targets: Tensor | None
    slots: Tensor | tuple[int, int]
    mask: Tensor


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
    """See `kernels.tree_attention`."""
    heads, width = query.shape[1:]
    kv_heads = key_cache.shape[2]
    folded = heads // kv_heads
    plan = tree.plans.get(("cpu", sliding_window, folded, query.dtype))
    if plan is None:
        plan = _plan(block_tables, context_lens, tree, key_cache.shape[1], sliding_window, folded, query)
        tree.plans["cpu", sliding_window, folded, query.dtype] = plan
    keys, values = key_cache.view(-1, kv_heads, width), value_cache.view(-1, kv_heads, width)
    output: Tensor | None = None
    if len(plan) != 1 or (plan[0].packed if isinstance(plan[0], Pieces) else plan[0].rows) is not None:
        output = torch.empty_like(query)
    for group in plan:
        if isinstance(group, Pieces):
            own = query if group.packed is None else query.index_select(0, group.packed)
            out = group.run(own, keys, values, scale, softcap)
            if group.packed is None or output is None:
                return out
            output.index_copy_(0, group.packed, out)
            continue
        batch = group.batch
        padded = query if group.rows is None else query.index_select(0, group.rows)
        # (B, n, KVH, G, D) -> (B, KVH, G * n, D)
        q = padded.view(batch, -1, kv_heads, folded, width).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, width)
        if isinstance(group.slots, tuple):
            start, stop = group.slots
            k, v = keys[start:stop], values[start:stop]
        else:
            k, v = keys.index_select(0, group.slots), values.index_select(0, group.slots)
        k = k.view(batch, -1, kv_heads, width).transpose(1, 2)
        v = v.view(batch, -1, kv_heads, width).transpose(1, 2)
        if softcap is None:
            out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
        else:
            scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
            out = torch.softmax(scores + group.mask, dim=-1) @ v
        out = out.view(batch, kv_heads, folded, -1, width).permute(0, 3, 1, 2, 4).reshape(-1, heads, width)
        if output is None:
            return out
        if group.targets is None:
            output.copy_(out)
        else:
            output.index_copy_(0, group.targets, out if group.kept is None else out.index_select(0, group.kept))
    return torch.empty_like(query) if output is None else output


def _plan(
    block_tables: Tensor,
    context_lens: Tensor,
    tree: TreeLayout,
    block_size: int,
    sliding_window: int | None,
    folded: int,
    query: Tensor,
) -> list[_Group | Pieces]:
    tables = block_tables.cpu().numpy()
    contexts = context_lens.tolist()
    starts = np.concatenate([[0], np.cumsum(tree.query_lens)]).astype(np.int64)
    lengths = [c + t for c, t in zip(contexts, tree.tree_lens, strict=True)]
    heads, counts = query.shape[1], tree.query_lens
    members = [sequence for sequence, count in enumerate(counts) if count]
    slots = {s: _slots(tables[s], np.arange(lengths[s]), block_size) for s in members}
    few = []
    alone = len(members) == 1 and bool(np.all(np.diff(slots[members[0]]) == 1))  # nothing to copy anyway
    # In half precision the scores would be too coarse.
    if query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64) and not alone:
        few = [s for s in members if pieces.fits(counts[s], lengths[s], slots[s], heads)]
    plan: list[_Group | Pieces] = []
    for group in map(sorted, pieces.partition(few, counts, lengths, heads)):
        packed = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in group])
        plan.append(
            pieces.build(
                [slots[s] for s in group],
                [tree.visible(s, contexts[s], sliding_window) for s in group],
                None if np.array_equal(packed, np.arange(len(tree))) else packed,
                kv_heads=heads // folded,
                folded=folded,
                dtype=query.dtype,
            )
        )
    rest = [s for s in members if s not in set(few)]
    return plan + [
        _group(group, tables, contexts, starts, tree, block_size, sliding_window, folded, query)
        for group in _partition(rest, counts, lengths)
    ]


def _slots(table: npt.NDArray[np.int32], logical: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    """Cache rows of a sequence's logical rows."""
    return table[logical // block_size].astype(np.int64) * block_size + logical % block_size


def _partition(members: list[int], query_lens: tuple[int, ...], lengths: list[int]) -> list[list[int]]:
    """Group sequences so that padding at most doubles the work of a call."""
    groups: list[list[int]] = []
    real = rows = length = 0
    for sequence in sorted(members, key=lambda s: (query_lens[s], lengths[s])):
        area = query_lens[sequence] * lengths[sequence]
        padded = max(rows, query_lens[sequence]) * max(length, lengths[sequence])
        if groups and padded * (len(groups[-1]) + 1) <= 2 * (real + area):
            groups[-1].append(sequence)
            real, rows, length = real + area, max(rows, query_lens[sequence]), max(length, lengths[sequence])
        else:
            groups.append([sequence])
            real, rows, length = area, query_lens[sequence], lengths[sequence]
    return groups


def _group(
    members: list[int],
    tables: npt.NDArray[np.int32],
    contexts: list[int],
    starts: npt.NDArray[np.int64],
    tree: TreeLayout,
    block_size: int,
    sliding_window: int | None,
    folded: int,
    query: Tensor,
) -> _Group:
    batch = len(members)
    lens = [tree.query_lens[s] for s in members]
    totals = [contexts[s] + tree.tree_lens[s] for s in members]
    most, longest = max(lens), max(totals)
    visible = np.zeros((batch, most, longest), np.bool_)
    visible[:, :, 0] = True  # padded queries see one row: a softmax over nothing would be NaN
    rows = np.empty((batch, most), np.int64)
    slots = np.empty((batch, longest), np.int64)
    for index, sequence in enumerate(members):
        n, total = lens[index], totals[index]
        visible[index, :n, :total] = tree.visible(sequence, contexts[sequence], sliding_window)
        rows[index] = np.minimum(np.arange(most), n - 1) + starts[sequence]
        logical = np.arange(longest)
        logical[total:] = 0  # padding reads the sequence's own first row: nobody else's values, always finite
        slots[index] = _slots(tables[sequence], logical, block_size)
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None, None]
    device = query.device
    ordered = batch * most == len(tree) and bool(np.all(rows.ravel() == np.arange(len(tree))))
    kept = np.flatnonzero(np.arange(most)[None] < np.asarray(lens)[:, None])
    flat = slots.ravel()
    whole = bool(np.all(np.diff(flat) == 1))
    return _Group(
        batch=batch,
        rows=None if ordered else torch.from_numpy(rows.ravel()).to(device),
        kept=None if len(kept) == batch * most else torch.from_numpy(kept).to(device),
        targets=None if ordered else torch.from_numpy(rows.ravel()[kept]).to(device),
        slots=(int(flat[0]), int(flat[-1]) + 1) if whole else torch.from_numpy(flat).to(device),
        mask=torch.from_numpy(mask)
        .to(device=device, dtype=query.dtype)
        .expand(batch, 1, folded, most, longest)
        .reshape(batch, 1, folded * most, longest),
    )
