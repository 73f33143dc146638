"""Counter-based Gumbel noise: the one source of randomness in an answer.

`gumbel(seed, position, token_ids)` is a pure function, so a token is a function of (weights, prompt, parameters,
seed) alone: any verifier, at any time, draws the same noise, and so can a speculator for the handful of
candidates it ranks (shared randomness: Daliri, Musco, Suresh, arXiv 2408.07978).

The integers are SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a generator started at a key made of (stream,
seed, position), read at index token_id. They are exact on every machine; the logarithms are float64.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


class Stream(IntEnum):
    """Disjoint noise streams. Draws that must be independent of each other never share one."""

    TARGET = 0  # picks of the LLM; speculators may share it, because acceptance is accept-iff-equal
    DRAFT = 1  # draws of proposals in the MSS modes
    ACCEPT = 2  # acceptance tests in the MSS modes
    RESIDUAL = 3  # residual draws in the MSS modes


def mix64(x: int) -> int:
    """SplitMix64's finaliser, a bijection on 64-bit integers."""
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def key64(seed: int, position: int, stream: Stream = Stream.TARGET) -> int:
    """The generator's start state for one (stream, seed, position)."""
    return mix64((mix64((seed & _MASK) ^ (int(stream) * _MIX1 & _MASK)) + (position + 1) * _GAMMA) & _MASK)


def uniform(seed: int, position: int, token_ids: ArrayLike, stream: Stream = Stream.TARGET) -> NDArray[np.float64]:
    """Uniform numbers in the open interval (0, 1), one per token id.

    Args:
        seed: any integer; its low 64 bits count.
        position: absolute position (0 = first prompt token) of the token being chosen.
        token_ids: (K,) non-negative integers.
        stream: which of the disjoint streams.

    Returns:
        (K,) float64, multiples of 2**-53 shifted by half a step.
    """
    with np.errstate(over="ignore"):
        x = np.asarray(token_ids).astype(np.uint64)
        x = np.uint64(key64(seed, position, stream)) + (x + np.uint64(1)) * np.uint64(_GAMMA)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def gumbel(seed: int, position: int, token_ids: ArrayLike, stream: Stream = Stream.TARGET) -> NDArray[np.float64]:
    """Standard Gumbel noise, (K,) float64: argmax(log p + g) is a draw from p (Gumbel-max trick)."""
    noise: NDArray[np.float64] = -np.log(-np.log(uniform(seed, position, token_ids, stream)))
    return noise
