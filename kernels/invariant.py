"""Tree attention whose bits for a query depend on nothing but the query, its path's keys and its path's values.

A softmax over many keys is a sum, and a sum's last bits depend on its order. Here the order is a function of the
query's position alone, whoever shares the step, however the prompt was cut and whatever tree the query stands in:

* A query's keys are taken in the order of their positions, in pieces of `PIECE`; piece j holds the positions
  j * PIECE to (j + 1) * PIECE - 1, wherever those rows lie in the cache. Keys behind the query count as -inf.
* Every product is (lanes, D) @ (D, PIECE) or (lanes, PIECE) @ (PIECE, D), one shape for all: a *tile* of up to
  `LANES` queries (query heads that share a key/value head folded in) against one piece. Queries share a tile where
  they see the same keys: any queries of a sequence in committed pieces, queries of one path behind them.
* The largest score is exact in any order. Sums of exponentials are halved, log2(PIECE) times. Pieces are added up one
  after another, and one that a query sees nothing of adds exact zeros.

What is left to the library is that one product of one shape gives a lane the same bits wherever it stands in its tile
and in the batch. `graftree.models.steady` checks that at start-up, with everything else. Half precision is
computed in float32. On a GPU every call has the same number of tiles, the last ones unused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.layout import TreeLayout

PIECE = 64  # keys; a power of two
LANES = 16  # folded queries of a tile, or one query's where it has more heads per key/value head
_CHUNK = 1 << 22  # elements of the keys gathered at once: 16 MiB of float32

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Plan:
    """What does not depend on the layer; I tiles against one piece each, Q queries a tile.

    Attributes:
        lanes: (I * Q,) the packed query of each lane; lanes that are left over repeat one.
        slots: (I, KVH, PIECE) rows of the cache seen as (rows * KVH, D).
        hidden: (I, 1, Q, 1, PIECE) bool, which keys a lane does not see.
        places: (N, J) the lanes, numbered over all tiles, that hold a query's pieces; its first where it has fewer.
        pieces: per j the queries with a j-th piece (None = all) and the lanes that hold it.
        chunk: tiles of one product.
    """

    lanes: Tensor
    slots: Tensor
    hidden: Tensor
    places: Tensor
    pieces: Sequence[tuple[Tensor | None, Tensor]]
    chunk: int


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
    count, heads, width = query.shape
    kv_heads = key_cache.shape[2]
    folded = heads // kv_heads
    if not count:
        return torch.empty_like(query)
    name = ("invariant", sliding_window, folded)
    plan = tree.plans.get(name)
    if plan is None:
        plan = tree.plans[name] = _plan(
            block_tables, context_lens, tree, key_cache, sliding_window, max(1, LANES // folded)
        )
    tiles = len(plan.slots)
    q = (query.to(_wide(query.dtype)) * scale).index_select(0, plan.lanes).view(tiles, -1, kv_heads, folded, width)
    q = q.transpose(1, 2).reshape(tiles * kv_heads, -1, width)
    scores = q.new_empty((*q.shape[:2], PIECE))
    for part, k in _gathered(key_cache, plan, q.dtype):
        torch.bmm(q[part], k.transpose(1, 2), out=scores[part])
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    by_lane = scores.view(tiles, kv_heads, -1, folded, PIECE)
    by_lane.masked_fill_(plan.hidden, -torch.inf)
    top = _rows(by_lane.amax(-1)).index_select(0, plan.places.view(-1)).view(count, -1, heads).amax(1)
    top = top.index_select(0, plan.lanes).view(tiles, -1, kv_heads, folded).transpose(1, 2)
    by_lane.sub_(top[..., None]).exp_()
    weights, sums = _rows(_halved(by_lane)), torch.empty_like(q)
    for part, v in _gathered(value_cache, plan, q.dtype):
        torch.bmm(scores[part], v, out=sums[part])
    seen = _rows(sums.view(tiles, kv_heads, -1, folded, width))
    output, total = seen.new_zeros((count, heads, width)), weights.new_zeros((count, heads))
    for rows, places in plan.pieces:
        for whole, piece in ((output, seen), (total, weights)):
            if rows is None:
                whole += piece.index_select(0, places)
            else:
                whole.index_add_(0, rows, piece.index_select(0, places))
    return (output / total[..., None]).to(query.dtype)


def _gathered(cache: Tensor, plan: _Plan, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Of some tiles at a time, the products they are and the rows of the cache they see, (., PIECE, D)."""
    rows, (tiles, kv_heads, _) = cache.view(-1, cache.shape[-1]), plan.slots.shape
    for start in range(0, tiles, plan.chunk):
        slots = plan.slots[start : start + plan.chunk]
        found = rows.index_select(0, slots.reshape(-1)).to(dtype).view(-1, PIECE, rows.shape[-1])
        yield slice(start * kv_heads, start * kv_heads + len(found)), found


def _rows(by_lane: Tensor) -> Tensor:
    """(I, KVH, Q, G, ...) -> (I * Q, KVH * G, ...)."""
    tiles, kv_heads, lanes, folded, *rest = by_lane.shape
    return by_lane.transpose(1, 2).reshape(tiles * lanes, kv_heads * folded, *rest)


