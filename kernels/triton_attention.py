"""Tree attention on the GPU, in Triton: a ragged batch of trees and prefill chunks in one launch.

One program attends for a tile of folded queries (`kernels.triton_plan`) of one sequence and one key/value head, over
one of `splits` equal shares of the keys it sees: tiles of the committed context, which need no mask, then tiles of
the tree, which test one bit of the ancestor mask per score. Online softmax in float32 and base 2. With more than one
share (flash-decoding's split over the keys) a second kernel joins them in their order. No atomics: the same step on
the same GPU gives the same bits.

Memory traffic, per layer and sequence with C context rows, n tree rows and E bytes per element:

    keys and values    2 * KVH * D * E * (C + n)     read once per tile of the sequence, so once while n * G fits
                                                     block_m; more tiles run side by side, and all but the first find
                                                     the rows in the L2 cache
    block table        4 * KVH * (C + n) / block_size, times the lanes that ask for the same entry: L1's affair
    queries, output    2 * n * H * D * E
    masks              8 * n * ceil(n / 64) per kv head
    shares             8 * n * H * (D + 1) * splits  written and read again, where splits > 1; mostly within L2

Keys and values dominate: in an 8B model (KVH 8, D 128, 16 bits) 4 KiB for each context row. Each of their elements is
used by n * G queries, 2 * n * G operations for 2 bytes: memory sets the pace up to n * G of about 100 on a Hopper
GPU, the tensor cores beyond.
"""
# mypy: allow-untyped-defs
# A kernel's parameters are Triton's values, which have no types in Python.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import TreeLayout
from kernels.triton_plan import FIELDS, MAX_SPLITS, WORD, Plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
INTERPRETED = bool(triton.knobs.runtime.interpret)


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
    splits: int | None = None,
) -> Tensor:
    """See `kernels.tree_attention`. A row without a key (its mask is 0 and it has no context) gives zeros.

    Args:
        splits: programs that share a tile's keys; None = by the GPU's size.

    Raises:
        ValueError: what `refusal` says, or tensors whose shapes do not fit each other.
    """
    reason = refusal(query, key_cache)
    if reason is not None:
        raise ValueError(f"triton tree attention: {reason}")
    heads, width = query.shape[1:]
    _, block_size, kv_heads, _ = key_cache.shape
    key = ("triton", sliding_window, splits)
    plan = tree.plans.get(key)
    if plan is None:
        plan = tree.plans[key] = Plan(
            tree,
            heads=heads,
            folded=heads // kv_heads,
            head_dim=width,
            itemsize=query.element_size(),
            longest=block_tables.shape[1] * block_size,
            window=sliding_window,
            device=query.device,
            splits=splits,
        )
    if len(query) != plan.rows:
        raise ValueError(f"triton tree attention: {len(query)} query rows for a step of {plan.rows}")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not plan.rows:
        return output
    if query.stride(-1) != 1:
        query = query.contiguous()
    if scale < 0 and softcap is None:  # the kernel's factor is positive
        query, scale = -query, -scale
    # softcap * tanh(x / softcap) = softcap * (1 - 2 / (exp(2 x / softcap) + 1))
    factor, bend = (scale * _LOG2_E, 0.0) if softcap is None else (softcap * _LOG2_E, 2 * _LOG2_E * scale / softcap)
    tiling = plan.tiling
    _attend[(kv_heads, len(plan.tiles), plan.splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        plan.tiles,
        plan.masks,
        plan.depths,
        output,
        plan.partial,
        plan.weights,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        plan.splits,
        plan.rows * heads,
        sliding_window or 0,
        factor,
        bend,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        WINDOWED=sliding_window is not None,
        CAPPED=softcap is not None,
        SPLIT=plan.splits > 1,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_T=tiling.block_t,
        BLOCK_D=tiling.block_d,
        UPCAST=INTERPRETED,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if plan.splits > 1:
        _join[(plan.rows * heads,)](
            plan.partial,
            plan.weights,
            output,
            plan.splits,
            WIDTH=width,
            BLOCK_D=tiling.block_d,
            MOST=MAX_SPLITS,
            CHUNK=16,
            num_warps=4,
        )
    return output


def refusal(query: Tensor, key_cache: Tensor) -> str | None:
    """Why these cannot be attended with here; None = they can."""
    heads, width = query.shape[1:]
    kv_heads = key_cache.shape[2]
    if query.dtype not in DTYPES or key_cache.dtype != query.dtype:
        return (
            f"query {query.dtype} and cache {key_cache.dtype}, wanted one of {', '.join(map(str, DTYPES))} for both"
        )
    if width > MAX_HEAD_DIM or key_cache.shape[3] != width:
        return f"head dim {width} with a cache of {key_cache.shape[3]}, wanted the same, at most {MAX_HEAD_DIM}"
    if heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} key/value heads"
    if not query.is_cuda and not INTERPRETED:
        return f"tensors on {query.device}, wanted a GPU (or TRITON_INTERPRET=1 when triton is imported)"
    return None


_LOG2_E = math.log2(math.e)
_FIELDS, _WORD = tl.constexpr(FIELDS), tl.constexpr(WORD)  # kernels see no other globals


@triton.jit
def _load(
    keys_at,
    values_at,
    block,
    at,
    inside,
    in_width,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    CHECKED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """(rows, BLOCK_D) keys and values of logical rows `at` in `block`; CHECKED: zeros for those not `inside`."""
    offset = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE)[:, None] * ROW
    if CHECKED or PADDED:
        mask = inside[:, None] & in_width[None, :]
        k = tl.load(keys_at + offset, mask=mask, other=0.0)
        v = tl.load(values_at + offset, mask=mask, other=0.0)
    else:
        k, v = tl.load(keys_at + offset), tl.load(values_at + offset)
    return k, v


@triton.jit
def _scores(query, keys, bend, CAPPED: tl.constexpr, UPCAST: tl.constexpr):
    """(BLOCK_M, tile) scores; CAPPED: tanh of `bend` times half of them. The interpreter multiplies bfloat16 as if it
    were integers: UPCAST."""
    if UPCAST:
        scores = tl.dot(query.to(tl.float32), tl.trans(keys).to(tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if CAPPED:
        scores = 1.0 - 2.0 / (tl.exp2(scores * bend) + 1.0)
    return scores


@triton.jit
def _fold(scores, factor, values, top, total, out, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """Add a tile to the running softmax of factor * scores in base 2, factor > 0. MASKED: a row may be all -inf.

    The factor comes in behind the maximum: then it is a part of the exponent's multiply-add and costs nothing.
    """
    new = tl.maximum(top, tl.max(scores, 1) * factor)
    base = new
    if MASKED:
        base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    out = out * shrink[:, None]
    if UPCAST:
        out += tl.dot(weights.to(values.dtype).to(tl.float32), values.to(tl.float32), input_precision="ieee")
    else:
        out = tl.dot(weights.to(values.dtype), values, out, input_precision="ieee")
    return new, total, out


@triton.jit(do_not_specialize=["table_stride", "splits", "all_rows", "window"])
def _attend(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    tiles,
    masks,
    depths,
    output,
    partial,
    shares,
    query_stride,
    head_stride,
    table_stride,
    splits,
    all_rows,
    window,
    factor,
    bend,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (KVH, tiles, splits): heads run side by side, since their rows lie side by side in memory."""
    head = tl.program_id(0)
    split = tl.program_id(2)
    record = tiles + tl.program_id(1) * _FIELDS
    sequence = tl.load(record)
    start = tl.load(record + 1)
    count = tl.load(record + 2)
    first = tl.load(record + 3)
    mask_start = tl.load(record + 4)
    words = tl.load(record + 5)
    tree_end = tl.load(record + 6)
    if count == 0:  # room of a reserved plan
        return
    context = tl.load(context_lens + sequence, mask=sequence >= 0, other=0)
    table = block_tables + sequence.to(tl.int64) * table_stride

    offs_n = tl.arange(0, BLOCK_N)
    offs_t = tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    in_width = offs_d < WIDTH
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROW: tl.constexpr = KV_HEADS * WIDTH
    PADDED: tl.constexpr = WIDTH < BLOCK_D
    folded = first + tl.arange(0, BLOCK_M)
    own = folded // GROUP
    real = own < count
    row = (start + own).to(tl.int64)
    query_head = head * GROUP + folded % GROUP
    q = tl.load(
        query + row[:, None] * query_stride + query_head[:, None] * head_stride + offs_d[None, :],
        mask=real[:, None] & in_width[None, :],
        other=0.0,
    )
    keys_at = key_cache + head * WIDTH + offs_d[None, :]
    values_at = value_cache + head * WIDTH + offs_d[None, :]

    # The keys are context tiles from row `low` on, then tree tiles; each split takes its share of these units.
    low = 0
    if WINDOWED:
        depth = tl.load(depths + row, mask=real, other=1 << 30)
        unseen = context + depth - window  # the last context row that is out of sight
        low = tl.minimum(tl.maximum(context + tl.min(depth, 0) - window + 1, 0), context) // BLOCK_N * BLOCK_N
    whole = (context - low) // BLOCK_N
    context_units = (context - low + BLOCK_N - 1) // BLOCK_N
    units = context_units + (tree_end + BLOCK_T - 1) // BLOCK_T
    begin = units * split // splits
    end = units * (split + 1) // splits

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Each tile's blocks are looked up one tile ahead: were the look-up part of a tile's own loads, Triton would not
    # have the loads of several tiles in flight.
    at = low + begin * BLOCK_N + offs_n
    block = tl.load(table + at // BLOCK_SIZE, mask=at < context, other=0)
    for _ in range(begin, tl.minimum(end, whole)):
        k, v = _load(keys_at, values_at, block, at, at >= 0, in_width, BLOCK_SIZE, ROW, False, PADDED)
        scores = _scores(q, k, bend, CAPPED, UPCAST)
        if WINDOWED:
            scores = tl.where(at[None, :] > unseen[:, None], scores, float("-inf"))
        at += BLOCK_N
        block = tl.load(table + at // BLOCK_SIZE, mask=at < context, other=0)
        top, total, out = _fold(scores, factor, v, top, total, out, WINDOWED, UPCAST)
    if (begin <= whole) & (whole < tl.minimum(end, context_units)):
        at = low + whole * BLOCK_N + offs_n
        inside = at < context
        block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0)
        k, v = _load(keys_at, values_at, block, at, inside, in_width, BLOCK_SIZE, ROW, True, PADDED)
        seen = inside[None, :]
        if WINDOWED:
            seen = seen & (at[None, :] > unseen[:, None])
        scores = tl.where(seen, _scores(q, k, bend, CAPPED, UPCAST), float("-inf"))
        top, total, out = _fold(scores, factor, v, top, total, out, True, UPCAST)
    limit = context + tree_end
    first_tree = tl.maximum(begin, context_units)
    first_bit = (first_tree - context_units) * BLOCK_T
    at = context + first_bit + offs_t
    block = tl.load(table + at // BLOCK_SIZE, mask=at < limit, other=0)
    words_at = masks + mask_start + own * words
    word = tl.load(words_at + first_bit // _WORD, mask=real & (first_bit < tree_end), other=0)
    for unit in range(first_tree, end):
        bit = (unit - context_units) * BLOCK_T
        inside = at < limit
        k, v = _load(keys_at, values_at, block, at, inside, in_width, BLOCK_SIZE, ROW, True, PADDED)
        ancestor = ((word[:, None] >> (bit % _WORD + offs_t)[None, :]) & 1) != 0
        at += BLOCK_T
        block = tl.load(table + at // BLOCK_SIZE, mask=at < limit, other=0)
        word = tl.load(words_at + (bit + BLOCK_T) // _WORD, mask=real & (bit + BLOCK_T < tree_end), other=0)
        scores = _scores(q, k, bend, CAPPED, UPCAST)
        scores = tl.where(ancestor & inside[None, :], scores, float("-inf"))
        top, total, out = _fold(scores, factor, v, top, total, out, True, UPCAST)

    known = real & (total > 0)
    total = tl.where(known, total, 1.0)
    out = out / total[:, None]
    line = row * HEADS + query_head
    if SPLIT:
        line += split.to(tl.int64) * all_rows
        tl.store(shares + line, tl.where(known, top + tl.log2(total), float("-inf")), mask=real)
        tl.store(partial + line[:, None] * WIDTH + offs_d[None, :], out, mask=known[:, None] & in_width[None, :])
    else:
        out = out.to(output.dtype.element_ty)
        tl.store(output + line[:, None] * WIDTH + offs_d[None, :], out, mask=real[:, None] & in_width[None, :])


@triton.jit(do_not_specialize=["splits"])
def _join(
    partial,
    shares,
    output,
    splits,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (N * H,): the shares of one query head's keys, weighted by what each weighs in the whole softmax."""
    line = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    offs_d = tl.arange(0, BLOCK_D)
    every = tl.arange(0, MOST)
    weighs = tl.load(shares + every * rows + line, mask=every < splits, other=float("-inf"))
    top = tl.max(weighs, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(weighs - top), 0)
    out = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, splits, CHUNK):
        split = begin + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(shares + split * rows + line, mask=split < splits, other=float("-inf")) - top)
        part = tl.load(
            partial + (split.to(tl.int64)[:, None] * rows + line) * WIDTH + offs_d[None, :],
            mask=(weight > 0)[:, None] & (offs_d < WIDTH)[None, :],
            other=0.0,
        )
        out += tl.sum(part * weight[:, None], 0)
    out = out / tl.where(total > 0, total, 1.0)
    tl.store(output + line * WIDTH + offs_d, out.to(output.dtype.element_ty), mask=offs_d < WIDTH)
