"""Which candidates to draft, and how likely each is to be taken.

At temperature 0 the LLM takes its argmax: candidates are ranked by log q. Above 0 it takes argmax(log p + g) with
noise g that anybody can compute (`graftree.noise`), so candidates are ranked by log q + g with the same g
(shared randomness: Daliri, Musco, Suresh, arXiv 2408.07978).

The chance reported with a ranked candidate: were log p - log q independent Gumbel errors of scale s, candidate i
would win the argmax with probability exactly softmax((log q + g) / s)_i (the Gumbel-max trick once more). s = 0
would be blind trust in q, s = 1 is the spread of g itself. Of 0.3, 0.5, 0.7, 1, 1.4 and 2 the value 0.7 gave the
picks of SmolLM2-135M the highest likelihood (-1.27 nats a token; 0.5: -1.32, 1: -1.44), drafted by itself without
layers 12 and 13.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from graftree.noise import gumbel
from graftree.sampling import SamplingParams
from speculator_service.drafters.base import Candidate

ERROR_SCALE = 0.7
_EULER = 0.5772156649015329  # mean of Gumbel noise


def rank(
    token_ids: NDArray[np.int64],
    log_q: NDArray[np.float64],
    params: SamplingParams,
    position: int,
    branching: int,
) -> list[Candidate]:
    """The `branching` best of some token ids, best first, each with the log of its chance.

    Args:
        token_ids: (K,) distinct ids.
        log_q: (K,) natural log probabilities under the request's processed q; their sum may be below 1, the rest
            belongs to ids that are not listed.
        params: the request's parameters.
        position: absolute index of the position the ids are for (0 = first prompt token).
        branching: most candidates.
    """
    scores = log_q
    if not params.greedy and params.seed is not None and token_ids.size:
        scores = _log_chances(log_q, log_q + gumbel(params.seed, position, token_ids))
    order = np.argsort(-scores, kind="stable")[:branching]
    return [
        Candidate(token, min(chance, 0.0))
        for token, chance in zip(token_ids[order].tolist(), scores[order].tolist(), strict=True)
        if chance > -math.inf
    ]


def _log_chances(log_q: NDArray[np.float64], noisy: NDArray[np.float64]) -> NDArray[np.float64]:
    """log softmax(noisy / s), with one more entry for all ids that are not listed."""
    scaled = noisy / ERROR_SCALE
    rest = 1.0 - float(np.exp(log_q).sum())
    # The maximum of log q + g over the unlisted ids is Gumbel around the log of their mass.
    other = (math.log(rest) + _EULER) / ERROR_SCALE if rest > 1e-9 else -math.inf
    top = max(float(scaled.max()), other)
    chances: NDArray[np.float64] = scaled - (top + math.log(np.exp(scaled - top).sum() + math.exp(other - top)))
    return chances
