"""Acceptance modes in the verifier: it knows the draws by itself, tests all of them, refuses what it cannot test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from graftree.acceptance import Rule, choose_token, draw_proposals
from graftree.proposals import DraftDistribution, Proposals, draft_salt
from graftree.sampling import SamplingContext, SamplingParams, process
from graftree.tree import TokenTree, node_id
from graftree.v1 import common_pb2
from graftree.v1.verification_pb2 import VerifyStep
from tests.verifier_harness import Client, Router, make_engine, reference_model

PROMPT = list(range(3, 12))
SAMPLED = SamplingParams(temperature=0.9, top_k=30, seed=4)
MSS_RULES = [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT]
SPECULATOR = 77


def opened(rule: Rule, params: SamplingParams = SAMPLED, **fields: Any) -> Client:
    return Router(make_engine()).open("a", PROMPT, params=params, mode=rule.to_proto(), **fields)


def log_p(text: Sequence[int], params: SamplingParams = SAMPLED) -> np.ndarray:
    """(V,) the processed distribution after a text, by transformers' forward."""
    import torch

    with torch.inference_mode():
        row = reference_model()(torch.tensor([list(text)]), use_cache=False).logits[0, -1].float().numpy()
    return process(row, params, SamplingContext(text, vocab_size=len(row)))


def offer(
    node: int, ids: Sequence[int], weights: Sequence[float], count: int = 3, salt: int = SPECULATOR
) -> VerifyStep.NodeProposals:
    proposals = common_pb2.Proposals(ids=ids, weights=weights, count=count)
    return VerifyStep.NodeProposals(node=node, salt=salt, proposals=proposals)


def top(text: Sequence[int], count: int = 4) -> tuple[list[int], list[float]]:
    q = DraftDistribution.truncate(log_p(text), count)
    return q.ids.tolist(), q.weights.tolist()


@pytest.mark.parametrize("rule", MSS_RULES)
def test_draws_are_tested_without_being_sent(rule: Rule) -> None:
    """Token by token what `choose_token` says of the draws that follow from q, seed, salt, node and position.

    The tree holds no child at all: an accepted draw is the bonus token.
    """
    client = opened(rule)
    for _ in range(12):
        text = list(client.token_ids)
        ids, weights = top(text)
        q = DraftDistribution.of(ids, weights)
        key = draft_salt(SPECULATOR, client.root)
        drawn = Proposals(q, draw_proposals(rule, q, 3, SAMPLED, len(text), key))
        client.send(proposals=[offer(-1, ids, weights)])
        client.router.run()
        verdict = client.take()
        assert not verdict.tree_error
        assert list(verdict.token_ids) == [choose_token(rule, log_p(text), [drawn], SAMPLED, len(text))]


@pytest.mark.parametrize("rule", MSS_RULES)
def test_a_tree_of_draws_is_accepted_down_to_its_leaf(rule: Rule) -> None:
    """With q = p every first draw is accepted: two levels of nodes and the bonus token, itself a draw."""
    client = opened(rule)
    text, tokens, offers = list(client.token_ids), list[int](), list[VerifyStep.NodeProposals]()
    identifier = client.root
    for level in range(3):
        ids, weights = top([*text, *tokens], 30)
        q = DraftDistribution.of(ids, weights)
        key = draft_salt(SPECULATOR, identifier)
        (token,) = draw_proposals(rule, q, 1, SAMPLED, len(text) + level, key)
        offers.append(offer(level - 1, ids, weights, count=1))
        tokens.append(token)
        identifier = node_id(identifier, token)
    client.send(TokenTree(client.root, tuple(tokens[:2]), (-1, 0), (-1.0, -1.0)), proposals=offers)
    client.router.run()
    verdict = client.take()
    assert list(verdict.token_ids) == tokens
    assert list(verdict.accepted_nodes) == [0, 1]


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=0.0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize("rule", list(Rule))
def test_proposals_where_none_are_tested_change_nothing(rule: Rule, params: SamplingParams) -> None:
    """TARGET_ONLY, NAIVE and temperature 0 do not look at them, whatever they hold."""
    if rule.at(params).tests_draws:
        params = SamplingParams(temperature=0.0)
    with_offers, without = opened(rule, params), opened(rule, params)
    for _ in range(5):
        with_offers.send(proposals=[offer(-1, [1, 1], [0.0])])
        with_offers.router.run()
        assert not with_offers.take().tree_error
        without.verify()
    assert with_offers.token_ids == without.token_ids


BAD = {
    "node below": (offer(-2, [1], [1.0]), "proposals.node"),
    "node beyond": (offer(1, [1], [1.0]), "proposals.node"),
    "weights": (offer(0, [1, 2], [1.0]), "proposals.weights"),
    "nan": (offer(0, [1], [float("nan")]), "proposals.weights"),
    "vocabulary": (offer(0, [512], [1.0]), "proposals.ids"),
    "no id": (offer(0, [], []), "proposals.ids"),
    "count": (offer(0, [1], [1.0], count=0), "proposals.count"),
    "salt": (offer(-1, [2], [1.0]), "proposals.salt"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_proposal_costs_the_tree_not_the_session(name: str) -> None:
    """The step runs without tree and proposals and says why; the next one is as good as new."""
    bad, field = BAD[name]
    client, plain = opened(Rule.MSS), opened(Rule.MSS)
    tree = TokenTree(client.root, (5,), (-1,), (-1.0,))
    client.send(tree, proposals=[offer(-1, [1], [1.0]), bad])
    client.router.run()
    verdict = client.take()
    assert field in verdict.tree_error
    assert list(verdict.token_ids) == list(plain.verify().token_ids)
    assert client.router.engine.counters.invalid_trees == 1
    ids, weights = top(client.token_ids)
    client.send(proposals=[offer(-1, ids, weights)])
    client.router.run()
    assert not client.take().tree_error


def test_a_node_takes_a_bounded_number() -> None:
    """More speculators at one node than any router has are refused."""
    client = opened(Rule.MSS)
    client.send(proposals=[offer(-1, [1], [1.0], salt=salt) for salt in range(17)])
    client.router.run()
    assert "at most 16" in client.take().tree_error


def test_the_last_position_tests_its_draws() -> None:
    """Where only the bonus token fits, nodes are cut and the root keeps its proposals."""
    client = opened(Rule.MSS, max_length=len(PROMPT) + 1)
    ids, weights = top(client.token_ids)
    q = DraftDistribution.of(ids, weights)
    drawn = draw_proposals(Rule.MSS, q, 3, SAMPLED, len(PROMPT), draft_salt(SPECULATOR, client.root))
    expected = choose_token(Rule.MSS, log_p(PROMPT), [Proposals(q, drawn)], SAMPLED, len(PROMPT))
    tree = TokenTree(client.root, (drawn[0],), (-1,), (-1.0,))
    client.send(tree, proposals=[offer(-1, ids, weights), offer(0, [1], [1.0])])
    client.router.run()
    assert list(client.take().token_ids) == [expected]


def test_an_unknown_mode_is_refused() -> None:
    """The field is named; nothing is opened."""
    router = Router(make_engine())
    router.open("a", PROMPT, params=SAMPLED, mode=9)
    router.run()
    assert [failure.reason for failure in router.failures] == ["INVALID_ARGUMENT"]
    assert "mode" in router.failures[0].message
