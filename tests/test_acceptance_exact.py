"""Every rule emits the LLM's own distribution: exact enumeration of draws, no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.acceptance import AcceptanceTest, ResidualDraw, Rule, acceptance_probability, outcome, residual, stages
from graftree.proposals import DraftDistribution, Proposals, cut
from tests.acceptance_exact import (
    Floats,
    distribution,
    draw_sets,
    emitted,
    normalised,
    total_variation,
    weights,
)

EXACT = 1e-12
DRAWN = [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT]


@st.composite
def nodes(draw: st.DrawFn) -> tuple[Floats, list[DraftDistribution], list[int]]:
    """p, the speculators' q and their numbers of draws: 3 to 5 tokens, 1 to 3 speculators, 1 to 4 draws each."""
    vocab_size = draw(st.integers(3, 5))
    counts = draw(st.sampled_from([[1], [2], [3], [4], [1, 1], [1, 2], [2, 2], [3, 1], [1, 1, 1], [2, 1, 1]]))
    p = normalised(draw(weights(vocab_size)))
    return p, [distribution(draw(weights(vocab_size))) for _ in counts], counts


@pytest.mark.parametrize("rule", list(Rule))
@given(node=nodes())
@settings(max_examples=25, deadline=None)
def test_one_node_is_lossless(rule: Rule, node: tuple[Floats, list[DraftDistribution], list[int]]) -> None:
    """Over all draws the emitted token is distributed as p, whatever the speculators' distributions."""
    p, qs, counts = node
    assert total_variation(emitted(rule, p, qs, counts), p) < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_one_node_seven_draws_of_two_speculators(rule: Rule) -> None:
    """Long test orders, on three tokens: still p."""
    p, qs = normalised([2, 5, 3]), [distribution([6, 1, 3]), distribution([1, 1, 8])]
    assert total_variation(emitted(rule, p, qs, [4, 3]), p) < EXACT


@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1 / 3, 1 / 3, 1 / 3], [1, 1, 1]),
        ([1, 0, 0], [0, 1, 1]),
        ([0, 1, 1], [1, 0, 0]),
        ([1, 0, 0], [1, 0, 0]),
        ([0.1 + 0.2, 0.3, 0.4], [0.3, 0.3, 0.4]),
        ([1e-300, 1, 1], [1, 1, 1]),
    ],
)
def test_equal_disjoint_and_degenerate_distributions(rule: Rule, p: list[float], q: list[float]) -> None:
    """p = q (no residual left), no common support, one token, one ulp apart: finite and exact."""
    target = normalised(p)
    assert total_variation(emitted(rule, target, [distribution(q), distribution(q[::-1])], [3, 1]), target) < EXACT


def test_residual_of_equal_distributions_is_p() -> None:
    """Where nothing is left to normalise p stays due, and nothing divides by zero."""
    q = distribution([1, 2, 3])
    assert residual(q.probs.copy(), q).tolist() == q.probs.tolist()


@pytest.mark.parametrize("vocab_size", [3, 1000, 50_000])
def test_rounding_of_nearly_equal_distributions(vocab_size: int) -> None:
    """p and q that differ by rounding alone: the chance to ever need the residual is below 1e-14."""
    q = DraftDistribution.of(np.arange(vocab_size), np.random.default_rng(0).random(vocab_size) + 1e-3)
    p = np.exp(np.log(q.probs))
    rejected = sum(q.probs[t] * (1.0 - acceptance_probability(p, q, t)) for t in range(min(vocab_size, 1000)))
    assert rejected < 1e-14


def test_mss_is_the_formula() -> None:
    """Accept 0.1/0.5; the residual of (.1, .6, .3) and (.5, .2, .3) is token 1 alone; its next test is certain."""
    p, q = np.array([0.1, 0.6, 0.3]), DraftDistribution.of([0, 1, 2], [5, 2, 3])
    first, second, last = list(stages(Rule.MSS, p, [Proposals(q, (0, 1))]))
    assert isinstance(first, AcceptanceTest)
    assert (first.token, first.chance) == (0, pytest.approx(0.2))
    assert second == AcceptanceTest(1, 1.0)
    assert isinstance(last, ResidualDraw)
    assert last.p == pytest.approx([0, 1, 0])


def test_without_replacement_is_the_formula() -> None:
    """After token 0 is rejected q is (0, .4, .6), p is (0, .75, .25): token 2 is accepted with .25/.6."""
    p, q = np.array([0.1, 0.5, 0.4]), DraftDistribution.of([0, 1, 2], [5, 2, 3])
    _, second, last = list(stages(Rule.MSS_WITHOUT_REPLACEMENT, p, [Proposals(q, (0, 2))]))
    assert isinstance(second, AcceptanceTest)
    assert isinstance(last, ResidualDraw)
    assert second.chance == pytest.approx(0.25 / 0.6)
    assert last.p == pytest.approx([0, 1, 0])


@pytest.mark.parametrize("rule", [Rule.TARGET_ONLY, Rule.NAIVE])
def test_rules_that_test_no_draws_ignore_proposals(rule: Rule) -> None:
    """Their outcome is p for each set of draws, not only on average."""
    p = normalised([1, 6, 3])
    assert outcome(rule, p, [Proposals(distribution([8, 1, 1]), (0, 0, 1))]).tolist() == p.tolist()


