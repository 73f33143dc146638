"""The chance that a node is passed, per acceptance rule and number of children: exact, or by quadrature."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graftree.acceptance import AcceptanceTest, Rule, draw_proposals, residual, stages
from graftree.proposals import DraftDistribution, Proposals
from graftree.sampling import SamplingParams

Floats = NDArray[np.float64]

Scheme = Literal["naive", "top_k", "mss", "mss_without_replacement", "shared_noise"]


def node_success(
    scheme: Scheme, p: Floats, q: DraftDistribution, count: int, *, samples: int = 256, first_seed: int = 0
) -> float:
    """The chance that a node with `count` children is passed: that the token emitted there is one of theirs.

    Args:
        scheme: "naive" t ~ p, children i.i.d. from q; "top_k" t ~ p, children the most likely of q; "mss" and
            "mss_without_replacement" those rules; "shared_noise" TARGET_ONLY with children ranked by its noise.
        p: (V,) the LLM's distribution.
        q: the speculator's.
        count: children, repeated draws counted.
        samples: sets of draws averaged for "mss_without_replacement", quadrature points for "shared_noise"; the
            others are exact.
        first_seed: of the sets of draws; nodes that are averaged should not share sets.
    """
    p, q = _on_support(p, q)
    match scheme:
        case "naive":
            return float(p[q.ids] @ (1.0 - (1.0 - q.probs) ** count))
        case "top_k":
            return float(p[q.ids[np.argsort(-q.probs, kind="stable")[:count]]].sum())
        case "mss":
            failure = 1.0
            for _ in range(count):  # the residual is the same whichever draw was rejected
                failure *= 1.0 - float(np.minimum(p[q.ids], q.probs).sum())
                p = residual(p, q)
            return 1.0 - failure
        case "mss_without_replacement":
            rule = Rule.MSS_WITHOUT_REPLACEMENT
            seeds = range(first_seed, first_seed + samples)
            sets = (draw_proposals(rule, q, count, SamplingParams(seed=seed), 0, 0) for seed in seeds)
            return sum(_passed(rule, p, Proposals(q, tokens)) for tokens in sets) / samples
        case "shared_noise":
            return _shared_noise_success(p, q, count, samples)


def _on_support(p: Floats, q: DraftDistribution) -> tuple[Floats, DraftDistribution]:
    """The same node with tokens renumbered 0..K - 1, and all that q can not propose as token K."""
    due = p[q.ids]
    return np.append(due, max(0.0, 1.0 - due.sum())), DraftDistribution(np.arange(q.ids.size), q.weights)


def _passed(rule: Rule, p: Floats, proposals: Proposals) -> float:
    tests = [stage for stage in stages(rule, p, [proposals]) if isinstance(stage, AcceptanceTest)]
    return 1.0 - math.prod(1.0 - test.chance for test in tests)


def _shared_noise_success(p: Floats, q: DraftDistribution, count: int, points: int) -> float:
    """As a race: token y arrives under p at E_y / p(y) and under q at E_y / q(y), with E_y ~ Exp(1).

    x wins under p with probability p(x), at a time s ~ Exp(1). Given that, E_y - s p(y) is Exp(1) again for each
    other y, which beats x under q if it is below s (p(x) q(y) / q(x) - p(y)): independent events, of which fewer
    than `count` may happen.
    """
    s = -np.log1p(-(np.arange(points) + 0.5) / points)
    due, ratio = p[q.ids], p[q.ids] / q.probs
    beaten = np.zeros((count, points, q.ids.size))  # [number of y ahead of x, s, x]
    beaten[0] = 1.0
    for y in range(q.ids.size):
        margin = np.maximum(ratio * q.probs[y] - due[y], 0.0)
        margin[y] = 0.0
        ahead = -np.expm1(-np.outer(s, margin))
        beaten[1:] = beaten[1:] * (1.0 - ahead) + beaten[:-1] * ahead
        beaten[0] *= 1.0 - ahead
    return float(due @ beaten.sum(axis=0).mean(axis=0))
