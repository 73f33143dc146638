"""Proposals: what is drawn is distributed as q says, draws that must be independent are, and both ends hold one q."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from scipy import stats

from graftree.acceptance import Rule, draw_proposals
from graftree.codec import check_proposals, distribution_from_proto, proposals_to_proto
from graftree.errors import InvalidTree
from graftree.noise import Stream, gumbel
from graftree.proposals import MAX_DRAWS, MAX_SUPPORT, DraftDistribution, Proposals, cut, draft_salt
from graftree.sampling import GREEDY, SamplingParams
from graftree.v1 import common_pb2
from tests.acceptance_exact import distribution, sequences, weights

Q = distribution([4, 0, 2, 1])
PARAMS = SamplingParams(seed=11)
SAMPLES = 2000


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    assert set(counts) <= set(expected)
    observed = np.array([counts[key] for key in expected])
    return float(stats.chisquare(observed, np.array(list(expected.values())) * observed.sum()).pvalue)


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT, Rule.NAIVE])
def test_draws_follow_q_in_order(rule: Rule) -> None:
    """χ² of ordered pairs: independent draws with replacement, sequential ones without."""
    replacement = rule is not Rule.MSS_WITHOUT_REPLACEMENT
    expected = {tokens: chance for chance, tokens in sequences(Q, 2, replacement=replacement)}
    counts = Counter(draw_proposals(rule, Q, 2, PARAMS, i, salt=3) for i in range(SAMPLES))
    assert p_value(counts, expected) > 0.01


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("pair", ["speculators", "nodes"])
def test_draws_under_two_salts_are_independent(rule: Rule, pair: str) -> None:
    """χ² of the pair (draw of one, draw of the other) at the same seed and position against q x q."""
    left, right = (
        (draft_salt(1, 9), draft_salt(2, 9)) if pair == "speculators" else (draft_salt(1, 9), draft_salt(1, 8))
    )
    counts = Counter(
        draw_proposals(rule, Q, 1, PARAMS, i, left) + draw_proposals(rule, Q, 1, PARAMS, i, right)
        for i in range(SAMPLES)
    )
    expected = {tokens: chance for chance, tokens in sequences(Q, 2, replacement=True)}
    assert p_value(counts, expected) > 0.01


def test_draws_are_a_pure_function() -> None:
    """A restarted speculator repeats itself; another seed, position or salt draws anew."""
    q = distribution(range(1, 50))
    calls = [(11, 5, 1), (12, 5, 1), (11, 6, 1), (11, 5, 2)]
    drawn = {
        call: draw_proposals(Rule.MSS, q, 4, SamplingParams(seed=call[0]), call[1], salt=call[2]) for call in calls
    }
    assert drawn[calls[0]] == draw_proposals(Rule.MSS, q, 4, PARAMS, 5, salt=1)
    assert len(set(drawn.values())) == len(calls)


def test_target_only_ranks_under_the_verifiers_noise() -> None:
    """The first token is argmax(log q + g) with the TARGET stream, whichever salt."""
    for position in range(200):
        noisy = np.log(Q.probs) + gumbel(11, position, Q.ids, Stream.TARGET)
        assert draw_proposals(Rule.TARGET_ONLY, Q, 3, PARAMS, position, salt=position) == tuple(
            Q.ids[np.argsort(-noisy)]
        )


@pytest.mark.parametrize("rule", list(Rule))
def test_greedy_proposes_the_most_likely_tokens(rule: Rule) -> None:
    """At temperature 0 no noise is used, ties go to the lowest id."""
    assert draw_proposals(rule, distribution([1, 3, 1, 9]), 3, GREEDY, 0, salt=0) == (3, 1, 0)


@pytest.mark.parametrize("rule", list(Rule))
def test_counts(rule: Rule) -> None:
    """Draws with replacement come as asked for; different tokens end with the support."""
    for count in (0, 1, 3, 7):
        drawn = draw_proposals(rule, Q, count, PARAMS, 0, salt=0)
        repeats = rule in (Rule.MSS, Rule.NAIVE)
        assert len(drawn) == (count if repeats else min(count, 3))
        assert repeats or len(set(drawn)) == len(drawn)


def test_truncation_keeps_the_top_and_is_the_same_at_both_ends() -> None:
    """q is the float32 weights' alone: a receiver that rebuilds it from them holds the same float64 numbers."""
    log_probs = np.log(np.random.default_rng(0).dirichlet(np.ones(1000)))
    q = DraftDistribution.truncate(log_probs, 16)
    assert q.ids.tolist() == np.argsort(-log_probs)[:16].tolist()
    assert q.probs == pytest.approx(np.exp(log_probs[q.ids]) / np.exp(log_probs[q.ids]).sum(), rel=1e-6)
    received = DraftDistribution.of(q.ids.tolist(), q.weights.tolist())
    assert received.probs.tolist() == q.probs.tolist()


