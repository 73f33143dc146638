"""What torch itself offers for the same step: scaled_dot_product_attention with a mask, and FlexAttention.

Both get what they like best: keys and values in one piece, copied there beforehand. Ours reads the paged cache.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu_cases import Problem

Call = Callable[[int], Tensor]


def ancestors(problem: Problem) -> Tensor:
    """(B, n, n) bool: which tree rows each query sees."""
    trees = [problem.layout.ancestors(index) for index in range(len(problem.sequences))]
    return torch.stack([torch.from_numpy(tree) for tree in trees]).to(problem.device)


def sdpa(problem: Problem) -> Call:
    """Query heads of a kv head folded into rows, which leaves keys and values as they are; an additive mask."""
    shape, batch = problem.shape, len(problem.sequences)
    context, rows = problem.sequences[0].context, problem.sequences[0].rows
    folded = shape.heads // shape.kv_heads
    dense = [problem.dense(layer) for layer in range(len(problem.caches))]
    total = context + rows
    # Rows of the mask begin at multiples of 16 elements, or torch copies it at every call.
    room = torch.zeros((batch, 1, folded, rows, -(-total // 16) * 16), dtype=shape.dtype, device=problem.device)
    room[..., context:total].masked_fill_(~ancestors(problem)[:, None, None], -math.inf)
    mask = room.flatten(2, 3)[..., :total].expand(-1, shape.kv_heads, -1, -1)
    query = problem.query.view(batch, rows, shape.kv_heads, folded, -1).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch, shape.kv_heads, folded * rows, -1).contiguous()

    def call(layer: int) -> Tensor:
        return scaled_dot_product_attention(query, *dense[layer], attn_mask=mask, scale=problem.scale)

    return call


def sdpa_rows(problem: Problem, result: Tensor) -> Tensor:
    """`sdpa`'s result as (N, H, D)."""
    batch, kv_heads, _, width = result.shape
    rows = problem.sequences[0].rows
    return result.view(batch, kv_heads, -1, rows, width).permute(0, 3, 1, 2, 4).reshape(batch * rows, -1, width)


@cache
def _flex(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    torch._dynamo.config.recompile_limit = 64
    # Compiled for each shape: with a batch that may change it does not choose its kernel for few queries.
    return torch.compile(flex_attention, dynamic=False)


def flex(problem: Problem) -> Call:
    """FlexAttention, compiled on a GPU, with a block mask: only blocks with tree rows test each pair."""
    from torch.nn.attention.flex_attention import create_block_mask

    shape, batch = problem.shape, len(problem.sequences)
    context, rows = problem.sequences[0].context, problem.sequences[0].rows
    dense = [problem.dense(layer) for layer in range(len(problem.caches))]
    query = problem.query.view(batch, rows, shape.heads, -1).transpose(1, 2).contiguous()
    tree = ancestors(problem)
    border = torch.tensor(context, device=problem.device)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < border) | tree[b, q, torch.clamp(k - border, min=0)]

    gpu = problem.device.type == "cuda"
    mask = create_block_mask(seen, batch, None, rows, context + rows, device=problem.device.type)
    run = _flex(gpu)

    def call(layer: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a CPU it is not compiled, and says so
            result: Tensor = run(
                query, *dense[layer], block_mask=mask, scale=problem.scale, enable_gqa=shape.heads != shape.kv_heads
            )
        return result

    return call


def flex_rows(problem: Problem, result: Tensor) -> Tensor:
    """`flex`'s result as (N, H, D)."""
    return result.transpose(1, 2).reshape(len(problem.layout), problem.shape.heads, -1)
