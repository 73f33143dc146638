"""`Plan`: what the Triton kernel needs of a step's layout, in device tensors, packed once per step.

A sequence's queries are folded: its row f of a key/value head is query f // G, query head f % G of that head's group
(G = query heads per key/value head). A tile is BLOCK_M folded rows of one sequence; all tiles of a step, trees and
prefill chunks alike, are one launch.

Nothing here is read back from the device. How much context a sequence has is known to the kernel alone; the host
knows a bound, the width of the block tables, and sizes the launch by it.

A CUDA graph replays a launch of fixed size. `reserve` makes a layout's plans larger than the layout, `refill` puts
another step into the same device memory:

    static = reserve(TreeLayout.of(...), rows=64, sequences=8, sequence_rows=8, tree_rows=16)
    tree_attention(..., static, ...)                            # once outside the graph, then once captured
    refill(static, TreeLayout.of(...)); graph.replay()          # each step, on the stream that replays
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.layout import TreeLayout

FIELDS = 8  # int32 of a tile's record, the last one unused
WORD = 64  # tree rows of a mask word
MAX_SPLITS = 256
_MIN_SPLIT = 128  # context rows that are worth a program of their own
_TILE, _SCRATCH = 16 << 10, 1536  # the latter for sums over warps, and what the driver takes
_NO_GPU = 4, 227 << 10  # few processors, so that the interpreter's launches stay small; Hopper's shared memory
_CAPACITY = "triton capacity"


@dataclass(frozen=True)
class Tiling:
    """One launch configuration.

    Attributes:
        block_m: folded query rows of a tile; tl.dot wants 16 or more.
        block_n: context rows of a tile.
        block_t: tree rows of a tile; divides `WORD`.
        block_d: head dim, padded to a power of two.
        warps, stages: of the launch.
        resident: programs that share a multiprocessor.
    """

    block_m: int
    block_n: int
    block_t: int
    block_d: int
    warps: int
    stages: int
    resident: int

    @classmethod
    def choose(cls, rows: int, head_dim: int, itemsize: int, shared: int) -> Tiling:
        """For sequences of up to `rows` folded rows, on a multiprocessor with `shared` bytes for its programs.

        A tile of keys or of values is `_TILE` bytes. Memory is busy while about 40 KiB per multiprocessor are on
        their way (Hopper: 4 TB/s and 1 us over 132 of them), so `stages` is as large as fits, up to 4. Two programs
        hide each other's pauses, as long as the accumulator (block_m, block_d) leaves each half of the registers.
        From 64 rows on Triton's products read shared memory (wgmma), which takes one buffer more of keys and values,
        and none for the weights. In float32 the products run on the plain units, and tiles stay small.
        """
        block_d = max(16, _power_of_two(head_dim))
        block_n = max(16, min(128, _TILE // (block_d * itemsize)))
        most = (128 if itemsize == 2 else 32) // (1 if block_d <= 128 else 2)
        block_m = min(most, max(16, _power_of_two(rows)))
        large = block_m * max(block_d, block_n) >= 1 << 14
        own = block_m * (block_d + (0 if block_m >= 64 else block_n)) * itemsize + _SCRATCH

        def fitting(programs: int) -> int:
            return (shared // programs - own) // (2 * block_n * block_d * itemsize) + (block_m < 64)

        resident = 1 if large or fitting(2) < 3 else 2
        return cls(
            block_m,
            block_n,
            min(block_n, WORD),
            block_d,
            warps=8 if itemsize == 4 or large else 4,
            stages=max(2, min(4, fitting(resident))),
            resident=resident,
        )


@dataclass(frozen=True)
class Capacity:
    """What a plan must have room for.

    Attributes:
        rows, sequences: of a step.
        sequence_rows: of one sequence, as expected; more of them are more tiles, not an error.
        tree_rows: of one sequence in the cache, this step's included.
    """

    rows: int
    sequences: int
    sequence_rows: int
    tree_rows: int

    @classmethod
    def of(cls, tree: TreeLayout) -> Capacity:
        return cls(len(tree), len(tree.query_lens), max(tree.query_lens, default=0), max(tree.tree_lens, default=0))


class Plan:
    """A step's layout on the device.

    Attributes:
        masks: words of int64; bit j % 64 of a row's word j // 64 = it sees tree row j, inside the sliding window.
        tiles: (T, FIELDS) int32: sequence (-1 = rows of nobody), the sequence's first packed row, its rows, the
            tile's first folded row, where the sequence's masks begin, words of each, tree rows that the tile sees.
        depths: (N,) int32, each row's position behind the context; only where there is a window.
        rows: N, with those of nobody.
        splits: programs that share a tile's keys.
        partial, weights: their results, (splits, N * H, D) float32 and (splits, N * H) float32.

    Args:
        folded: query heads per key/value head.
        heads: query heads.
        longest: at least the rows of any sequence in the cache.
        splits: None = by the GPU's size.
    """

    def __init__(
        self,
        tree: TreeLayout,
        *,
        heads: int,
        folded: int,
        head_dim: int,
        itemsize: int,
        longest: int,
        window: int | None,
        device: torch.device,
        splits: int | None = None,
    ) -> None:
        capacity: Capacity = tree.plans.get(_CAPACITY) or Capacity.of(tree)
        static = _CAPACITY in tree.plans
        processors, shared = gpu_size(device)
        self.tiling = Tiling.choose(capacity.sequence_rows * folded, head_dim, itemsize, shared)
        self.rows, self._sequences = capacity.rows, capacity.sequences
        self._folded, self._window = folded, window
        records = list(self._records(tree))
        count, words = len(records), sum(n * _words(t) for n, t in zip(tree.query_lens, tree.tree_lens, strict=True))
        if static:
            count = self.rows * folded // self.tiling.block_m + self._sequences + 1
            words = self.rows * _words(capacity.tree_rows)
        self._sizes = (words, count, self.rows)
        with torch.inference_mode(False):  # so that it can be refilled in any mode
            size = words + count * FIELDS // 2 + -(-self.rows // 2)
            self._buffer = torch.empty(size, dtype=torch.int64, device=device)
        self.masks = self._buffer[:words]
        self.tiles = self._buffer[words : words + count * FIELDS // 2].view(torch.int32).view(count, FIELDS)
        self.depths = self._buffer[words + count * FIELDS // 2 :].view(torch.int32)
        self._fill(tree, records)
        if window is not None:
            longest = min(longest, window + capacity.tree_rows)
        tiles_each = -(-max(1, capacity.sequence_rows) * folded // self.tiling.block_m)
        programs = max(1, min(count, self._sequences * tiles_each)) * (heads // folded)
        self.splits = splits or choose_splits(programs, longest, self.tiling.resident * processors)
        self.partial: Tensor | None = None
        self.weights: Tensor | None = None
        if self.splits > 1:
            self.partial = torch.empty((self.splits, self.rows * heads, head_dim), device=device)
            self.weights = torch.empty((self.splits, self.rows * heads), device=device)

    def refill(self, tree: TreeLayout) -> None:
        """Put another step into the same memory, behind what the current stream still does with it.

        Raises:
            ValueError: the step does not fit.
        """
        self._fill(tree, list(self._records(tree)))

    def _records(self, tree: TreeLayout) -> Iterator[tuple[int, ...]]:
        """Records of all tiles, with those of rows that belong to nobody."""
        step = self.tiling.block_m
        start = mask = 0
        for sequence, (count, tree_len) in enumerate(zip(tree.query_lens, tree.tree_lens, strict=True)):
            words = _words(tree_len)
            for first in range(0, count * self._folded, step):
                last = min(count - 1, (first + step - 1) // self._folded)
                # Parents come before children: nothing behind the tile's last row is anybody's ancestor in it.
                yield sequence, start, count, first, mask, words, tree_len - count + last + 1, 0
            start, mask = start + count, mask + count * words
        for first in range(0, (self.rows - start) * self._folded, step):
            yield -1, start, self.rows - start, first, 0, 0, 0, 0

    def _fill(self, tree: TreeLayout, records: list[tuple[int, ...]]) -> None:
        words, count, rows = self._sizes
        masks = np.frombuffer(b"".join(self._packed(tree)), np.int64)
        if len(tree) > rows or len(records) > count or len(masks) > words or len(tree.query_lens) > self._sequences:
            raise ValueError(
                f"a step of {len(tree)} rows, {len(tree.query_lens)} sequences, {len(records)} tiles, {len(masks)} "
                f"mask words does not fit a plan for {rows}, {self._sequences}, {count}, {words}"
            )
        packed = np.zeros(self._buffer.numel(), np.int64)
        packed[: len(masks)] = masks
        tiles = packed[words : words + count * FIELDS // 2].view(np.int32)
        tiles[: len(records) * FIELDS] = np.asarray(records, np.int32).ravel()
        depths = packed[words + count * FIELDS // 2 :].view(np.int32)
        if self._window is not None:
            depths[: len(tree)] = [mask.bit_count() - 1 for mask in tree.masks]
        upload(packed, self._buffer)

    def _packed(self, tree: TreeLayout) -> Iterator[bytes]:
        start = 0
        for count, tree_len in zip(tree.query_lens, tree.tree_lens, strict=True):
            size = _words(tree_len) * (WORD // 8)
            for mask in tree.masks[start : start + count]:
                yield _within(mask, self._window).to_bytes(size, "little")
            start += count


def reserve(tree: TreeLayout, *, rows: int, sequences: int, sequence_rows: int, tree_rows: int) -> TreeLayout:
    """A layout like this one whose plans have room for other steps; see `Capacity`. The query has `rows` rows."""
    capacity = Capacity(rows, sequences, sequence_rows, tree_rows)
    return TreeLayout(tree.query_lens, tree.tree_lens, tree.masks, {_CAPACITY: capacity})


def refill(static: TreeLayout, tree: TreeLayout) -> None:
    """Put a step into the plans of a layout from `reserve`; they are there after its first use.

    Raises:
        ValueError: the step does not fit.
    """
    for plan in static.plans.values():
        if isinstance(plan, Plan):
            plan.refill(tree)


def choose_splits(programs: int, longest: int, slots: int) -> int:
    """Programs per tile that fill the GPU: the fewest that leave almost none of it idle in the last wave.

    Args:
        programs: without splitting.
        longest: rows of the longest sequence.
        slots: programs that run at once.
    """
    most = max(1, min(MAX_SPLITS, -(-longest // _MIN_SPLIT), -(-4 * slots // programs)))
    busy = [count * programs / (-(-count * programs // slots) * slots) for count in range(1, most + 1)]
    return next(count for count, share in enumerate(busy, 1) if share >= 0.9 * max(busy))


def upload(source: npt.NDArray[np.int64], target: Tensor) -> None:
    """Copy to the device without waiting for it: from pinned memory, which is kept until the copy is done."""
    host = torch.from_numpy(source)
    if target.is_cuda:
        target.copy_(host.pin_memory(), non_blocking=True)
    else:
        target.copy_(host)


@lru_cache
def gpu_size(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return _NO_GPU
    properties = torch.cuda.get_device_properties(device)
    # AMD's do not tell: 64 KiB.
    return int(properties.multi_processor_count), int(getattr(properties, "shared_memory_per_block_optin", 64 << 10))


def _within(mask: int, window: int | None) -> int:
    """Without the ancestors that are `window` or more positions back: ancestors form a path, one position each."""
    excess = 0 if window is None else mask.bit_count() - window
    if excess <= 0:
        return mask
    if mask & (mask + 1) == 0:
        return mask >> excess << excess
    for _ in range(excess):
        mask &= mask - 1
    return mask


def _words(tree_len: int) -> int:
    return -(-tree_len // WORD)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
