"""Few queries over much context, on the CPU, without copying the cache.

A sequence's cache rows lie in a few pieces. For each piece one product writes scores into its place in a buffer, and
one softmax serves all sequences of a group; a second product per piece gathers the values. Nothing is padded but the
buffer's columns, and no key or value is moved. The buffer is the step's, every layer uses it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_PIECES = 8  # of one sequence; with more of them copying is faster
_MAX_SCORES = 1 << 22  # of a group: 16 MiB of float32


@dataclass(frozen=True)
class Part:
    """One piece of one sequence's rows.

    Attributes:
        queries: first and last + 1 of the sequence's folded queries in the group.
        rows: first and last + 1 of the piece's cache rows.
        scores, weights: (KVH, queries, rows) views of the group's buffers.
        first: whether the sequence has no part before this one.
    """

    queries: tuple[int, int]
    rows: tuple[int, int]
    scores: Tensor
    weights: Tensor
    first: bool


@dataclass(frozen=True)
class Pieces:
    """Sequences that share a buffer.

    Attributes:
        packed: (n,) packed rows of the group's queries; None = all of them, in order.
        scores, weights: (KVH, n * G, T).
        mask: (n * G, T) additive.
    """

    packed: Tensor | None
    scores: Tensor
    weights: Tensor
    mask: Tensor
    parts: Sequence[Part]

    def run(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
        """query: (n, H, D); keys, values: (rows, KVH, D) one layer's cache; returns (n, H, D)."""
        count, heads, width = query.shape
        kv_heads = keys.shape[1]
        q = (query * scale).view(count, kv_heads, -1, width).transpose(0, 1).reshape(kv_heads, -1, width)
        k, v, out = keys.permute(1, 2, 0), values.transpose(0, 1), torch.empty_like(q)
        for part in self.parts:
            (a, b), (c, d) = part.queries, part.rows
            torch.bmm(q[:, a:b], k[:, :, c:d], out=part.scores)
        if softcap is not None:
            self.scores.div_(softcap).tanh_().mul_(softcap)
        self.scores.add_(self.mask)
        torch.softmax(self.scores, -1, out=self.weights)
        for part in self.parts:
            (a, b), (c, d) = part.queries, part.rows
            if part.first:
                torch.bmm(part.weights, v[:, c:d], out=out[:, a:b])
            else:
                out[:, a:b].baddbmm_(part.weights, v[:, c:d])
        return out.view(kv_heads, count, -1, width).transpose(0, 1).reshape(count, heads, width)


def partition(members: Sequence[int], counts: Sequence[int], lengths: Sequence[int], heads: int) -> list[list[int]]:
    """Groups of sequences whose scores fit a buffer that is at least half full.

    Args:
        members: sequences.
        counts, lengths: of every sequence, its queries and its cache rows.
        heads: query heads.
    """
    groups: list[list[int]] = []
    real = rows = 0
    for sequence in sorted(members, key=lambda s: lengths[s]):
        real, rows = real + counts[sequence] * lengths[sequence], rows + counts[sequence]
        padded = rows * lengths[sequence]
        if not groups or padded > 2 * real or padded * heads > _MAX_SCORES:
            groups.append([])
            real, rows = counts[sequence] * lengths[sequence], counts[sequence]
        groups[-1].append(sequence)
    return groups


def fits(count: int, length: int, slots: npt.NDArray[np.int64], heads: int) -> bool:
    """Whether a sequence's scores fit a buffer and its cache rows lie in few pieces."""
    return count * length * heads <= _MAX_SCORES and int(np.count_nonzero(np.diff(slots) != 1)) < MAX_PIECES


def build(
    slots: Sequence[npt.NDArray[np.int64]],
    visible: Sequence[npt.NDArray[np.bool_]],
    packed: npt.NDArray[np.int64] | None,
    *,
    kv_heads: int,
    folded: int,
    dtype: torch.dtype,
) -> Pieces:
    """Work out a group.

    Args:
        slots: of each sequence, the cache rows it sees, (length,).
        visible: of each sequence, which of them each query sees, (queries, length).
        packed: as in `Pieces`.
        folded: query heads per key/value head.
    """
    widest, total = max(map(len, slots)), sum(map(len, visible))
    allowed = np.zeros((total, widest), np.bool_)
    scores = torch.zeros((kv_heads, total * folded, widest), dtype=dtype)
    weights = torch.empty_like(scores)
    parts, start = [], 0
    for own, seen in zip(slots, visible, strict=True):
        stop = start + len(seen)
        allowed[start:stop, : len(own)] = seen
        queries = (start * folded, stop * folded)
        cuts = [0, *(np.flatnonzero(np.diff(own) != 1) + 1).tolist(), len(own)]
        for a, b in pairwise(cuts):
            place = (slice(None), slice(*queries), slice(a, b))
            parts.append(
                Part(queries, (int(own[a]), int(own[b - 1]) + 1), scores[place], weights[place], first=a == 0)
            )
        start = stop
    mask = torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf))).to(dtype)
    return Pieces(
        packed=None if packed is None else torch.from_numpy(packed),
        scores=scores,
        weights=weights,
        mask=mask.repeat_interleave(folded, 0),
        parts=parts,
    )
