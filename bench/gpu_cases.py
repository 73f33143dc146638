"""Random problems for attention kernels: paged caches, trees behind contexts, and the formula in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import TreeLayout, chain_masks, tree_attention


@dataclass(frozen=True)
class Shape:
    """Of a model's attention. The defaults are an 8B model's."""

    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.width}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Piece:
    """One sequence of a step: committed rows, and this step's rows as a random tree or a chain."""

    context: int
    rows: int
    chain: bool = False

    def masks(self, random: np.random.Generator) -> list[int]:
        if self.chain:
            return chain_masks(self.rows)
        masks: list[int] = []
        for index in range(self.rows):
            # A root, then parents among the last few rows: trees of some depth, as speculation makes them.
            parent = int(random.integers(max(0, index - 8), index)) if index else -1
            masks.append(1 << index | (masks[parent] if parent >= 0 else 0))
        return masks


class Problem:
    """A step over random caches.

    Attributes:
        caches: `layers` pairs of key and value cache, (num_blocks, block_size, KVH, D) each.
        tables: (B, M) int32; blocks lie in random order.
        contexts: (B,) int32.
        query: (N, H, D).
    """

    def __init__(
        self,
        shape: Shape,
        sequences: Sequence[Piece],
        device: torch.device,
        *,
        layers: int = 1,
        seed: int = 0,
    ) -> None:
        self.shape, self.sequences, self.device = shape, list(sequences), device
        random = np.random.default_rng(seed)
        self.layout = TreeLayout.of([(0, sequence.masks(random)) for sequence in sequences])
        size = shape.block_size
        needs = [max(1, -(-(sequence.context + sequence.rows) // size)) for sequence in sequences]
        order = random.permutation(sum(needs)).astype(np.int32)
        tables = np.zeros((len(needs), max(needs)), np.int32)
        start = 0
        for index, need in enumerate(needs):
            tables[index, :need] = order[start : start + need]
            start += need
        self.tables = torch.from_numpy(tables).to(device)
        self.contexts = torch.tensor([s.context for s in sequences], dtype=torch.int32, device=device)
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, dtype=shape.dtype, device=device)

        cache = (start, size, shape.kv_heads, shape.width)
        self.caches = [(draw(*cache), draw(*cache)) for _ in range(layers)]
        self.query = draw(len(self.layout), shape.heads, shape.width)

    @property
    def scale(self) -> float:
        return self.shape.width**-0.5

    @property
    def bytes(self) -> int:
        """That one layer's attention must read and write at least: each cache row, query and output once."""
        shape, element = self.shape, self.query.element_size()
        rows = sum(sequence.context + sequence.rows for sequence in self.sequences)
        return element * shape.width * (2 * rows * shape.kv_heads + 2 * len(self.layout) * shape.heads)

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, context and tree rows."""
        pairs = sum(sequence.rows * (sequence.context + sequence.rows) for sequence in self.sequences)
        return 4 * pairs * self.shape.heads * self.shape.width

    def attend(self, layer: int = 0, window: int | None = None, softcap: float | None = None) -> Tensor:
        """(N, H, D): the Triton kernel's answer."""
        keys, values = self.caches[layer]
        return tree_attention(
            self.query,
            keys,
            values,
            self.tables,
            self.contexts,
            self.layout,
            scale=self.scale,
            sliding_window=window,
            softcap=softcap,
            implementation="triton",
        )

    def dense(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values in one piece, (B, KVH, T, D), of sequences that are equally long."""
        total = self.sequences[0].context + self.sequences[0].rows
        at = torch.arange(total, device=self.device)
        size = self.shape.block_size
        slots = self.tables[:, at // size].long() * size + at % size

        def gather(cache: Tensor) -> Tensor:
            rows = cache.view(-1, self.shape.kv_heads, self.shape.width)
            return rows[slots].transpose(1, 2).contiguous()

        key, value = self.caches[layer]
        return gather(key), gather(value)

    def exact(self, window: int | None = None, softcap: float | None = None) -> Tensor:
        """(N, H, D) float64: the formula, one sequence at a time."""
        shape, size = self.shape, self.shape.block_size
        keys, values = (cache.view(-1, shape.kv_heads, shape.width) for cache in self.caches[0])
        output = torch.zeros(self.query.shape, dtype=torch.float64, device=self.device)
        for index, sequence in enumerate(self.sequences):
            rows = self.layout.rows(index)
            if not rows:
                continue
            at = torch.arange(sequence.context + sequence.rows, device=self.device)
            slots = self.tables[index, at // size].long() * size + at % size
            visible = torch.from_numpy(self.layout.visible(index, sequence.context, window)).to(self.device)
            query = self.query[rows.start : rows.stop].double().unflatten(1, (shape.kv_heads, -1))
            scores = torch.einsum("nkgd,tkd->kgnt", query, keys[slots].double()) * self.scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
            result = torch.einsum("kgnt,tkd->nkgd", weights, values[slots].double())
            output[rows.start : rows.stop] = result.flatten(1, 2)
        return output
