"""`PagedKV`: the key/value cache in blocks of a fixed number of tokens; `BlockPool` says which are free.

A sequence owns a list of blocks; its logical row r lies in block blocks[r // block_size]. Planned memory is all
there is: kv_tokens * bytes_per_token, taken at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from graftree.models.blocks import BlockPool as BlockPool
from kernels.rows import move_rows, write_rows


class PagedKV:
    """Keys and values of all layers in one tensor, (2, layers, num_blocks, block_size, KVH, D).

    A layer's view is contiguous, and one gather and one scatter move rows in all layers.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        # Not zeroed: only rows that were written are read, and untouched pages take no memory yet.
        self._data = torch.empty((2, layers, num_blocks, block_size, kv_heads, head_dim), dtype=dtype, device=device)
        self._rows = self._data.view(2, layers, num_blocks * block_size, kv_heads, head_dim)
        self._planes = self._rows.flatten(0, 1)
        self.keys: list[Tensor] = list(self._data[0])
        self.values: list[Tensor] = list(self._data[1])
        self._key_rows: list[Tensor] = list(self._rows[0])
        self._value_rows: list[Tensor] = list(self._rows[1])

    @classmethod
    def like(cls, other: PagedKV, *, num_blocks: int) -> PagedKV:
        """A cache for the same model with its own blocks."""
        _, layers, _, block_size, kv_heads, head_dim = other._data.shape
        return cls(
            layers=layers,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=other._data.dtype,
            device=other._data.device,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._data.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """(2, layers, block_size, KVH, D): a block's keys, then its values."""
        _, layers, _, block_size, kv_heads, head_dim = self._data.shape
        return 2, layers, block_size, kv_heads, head_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self._data.element_size() * self._data.numel() // (self.num_blocks * self.block_size)

    def slots(self, blocks: Sequence[int], rows: Sequence[int]) -> list[int]:
        """Physical rows of a sequence's logical rows."""
        size = self.block_size
        return [blocks[row // size] * size + row % size for row in rows]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks. Memory that was never written may hold denormal numbers, which are slow, or NaN."""
        self._data.index_fill_(2, torch.tensor(blocks, dtype=torch.int64, device=self._data.device), 0)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store one layer's rows. slots: (N,) int64 physical rows, see `write_rows`; key, value: (N, KVH, D)."""
        write_rows(self._key_rows[layer], self._value_rows[layer], slots, key, value)

    def move_rows(self, blocks: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy logical rows `sources` of one sequence to `targets`, in all layers, as if all at once."""
        pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not pairs:
            return
        # Accepted rows move down in order; whatever else is asked for, torch does through a copy.
        down = all(s > t for s, t in pairs) and all(a < b for (a, _), (b, _) in pairwise(pairs))
        source, target = self._index(blocks, [s for s, _ in pairs]), self._index(blocks, [t for _, t in pairs])
        move_rows(self._planes, source, target, implementation="auto" if down else "torch")

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], rows: Sequence[int]) -> None:
        """Copy logical rows of one sequence to the same rows of another, in all layers.

        Args:
            sources, targets: the sequences' blocks.
            rows: which.
        """
        if rows:
            move_rows(self._planes, self._index(sources, rows), self._index(targets, rows))

    def read_rows(self, blocks: Sequence[int], rows: Sequence[int]) -> Tensor:
        """(2, layers, len(rows), KVH, D) copy of a sequence's logical rows: keys, then values."""
        return self._rows.index_select(2, self._index(blocks, rows))

    def write_rows(self, blocks: Sequence[int], rows: Sequence[int], data: Tensor) -> None:
        """Store what `read_rows` returned, here or on another pod with the same model."""
        self._rows.index_copy_(2, self._index(blocks, rows), data.to(self._data))

    def _index(self, blocks: Sequence[int], rows: Sequence[int]) -> Tensor:
        """(len(rows),) int64 physical rows on the cache's device, brought there without waiting for it."""
        host = torch.tensor(self.slots(blocks, rows), dtype=torch.int64)
        return host.pin_memory().to(self._data.device, non_blocking=True) if self._data.is_cuda else host

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """(2, layers, len(blocks), block_size, KVH, D) copy of whole blocks, on the cache's device."""
        return self._data.index_select(2, torch.tensor(blocks, dtype=torch.int64, device=self._data.device))

    def write_blocks(self, blocks: Sequence[int], data: Tensor) -> None:
        """Store what `read_blocks` returned, here or on another pod with the same model."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._data.device)
        self._data.index_copy_(2, index, data.to(self._data))