@pytest.mark.parametrize("rule", DRAWN)
@given(node=nodes(), limit=st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_cutting_by_the_draws_before_is_lossless(
    rule: Rule, node: tuple[Floats, list[DraftDistribution], list[int]], limit: int
) -> None:
    """Draws kept until `limit` different tokens are there, or a token 0 was drawn: both look only backwards."""
    p, qs, counts = node
    for keep in (lambda before: len(set(before)) < limit, lambda before: 0 not in before):
        kept = [(chance, cut(sets, keep)) for chance, sets in draw_sets(rule, qs, counts)]
        total = sum(chance * outcome(rule, p, sets) for chance, sets in kept)
        assert total_variation(total, p) < EXACT


Chosen = Callable[[tuple[int, ...], Sequence[int]], tuple[int, set[int]]]


def two_tokens(rule: Rule, choose: Chosen, *, shared: bool = False) -> tuple[Floats, Floats]:
    """Joint distribution of two tokens over all draws, and what it should be.

    The root has two draws, each of the three possible children one. `choose` sees the root's draws and all children's
    draws, and says how many of the root's are tested and which children's are used. `shared` draws all children
    with one noise.
    """
    p, q = normalised([1, 6, 3]), distribution([5, 2, 3])
    child_p = [normalised([2, 3, 5]), normalised([7, 1, 2]), normalised([1, 1, 8])]
    child_q = distribution([4, 2, 1])
    joint = np.zeros((3, 3))
    for root_chance, (root,) in draw_sets(rule, [q], [2]):
        for draws in product(range(3), repeat=3):
            if shared and len(set(draws)) > 1:
                continue
            chance = root_chance * (child_q[draws[0]] if shared else np.prod([child_q[d] for d in draws]))
            tested, used = choose(root.tokens, draws)
            first = outcome(rule, p, [Proposals(q, root.tokens[:tested])])
            for token in range(3):
                proposals = [Proposals(child_q, (draws[token],))] if token in used else []
                joint[token] += chance * first[token] * outcome(rule, child_p[token], proposals)
    return joint, p[:, None] * np.array(child_p)


LOSSLESS_SHAPES: dict[str, Chosen] = {
    "all": lambda root, draws: (2, set(root)),
    "nodes dropped by value: only the child with the largest token is kept": lambda root, draws: (2, {max(root)}),
    "second child grown only if the first child's draw was 0": lambda root, draws: (
        2,
        set(root) if draws[root[0]] == 0 else {root[0]},
    ),
    "second root draw kept only if the first child's draw was 0": lambda root, draws: (
        (2, set(root)) if draws[root[0]] == 0 else (1, {root[0]})
    ),
}


@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("shape", LOSSLESS_SHAPES)
def test_two_levels_are_lossless(rule: Rule, shape: str) -> None:
    """Trees may grow and be cut in view of any draw but those that are decided on; nodes go freely."""
    joint, exact = two_tokens(rule, LOSSLESS_SHAPES[shape])
    assert total_variation(joint, exact) < EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_a_childs_draw_dropped_by_its_value_is_biased(rule: Rule) -> None:
    """Using a node's draws only if they look good spoils its own token."""
    joint, exact = two_tokens(rule, lambda root, draws: (2, {token for token in root if draws[token] == 0}))
    assert total_variation(joint, exact) > 0.01


@pytest.mark.parametrize("rule", DRAWN)
def test_nodes_of_one_position_must_not_share_noise(rule: Rule) -> None:
    """The second child grown only if the first child's draw was 0, as above, but both drawn with one noise: biased.

    Without such a choice sharing would do; best-first growth makes it all the time. So the noise is keyed by node.
    """
    grown = LOSSLESS_SHAPES["second child grown only if the first child's draw was 0"]
    joint, exact = two_tokens(rule, grown, shared=True)
    assert total_variation(joint, exact) > 0.01
    assert total_variation(*two_tokens(rule, LOSSLESS_SHAPES["all"], shared=True)) < EXACT


@pytest.mark.parametrize("rule", DRAWN)
@given(
    root=weights(3),
    children=st.lists(st.tuples(weights(3), weights(3), weights(3)), min_size=3, max_size=3),
    qs=st.tuples(weights(3), weights(3)),
)
@settings(max_examples=10, deadline=None)
def test_two_levels_two_speculators(
    rule: Rule,
    root: list[float],
    children: list[tuple[list[float], list[float], list[float]]],
    qs: tuple[list[float], list[float]],
) -> None:
    """Random distributions at the root and at each child, two speculators at both: the joint law is p(x) p(y | x)."""
    p = normalised(root)
    first = emitted(rule, p, [distribution(q) for q in qs], [2, 1])
    second = [emitted(rule, normalised(t), [distribution(a), distribution(b)], [1, 2]) for t, a, b in children]
    exact = p[:, None] * np.array([normalised(t) for t, _, _ in children])
    assert total_variation(first[:, None] * np.array(second), exact) < EXACT