def _halved(x: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two: one half plus the other until one is left."""
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


@dataclass
class _Tiles:
    """Collects tiles; `lanes` queries each.

    Attributes:
        places: (N, J) as in `_Plan`, -1 where there is none.
    """

    lanes: int
    places: Ints
    queries: list[Ints] = field(default_factory=list)
    slots: list[Ints] = field(default_factory=list)
    visible: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    count: int = 0

    def add(self, queries: Ints, positions: Ints, slots: Ints, first: int, window: int | None) -> None:
        """One tile for each piece of a view.

        Args:
            queries: (<= lanes,) packed.
            positions: of theirs.
            slots: cache rows of the view in the order of their positions, from first * PIECE on.
            first: the view's first piece.
        """
        pieces = -(-len(slots) // PIECE)
        view = np.full(pieces * PIECE, slots[0])  # what is left over reads a row of the sequence's own
        view[: len(slots)] = slots
        repeated = np.minimum(np.arange(self.lanes), len(queries) - 1)
        at = (first * PIECE + np.arange(pieces * PIECE)).reshape(pieces, 1, PIECE)
        own = positions[repeated][None, :, None]
        visible = at <= own
        if window is not None:
            visible &= at > own - window
        for lane, (query, position) in enumerate(zip(queries, positions, strict=True)):
            reach = min(pieces, int(position) // PIECE + 1 - first)
            self.places[query, first : first + reach] = (self.count + np.arange(reach)) * self.lanes + lane
        self.queries.append(np.tile(queries[repeated], pieces))
        self.slots.append(view.reshape(pieces, PIECE))
        self.visible.append(visible)
        self.count += pieces

    def fill(self, multiple: int) -> None:
        """Repeat the first tile until their number is a multiple; nobody reads those."""
        for _ in range(-self.count % multiple):
            self.queries.append(self.queries[0][: self.lanes])
            self.slots.append(self.slots[0][:1])
            self.visible.append(self.visible[0][:1])


def _plan(
    block_tables: Tensor, context_lens: Tensor, tree: TreeLayout, cache: Tensor, window: int | None, lanes: int
) -> _Plan:
    tables, contexts = block_tables.cpu().numpy(), context_lens.tolist()
    block_size, kv_heads, width = cache.shape[1:]
    longest = max(context + length for context, length in zip(contexts, tree.tree_lens, strict=True))
    tiles = _Tiles(lanes, np.full((len(tree), -(-longest // PIECE)), -1, np.int64))
    for sequence, context in enumerate(contexts):
        if tree.query_lens[sequence]:
            _add(tiles, tree, sequence, context, tables[sequence], block_size, window)
    chunk = max(1, _CHUNK // (kv_heads * PIECE * width))
    if cache.device.type != "cpu":
        tiles.fill(chunk)
    slots = np.concatenate(tiles.slots)[:, None] * kv_heads + np.arange(kv_heads)[None, :, None]
    places, device = tiles.places, cache.device
    pieces: list[tuple[Tensor | None, Tensor]] = []
    for column in places.T:
        rows = np.flatnonzero(column >= 0)
        if len(rows):
            found = torch.from_numpy(column[rows]).to(device)
            pieces.append((None if len(rows) == len(tree) else torch.from_numpy(rows).to(device), found))
    places = np.where(places < 0, places[:, :1], places)[:, : len(pieces)]
    return _Plan(
        lanes=torch.from_numpy(np.concatenate(tiles.queries)).to(device),
        slots=torch.from_numpy(slots).to(device),
        hidden=torch.from_numpy(~np.concatenate(tiles.visible)[:, None, :, None]).to(device),
        places=torch.from_numpy(np.ascontiguousarray(places)).to(device),
        pieces=pieces,
        chunk=chunk,
    )


def _add(
    tiles: _Tiles,
    tree: TreeLayout,
    sequence: int,
    context: int,
    table: npt.NDArray[np.int32],
    block_size: int,
    window: int | None,
) -> None:
    """Tiles of one sequence: committed pieces for any of its queries, what lies behind them path by path."""
    packed, ancestors = tree.rows(sequence), tree.ancestors(sequence)
    count, before = len(packed), tree.tree_lens[sequence] - len(packed)
    positions = context + ancestors.sum(axis=1, dtype=np.int64) - 1
    first = context // PIECE

    def add(own: Ints, logical: Ints, piece: int) -> None:
        slots = table[logical // block_size].astype(np.int64) * block_size + logical % block_size
        tiles.add(own + packed.start, positions[own], slots, piece, window)

    every = np.arange(count)
    for start in range(0, count if first else 0, tiles.lanes):
        add(every[start : start + tiles.lanes], np.arange(first * PIECE), 0)
    left = np.ones(count, np.bool_)
    for last in range(count - 1, -1, -1):
        if not left[last]:
            continue
        path = np.flatnonzero(ancestors[last, before:] & left)
        left[path] = False
        for start in range(0, len(path), tiles.lanes):
            own = path[start : start + tiles.lanes]
            seen = np.flatnonzero(ancestors[own[-1]])
            add(own, np.concatenate([np.arange(first * PIECE, context), context + seen]), first)