def test_truncation_of_short_and_tied_distributions() -> None:
    """Removed tokens and those too small for float32 do not count; ties go to the lowest id."""
    assert DraftDistribution.truncate([-np.inf, 0.0, -200.0, -1.0], 4).ids.tolist() == [1, 3]
    assert DraftDistribution.truncate(np.zeros(9), 3).ids.tolist() == [0, 1, 2]


@given(weights(5))
@settings(max_examples=50, deadline=None)
def test_without_renormalises(values: list[float]) -> None:
    """Taking tokens out one by one leaves the others in proportion, down to the last."""
    q = distribution(values)
    for token in q.ids.tolist()[:-1]:
        q = q.without(token)
        assert q[token] == 0
        assert q.probs.sum() == pytest.approx(1.0, abs=1e-15)
    assert q.probs.tolist() == [1.0]


def test_cut_takes_from_the_end_of_the_test_order() -> None:
    """The first refusal ends the node's draws, those of later speculators too."""
    node = [Proposals(Q, (0, 0, 2)), Proposals(Q, (3,))]

    def tokens(limit: int) -> list[tuple[int, ...]]:
        return [proposal.tokens for proposal in cut(node, lambda before: len(before) < limit)]

    assert [tokens(limit) for limit in range(5)] == [[], [(0,)], [(0, 0)], [(0, 0, 2)], [(0, 0, 2), (3,)]]


BAD = {
    "no token": ([], [], 1, "proposals.ids"),
    "too many tokens": (range(MAX_SUPPORT + 1), [1.0] * (MAX_SUPPORT + 1), 1, "proposals.ids"),
    "weights of another length": ([1, 2], [1.0], 1, "proposals.weights"),
    "id beyond the vocabulary": ([1, 10], [1.0, 1.0], 1, "proposals.ids"),
    "id twice": ([1, 1], [1.0, 1.0], 1, "proposals.ids"),
    "weight zero": ([1, 2], [1.0, 0.0], 1, "proposals.weights"),
    "weight negative": ([1, 2], [1.0, -1.0], 1, "proposals.weights"),
    "weight NaN": ([1, 2], [1.0, math.nan], 1, "proposals.weights"),
    "weight infinite": ([1, 2], [1.0, math.inf], 1, "proposals.weights"),
    "no draws": ([1, 2], [1.0, 1.0], 0, "proposals.count"),
    "too many draws": ([1, 2], [1.0, 1.0], MAX_DRAWS + 1, "proposals.count"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_breaks_an_invariant_is_named(name: str) -> None:
    """Proposals from the network are checked before anything divides by them."""
    ids, values, count, field = BAD[name]
    with pytest.raises(InvalidTree) as caught:
        check_proposals(common_pb2.Proposals(ids=ids, weights=values, count=count), vocab_size=10)
    assert caught.value.field == field


def test_a_distribution_is_the_same_behind_the_wire() -> None:
    """Ids, their order and the weights survive bit by bit, so both ends draw the same tokens."""
    q = DraftDistribution.truncate(np.log(np.random.default_rng(1).dirichlet(np.ones(200))))
    message = common_pb2.Proposals.FromString(proposals_to_proto(q, 5).SerializeToString())
    check_proposals(message, vocab_size=200)
    received = distribution_from_proto(message)
    assert received.ids.tolist() == q.ids.tolist()
    assert received.probs.tolist() == q.probs.tolist()
    assert message.count == 5
