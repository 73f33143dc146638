"""The chance to pass a node: closed forms against enumeration and against the sampler."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from bench.node_success import Scheme, node_success
from graftree.acceptance import AcceptanceTest, Rule, choose_token, draw_proposals, stages
from graftree.proposals import DraftDistribution
from graftree.sampling import SamplingParams
from tests.acceptance_exact import Floats, dense, distribution, draw_sets

P = np.array([0.05, 0.35, 0.2, 0.3, 0.1])
Q = distribution([0, 5, 1, 3, 6])


def enumerated(rule: Rule, p: Floats, q: DraftDistribution, count: int) -> float:
    total = 0.0
    for chance, sets in draw_sets(rule, [q], [count]):
        failure = 1.0
        for stage in stages(rule, p, sets):
            if isinstance(stage, AcceptanceTest):
                failure *= 1.0 - stage.chance
        total += chance * (1.0 - failure)
    return total


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_mss_rules(count: int) -> None:
    """Exact for MSS; an average over sets of draws for draws without replacement."""
    assert node_success("mss", P, Q, count) == pytest.approx(enumerated(Rule.MSS, P, Q, count), abs=1e-12)
    exact = enumerated(Rule.MSS_WITHOUT_REPLACEMENT, P, Q, count)
    assert node_success("mss_without_replacement", P, Q, count, samples=1000) == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_naive_and_top_k(count: int) -> None:
    """Naive is the chance that t is among the draws; top-k the mass of the most likely tokens."""
    naive = sum(chance * P[list(set(sets[0].tokens))].sum() for chance, sets in draw_sets(Rule.NAIVE, [Q], [count]))
    assert node_success("naive", P, Q, count) == pytest.approx(naive, abs=1e-12)
    assert node_success("top_k", P, Q, count) == pytest.approx(P[[4, 1, 3][:count]].sum(), abs=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shared_noise_is_the_samplers(count: int) -> None:
    """The race integral agrees with counting over 2000 positions."""
    params, passed = SamplingParams(seed=1), 0
    for position in range(2000):
        children = draw_proposals(Rule.TARGET_ONLY, Q, count, params, position, 0)
        passed += choose_token(Rule.TARGET_ONLY, np.log(P), [], params, position) in children
    assert node_success("shared_noise", P, Q, count) == pytest.approx(passed / 2000, abs=0.035)


def test_shared_noise_with_one_child_is_the_closed_form() -> None:
    """Σ_x 1 / Σ_y max(p(y) / p(x), q(y) / q(x)) (Daliri, Musco, Suresh)."""
    q = dense(Q, 5)
    both = np.flatnonzero(q)
    exact = sum(1.0 / np.maximum(P / P[x], q / q[x]).sum() for x in both)
    assert node_success("shared_noise", P, Q, 1, samples=4000) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_more_children_never_hurt(scheme: Scheme) -> None:
    """And the same model as speculator always passes under the coupled schemes."""
    chances = [node_success(scheme, P, Q, count, samples=64) for count in range(1, 5)]
    assert chances == sorted(chances)
    if scheme not in ("naive", "top_k"):
        assert node_success(scheme, Q.probs, DraftDistribution(np.arange(4), Q.weights), 1) == pytest.approx(1.0)
