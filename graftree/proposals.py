"""What a speculator proposes at one node in the MSS modes: real draws, and the distribution they were drawn from.

The acceptance rules divide by q, so both ends must hold the very same q. It is therefore truncated and rounded to
32-bit weights *before* anything is drawn from it; the weights travel, and each end normalises them in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graftree.noise import mix64

Floats = NDArray[np.float64]

MAX_SUPPORT = 64
MAX_DRAWS = 64
MAX_PER_NODE = 16  # speculators' proposals at one node
_MASK = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class DraftDistribution:
    """q, a speculator's truncated distribution of the next token.

    Attributes:
        ids: (K,) different token ids, best first where `truncate` made it.
        weights: (K,) float32, positive; q is proportional to them.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]

    @classmethod
    def of(cls, ids: ArrayLike, weights: ArrayLike) -> DraftDistribution:
        """From any sequences; the weights are rounded to float32."""
        return cls(np.asarray(ids, dtype=np.int64), np.asarray(weights, dtype=np.float32))

    @classmethod
    def truncate(cls, log_probs: ArrayLike, count: int = MAX_SUPPORT) -> DraftDistribution:
        """The `count` most likely tokens, ties by id.

        Args:
            log_probs: (V,) log probabilities or scores, -inf = removed, at least one finite.
            count: most tokens to keep.
        """
        scores = np.asarray(log_probs, dtype=np.float64)
        ids = np.flatnonzero(scores > -np.inf)
        if count < ids.size:
            ids = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
        ids = ids[np.argsort(-scores[ids], kind="stable")][:count]
        weights = np.exp(scores[ids] - scores[ids[0]]).astype(np.float32)
        return cls(ids[weights > 0], weights[weights > 0])

    @cached_property
    def probs(self) -> Floats:
        """(K,) float64, sums to 1."""
        weights = self.weights.astype(np.float64)
        return weights / weights.sum()

    def __getitem__(self, token: int) -> float:
        """q(token), 0 outside the support."""
        return float(self.probs[self.ids == token].sum())

    def without(self, token: int) -> DraftDistribution:
        """q after `token` is taken out, renormalised."""
        kept = self.ids != token
        return DraftDistribution(self.ids[kept], self.weights[kept])


@dataclass(frozen=True, eq=False)
class Proposals:
    """One speculator's draws at one node.

    Attributes:
        q: the distribution they were drawn from.
        tokens: the draws in draw order, repeats included. Repeats share one child node of the tree.
    """

    q: DraftDistribution
    tokens: tuple[int, ...]


def cut(proposals: Sequence[Proposals], keep: Callable[[Sequence[int]], bool]) -> tuple[Proposals, ...]:
    """Drop draws from the end of a node's test order (speculator after speculator, each in draw order).

    Nodes of the tree need no such care: a draw whose node was dropped is still tested, and if it is accepted it is
    the bonus token.

    Args:
        proposals: the node's.
        keep: tokens of the draws before -> whether the next draw is kept, a pure function; the first False ends
            the node's draws.
    """
    # `keep` never sees the draw it decides on: seen from there the draw is still distributed as q, so whether it is
    # tested changes no expectation. A choice by value would leave draws that no longer come from q (a repeat kept
    # because it costs no node is such a choice).
    before: list[int] = []
    result: list[Proposals] = []
    for proposal in proposals:
        start = len(before)
        for token in proposal.tokens:
            if not keep(tuple(before)):
                break
            before.append(token)
        if len(before) > start:
            result.append(replace(proposal, tokens=tuple(before[start:])))
    return tuple(result)


def draft_salt(speculator_salt: int, node_id: int) -> int:
    """Key of one speculator's draws at one node.

    Two speculators that share a salt repeat each other's draws. Two nodes at one position that share one can not be
    drawn one in view of the other, as best-first growth and node budgets do.

    Args:
        speculator_salt: of the speculator, unique within the session.
        node_id: content address of the node whose children are drawn (`graftree.tree.node_id`).
    """
    return mix64(mix64(speculator_salt & _MASK) ^ (node_id & _MASK))
