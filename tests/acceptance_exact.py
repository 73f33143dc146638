"""Exact enumeration of draws, in dense arithmetic of its own, and small random distributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from graftree.acceptance import Rule, outcome
from graftree.proposals import DraftDistribution, Proposals

Floats = NDArray[np.float64]

LOSSLESS = list(Rule)


def total_variation(left: Floats, right: Floats) -> float:
    return 0.5 * float(np.abs(left - right).sum())


def normalised(weights: Sequence[float]) -> Floats:
    array = np.array(weights, dtype=np.float64)
    return array / array.sum()


def distribution(weights: Sequence[float]) -> DraftDistribution:
    """q proportional to `weights`; zeros leave the support."""
    ids = [token for token, weight in enumerate(weights) if weight > 0]
    return DraftDistribution.of(ids, [weights[token] for token in ids])


def dense(q: DraftDistribution, vocab_size: int) -> Floats:
    result = np.zeros(vocab_size)
    result[q.ids] = q.probs
    return result


def sequences(q: DraftDistribution, count: int, *, replacement: bool) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every sequence of draws with its probability."""
    if count == 0 or not q.ids.size:
        yield 1.0, ()
        return
    for token in q.ids.tolist():
        rest = q if replacement else q.without(token)
        for chance, tokens in sequences(rest, count - 1, replacement=replacement):
            yield q[token] * chance, (token, *tokens)


def draw_sets(
    rule: Rule, qs: Sequence[DraftDistribution], counts: Sequence[int]
) -> Iterator[tuple[float, tuple[Proposals, ...]]]:
    """Every set of proposals at a node with its probability: speculators draw independently of each other."""
    replacement = rule is not Rule.MSS_WITHOUT_REPLACEMENT
    each = [list(sequences(q, count, replacement=replacement)) for q, count in zip(qs, counts, strict=True)]
    for combination in product(*each):
        yield (
            float(np.prod([chance for chance, _ in combination])),
            tuple(Proposals(q, tokens) for q, (_, tokens) in zip(qs, combination, strict=True)),
        )


def emitted(rule: Rule, p: Floats, qs: Sequence[DraftDistribution], counts: Sequence[int]) -> Floats:
    """(V,) distribution of the emitted token, over all draws."""
    return sum((chance * outcome(rule, p, sets) for chance, sets in draw_sets(rule, qs, counts)), np.zeros_like(p))


def weights(vocab_size: int) -> st.SearchStrategy[list[float]]:
    """Peaked, flat, and with zeros."""
    entry = st.one_of(st.just(0.0), st.integers(1, 20).map(float), st.sampled_from([1e-6, 1e6]))
    return st.lists(entry, min_size=vocab_size, max_size=vocab_size).filter(any)
