"""What looks like a simplification of MSS and is not: each variant changes the answers, by how much is computed here.

One example for all, two draws on three tokens: p = (.1, .6, .3), q = (.05, .2, .75), second SSM (.05, .15, .8).
"""

from __future__ import annotations

import numpy as np
import pytest

from graftree.acceptance import Rule, outcome
from graftree.proposals import DraftDistribution, Proposals, cut
from tests.acceptance_exact import Floats, draw_sets, emitted, total_variation

P = np.array([0.1, 0.6, 0.3])
Q = DraftDistribution.of([0, 1, 2], [1, 4, 15])
OTHER = DraftDistribution.of([0, 1, 2], [1, 3, 16])


def error(emitted_token: Floats) -> float:
    return total_variation(emitted_token, P)


@pytest.mark.parametrize("rule", list(Rule))
def test_the_rules_themselves(rule: Rule) -> None:
    """The example is lossless under each rule as it is, with one speculator and with two."""
    assert error(emitted(rule, P, [Q], [2])) < 1e-15
    assert error(emitted(rule, P, [Q, OTHER], [1, 1])) < 1e-15


def test_merged_duplicates() -> None:
    """A repeated draw tested only once: 0.010."""
    total = sum(
        chance * outcome(Rule.MSS, P, [Proposals(Q, tuple(dict.fromkeys(draws.tokens)))])
        for chance, (draws,) in draw_sets(Rule.MSS, [Q], [2])
    )
    assert error(total) == pytest.approx(0.010, abs=5e-4)


def test_top_k_children() -> None:
    """The most likely tokens of q instead of draws from it: 0.100."""
    assert error(outcome(Rule.MSS, P, [Proposals(Q, (2, 1))])) == pytest.approx(0.100, abs=5e-4)


def test_draws_without_replacement_under_the_mss_rule() -> None:
    """q not renormalised after a rejection: 0.040."""
    total = sum(
        chance * outcome(Rule.MSS, P, sets) for chance, sets in draw_sets(Rule.MSS_WITHOUT_REPLACEMENT, [Q], [2])
    )
    assert error(total) == pytest.approx(0.040, abs=5e-4)


def test_draws_without_replacement_in_another_order() -> None:
    """The MCSD rule on draws sorted by q instead of draw order: 0.1."""
    total = sum(
        chance * outcome(Rule.MSS_WITHOUT_REPLACEMENT, P, [Proposals(Q, tuple(sorted(draws.tokens, reverse=True)))])
        for chance, (draws,) in draw_sets(Rule.MSS_WITHOUT_REPLACEMENT, [Q], [2])
    )
    assert error(total) > 0.05


def test_a_mixture_over_two_ssms() -> None:
    """One draw of each SSM, both tested against the mean of the two distributions: 0.010."""
    mixture = DraftDistribution.of([0, 1, 2], [2, 7, 31])
    total = sum(
        chance * outcome(Rule.MSS, P, [Proposals(mixture, left.tokens + right.tokens)])
        for chance, (left, right) in draw_sets(Rule.MSS, [Q, OTHER], [1, 1])
    )
    assert error(total) == pytest.approx(0.0105, abs=5e-4)


def test_q_of_the_full_distribution_with_truncated_draws() -> None:
    """Draws from the top two entries tested against q before truncation: biased, q is truncated first."""
    top = DraftDistribution.of([1, 2], [4, 15])
    total = sum(
        chance * outcome(Rule.MSS, P, [Proposals(Q, draws.tokens)])
        for chance, (draws,) in draw_sets(Rule.MSS, [top], [2])
    )
    assert error(total) > 1e-3


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT])
def test_dropping_a_draw_by_its_own_value(rule: Rule) -> None:
    """The second draw kept only if it is likely under q: biased. By the first draw's value alone: lossless."""
    own = before = np.zeros(3)
    for chance, (draws,) in draw_sets(rule, [Q], [2]):
        first, second = draws.tokens
        own = own + chance * outcome(rule, P, [Proposals(Q, (first, second) if second == 1 else (first,))])
        kept = cut([draws], lambda tokens: not tokens or tokens[0] == 1)
        before = before + chance * outcome(rule, P, kept)
    assert error(own) > 0.01
    assert error(before) < 1e-15


def test_keeping_a_repeat_because_it_costs_no_node() -> None:
    """A budget of one node that keeps the second draw only where it repeats the first: biased."""
    total = np.zeros(3)
    for chance, (draws,) in draw_sets(Rule.MSS, [Q], [2]):
        kept = draws.tokens if len(set(draws.tokens)) == 1 else draws.tokens[:1]
        total = total + chance * outcome(Rule.MSS, P, [Proposals(Q, kept)])
    assert error(total) > 0.005


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT])
def test_two_speculators_with_one_salt(rule: Rule) -> None:
    """The second speculator repeats the first one's draw: biased, so each has a salt of its own."""
    total = np.zeros(3)
    for chance, (draws,) in draw_sets(rule, [Q], [1]):
        total = total + chance * outcome(rule, P, [draws, draws])
    assert error(total) > 0.01


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT])
def test_dropping_a_draw_of_the_first_speculator_by_the_seconds_value(rule: Rule) -> None:
    """A draw may depend on those tested before it only, so cutting runs through all speculators in test order."""
    total = np.zeros(3)
    for chance, (left, right) in draw_sets(rule, [Q, OTHER], [2, 1]):
        kept = left if right.tokens[0] == 1 else Proposals(Q, left.tokens[:1])
        total = total + chance * outcome(rule, P, [kept, right])
    assert error(total) > 1e-3
