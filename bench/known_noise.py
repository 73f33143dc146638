"""`noise.uniform` for a block of seeds, computed at once: the same numbers, without a call's overhead for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graftree import noise
from graftree.noise import Stream

_GAMMA, _MIX1, _MIX2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class KnownNoise:
    """Stands in for `noise.uniform`; what is not known is computed by it.

    Args:
        seeds: requests' seeds.
        positions: of their tokens.
        drafts: (position, salt) of what `graftree.acceptance.draw_proposals` draws with.
        width: the vocabulary's; larger token ids raise IndexError.
    """

    def __init__(
        self, seeds: Sequence[int], positions: Iterable[int], drafts: Iterable[tuple[int, int]], width: int
    ) -> None:
        self._ordinary, self._width = noise.uniform, width
        self._known: dict[tuple[int, int, int], NDArray[np.float64]] = {}
        block = np.asarray(seeds, dtype=np.uint64)
        for position in positions:
            for stream in (Stream.TARGET, Stream.ACCEPT, Stream.RESIDUAL):
                self._add(block, position, stream)
        for position, salt in drafts:
            self._add(_mix64(_mix64(block) ^ np.uint64(salt)), position, Stream.DRAFT)

    def __call__(
        self, seed: int, position: int, token_ids: ArrayLike, stream: Stream = Stream.TARGET
    ) -> NDArray[np.float64]:
        row = self._known.get((seed, position, stream))
        return self._ordinary(seed, position, token_ids, stream) if row is None else row[np.asarray(token_ids)]

    def _add(self, seeds: NDArray[np.uint64], position: int, stream: Stream) -> None:
        start = _mix64(seeds ^ np.uint64(int(stream) * int(_MIX1) & (2**64 - 1)))
        state = _mix64(start + np.uint64((position + 1) * int(_GAMMA) & (2**64 - 1)))
        steps = np.arange(1, self._width + 1, dtype=np.uint64) * _GAMMA
        rows = ((_mix64(state[:, None] + steps) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        self._known.update(zip(((seed, position, int(stream)) for seed in seeds.tolist()), rows, strict=True))


def _mix64(x: NDArray[np.uint64]) -> Any:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))
