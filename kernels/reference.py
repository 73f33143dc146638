"""Tree attention as the formula says: one sequence, one query, one head at a time, in any precision.

    out[q, h] = sum_k softmax_k(cap(scale * <query[q, h], key[k, h // G]>)) * value[k, h // G]

over the rows k that q sees; cap(x) = softcap * tanh(x / softcap), or x. G = query heads per key/value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layout import TreeLayout


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
    """See `kernels.tree_attention`. Computes in float64 and returns the query's dtype."""
    block_size = key_cache.shape[1]
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    output = torch.zeros_like(query)
    for sequence, context_len in enumerate(context_lens.tolist()):
        tree_len = tree.tree_lens[sequence]
        for index, row in enumerate(tree.rows(sequence)):
            ancestors = [j for j in range(tree_len) if tree.masks[row] >> j & 1]
            positions = {j: j for j in range(context_len)}
            positions |= {context_len + j: context_len + depth for depth, j in enumerate(ancestors)}
            own = context_len + tree_len - tree.query_lens[sequence] + index
            seen = [
                logical
                for logical, position in positions.items()
                if sliding_window is None or position > positions[own] - sliding_window
            ]
            slots = [(int(block_tables[sequence, j // block_size]), j % block_size) for j in seen]
            for head in range(heads):
                kv_head = head * kv_heads // heads
                keys = torch.stack([key_cache[block, offset, kv_head] for block, offset in slots]).double()
                values = torch.stack([value_cache[block, offset, kv_head] for block, offset in slots]).double()
                scores = scale * (keys @ query[row, head].double())
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                output[row, head] = (torch.softmax(scores, dim=0) @ values).to(query.dtype)
    return output
