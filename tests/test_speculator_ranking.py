"""Ranking under the verifier's noise, and the short list of an SSM's logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from graftree.errors import GraftreeError
from graftree.noise import gumbel
from graftree.sampling import SamplingContext, SamplingParams, pick, process
from speculator_service.drafters.ranking import rank
from speculator_service.drafters.shortlist import penalised, shortlists

VOCAB = 50
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, seed=3, top_k=5),
    SamplingParams(temperature=1.3, seed=3, top_p=0.8),
    SamplingParams(temperature=1.0, seed=3, min_p=0.1),
    SamplingParams(temperature=0.9, seed=3, top_k=20, top_p=0.6, min_p=0.02),
    SamplingParams(temperature=1.0, seed=3, logit_bias={1: -100.0, 2: 5.0}),
    SamplingParams(temperature=0.0, logit_bias={1: -100.0, 2: 5.0}),
]


def logits(seed: int) -> torch.Tensor:
    return torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("params", SETTINGS)
def test_the_first_candidate_is_what_the_verifier_would_pick(params: SamplingParams) -> None:
    """With p = q the first-ranked candidate is exactly `graftree.sampling.pick` of the same logits."""
    context = SamplingContext([], vocab_size=VOCAB)
    for seed in range(20):
        rows = logits(seed)
        for position, (row, (ids, log_q)) in enumerate(zip(rows, shortlists(rows, params, VOCAB), strict=True)):
            expected = pick(process(row.numpy(), params, context), params, position)
            assert rank(ids, log_q, params, position, 4)[0].token_id == expected


@pytest.mark.parametrize("params", SETTINGS)
def test_a_short_list_agrees_with_the_full_computation(params: SamplingParams) -> None:
    """Ids and log probabilities are those of `process`, as far as the list goes."""
    context = SamplingContext([], vocab_size=VOCAB)
    rows = logits(1)
    for size in (VOCAB, 30):
        for row, (ids, log_q) in zip(rows, shortlists(rows, params, size), strict=True):
            full = process(row.numpy(), params, context)
            np.testing.assert_allclose(log_q, full[ids], atol=1e-5)
            if size == VOCAB:
                assert len(ids) == (full > -math.inf).sum()


def test_penalties_go_the_full_way() -> None:
    """With penalties the list is the top of `process` with the session's counts and the node's path."""
    params = SamplingParams(temperature=1.0, seed=1, repetition_penalty=1.5, presence_penalty=1.0)
    row = logits(2)[0]
    context = SamplingContext([1, 2, 3], [4, 4], vocab_size=VOCAB)
    full = process(row.numpy(), params, context, (7, 8))
    ids, log_q = penalised(row, params, context, (7, 8))
    assert ids[0] == np.argmax(full)
    np.testing.assert_allclose(log_q, full[ids])


def test_greedy_ranks_by_q_and_reports_it() -> None:
    """At temperature 0 the log probability of a candidate is log q."""
    ids, log_q = np.array([4, 9, 2]), np.log([0.2, 0.5, 0.1])
    got = rank(ids, log_q, SamplingParams(temperature=0.0), 7, 2)
    assert [candidate.token_id for candidate in got] == [9, 4]
    assert [candidate.log_prob for candidate in got] == pytest.approx(np.log([0.5, 0.2]))


def test_noise_is_the_targets_at_the_childs_position() -> None:
    """Above temperature 0 the order is that of log q + gumbel(seed, position, id)."""
    ids, log_q = np.arange(20), np.full(20, math.log(1 / 20))
    got = rank(ids, log_q, SamplingParams(temperature=1.0, seed=11), 42, 20)
    order = np.argsort(-gumbel(11, 42, ids))
    assert [candidate.token_id for candidate in got] == order.tolist()


def test_reported_chances_are_a_sub_distribution() -> None:
    """Chances of all listed ids and of the rest sum to one, so a path's product never exceeds one."""
    ids = np.arange(10)
    params = SamplingParams(temperature=1.0, seed=5)
    whole = rank(ids, np.log(np.full(10, 0.1)), params, 3, 10)
    part = rank(ids, np.log(np.full(10, 0.05)), params, 3, 10)
    assert sum(math.exp(candidate.log_prob) for candidate in whole) == pytest.approx(1)
    assert 0 < sum(math.exp(candidate.log_prob) for candidate in part) < 1


def test_reported_chances_match_what_happens_when_q_is_nearly_p() -> None:
    """With log p = log q + Gumbel error of the assumed scale, the first candidate is taken as often as it says."""
    from speculator_service.drafters.ranking import ERROR_SCALE

    rng = np.random.default_rng(0)
    ids, q = np.arange(8), np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
    hits, said, draws = 0, 0.0, 4000
    for position in range(draws):
        params = SamplingParams(temperature=1.0, seed=1)
        best = rank(ids, np.log(q), params, position, 1)[0]
        error = rng.gumbel(scale=ERROR_SCALE, size=8)
        picked = np.argmax(np.log(q) + error + gumbel(1, position, ids))
        hits += picked == best.token_id
        said += math.exp(best.log_prob)
    assert hits / draws == pytest.approx(said / draws, abs=0.03)  # 4 standard deviations


def test_logits_that_are_not_finite_are_an_error() -> None:
    """An SSM that produces NaN fails its session by name."""
    with pytest.raises(GraftreeError, match="not finite"):
        shortlists(torch.full((1, 5), math.nan), SamplingParams(temperature=0.0), 4)
