"""Children in the modes that draw: what they are drawn from, what is told about it, and that it happens once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from graftree.acceptance import Rule, draw_proposals
from graftree.codec import distribution_from_proto
from graftree.errors import InvalidArgument
from graftree.proposals import MAX_SUPPORT, draft_salt
from graftree.sampling import SamplingParams
from graftree.tree import root_id
from graftree.v1 import common_pb2, speculation_pb2
from speculator_service.drafters.base import Candidate, DraftSession, Leaf
from speculator_service.drafters.ngram import NgramDrafter
from speculator_service.events import Grown, Open
from speculator_service.growth import Growth
from speculator_service.limits import Limits
from speculator_service.router_stream import delta_of

LIMITS = Limits(max_sessions=1, max_nodes=16, max_depth=4, branching=3)
PROMPT = (1, 2, 3, 1, 2, 4, 1, 2)
SALT = 5
THREE = [Candidate(7, math.log(0.6)), Candidate(8, math.log(0.3)), Candidate(9, math.log(0.1))]
MSS_RULES = [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT]


def request(rule: Rule, temperature: float = 1.0, **fields: object) -> speculation_pb2.DraftOpen:
    values = {"session_id": "a", "salt": SALT, "token_ids": PROMPT, "vocab_size": 50, "max_length": 100}
    sampling = common_pb2.SamplingParams(temperature=temperature, seed=3)
    values |= {"sampling": sampling, "mode": rule.to_proto(), "draft_salt": 11, **fields}
    return speculation_pb2.DraftOpen(**values)


def growth(message: speculation_pb2.DraftOpen, limits: Limits = LIMITS) -> tuple[DraftSession, Growth]:
    session = limits.session("1:a", message)
    return session, Growth(Open(session, limits.tree(session, 0), 0, limits.drawing(session, message)))


def delta(grown: Growth) -> speculation_pb2.TreeDelta:
    event = grown.event(0)
    assert isinstance(event, Grown)
    found = delta_of([event])
    assert found is not None
    return found


@pytest.mark.parametrize("rule", MSS_RULES)
def test_the_receiver_knows_the_draws(rule: Rule) -> None:
    """From the delta's q and count, the seed, the salt and the node come the very children that the tree has."""
    _, grown = growth(request(rule))
    (root,) = grown.tree.take(1)
    grown.attach(root, THREE)
    sent = delta(grown)
    (entry,) = sent.proposals
    assert entry.node_id == root_id(SALT, PROMPT)
    q = distribution_from_proto(entry.proposals)
    assert q.ids.tolist() == [7, 8, 9]
    assert q.probs == pytest.approx([0.6, 0.3, 0.1])
    assert entry.proposals.count == 3
    key = draft_salt(11, entry.node_id)
    drawn = draw_proposals(rule, q, 3, SamplingParams(seed=3), len(PROMPT), key)
    assert set(sent.token_ids) <= set(drawn)
    while not grown.tree.complete:  # children that waited for room enter, too; none that was not drawn does
        for leaf in grown.tree.take(4):
            grown.attach(leaf, [])
    assert set(grown.tree.root.children) == set(drawn)


@pytest.mark.parametrize("rule", MSS_RULES)
def test_draws_have_their_distribution(rule: Rule) -> None:
    """Over 4000 seeds the first draw of a node is distributed as the drafter says."""
    first = np.zeros(10)
    for seed in range(4000):
        _, grown = growth(request(rule, sampling=common_pb2.SamplingParams(temperature=1.0, seed=seed)))
        (root,) = grown.tree.take(1)
        grown.attach(root, THREE)
        first[delta(grown).token_ids[0]] += 1
    assert first[7:] / 4000 == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_scores_follow_the_rank_of_the_draw() -> None:
    """The first draw promises the most whatever token it is, and less where the drafter leaves mass to others."""
    roomy = replace(LIMITS, max_nodes=64)
    sure, unsure = [Candidate(t, math.log(0.5)) for t in (7, 8)], [Candidate(t, math.log(0.2)) for t in (7, 8)]
    _, one = growth(request(Rule.MSS_WITHOUT_REPLACEMENT), roomy)
    one.attach(one.tree.take(1)[0], sure)
    _, other = growth(request(Rule.MSS_WITHOUT_REPLACEMENT), roomy)
    other.attach(other.tree.take(1)[0], unsure)
    assert list(delta(one).log_probs) == pytest.approx([math.log(0.37), math.log(0.11)])
    assert list(delta(other).log_probs) == pytest.approx([math.log(0.4 * 0.37), math.log(0.4 * 0.11)])


def test_naive_sends_no_distribution() -> None:
    """NAIVE draws too, with the drafter's own chances as scores, and nothing more travels."""
    _, grown = growth(request(Rule.NAIVE))
    grown.attach(grown.tree.take(1)[0], THREE)
    sent = delta(grown)
    chances = dict(THREE)
    assert not sent.proposals
    assert list(sent.log_probs) == pytest.approx([chances[token] for token in sent.token_ids])


@pytest.mark.parametrize("rule", list(Rule))
def test_at_temperature_0_children_are_the_best(rule: Rule) -> None:
    """No draws, no distribution, whatever the mode: the drafter's best in its own order."""
    session, grown = growth(request(rule, temperature=0.0))
    assert session.branching == 3
    grown.attach(grown.tree.take(1)[0], THREE)
    sent = delta(grown)
    assert not sent.proposals
    assert list(sent.token_ids)[:2] == [7, 8]


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT, Rule.NAIVE])
def test_drafters_do_not_see_the_noise_of_their_draws(rule: Rule) -> None:
    """The session a drafter gets has no seed, and room for a whole distribution."""
    answers = []
    for seed in (3, 4):
        session, _ = growth(request(rule, sampling=common_pb2.SamplingParams(temperature=1.0, seed=seed)))
        assert session.sampling.seed is None
        assert session.branching == MAX_SUPPORT
        drafter = NgramDrafter()
        drafter.open(session)
        answers += drafter.expand([Leaf("1:a", 0, 0, (), len(PROMPT))])
    assert answers[0] == answers[1]
    assert {candidate.token_id for candidate in answers[0]} == {3, 4}


def test_target_only_drafters_see_it() -> None:
    """There the noise is the verifier's own, and ranking under it pays."""
    session, _ = growth(request(Rule.TARGET_ONLY))
    assert session.sampling.seed == 3
    assert session.branching == 3


def test_a_node_is_drawn_once_in_its_life() -> None:
    """Nodes that survive a commit keep their draws; only nodes drawn since the last delta are told."""
    _, grown = growth(request(Rule.MSS))
    while not grown.tree.complete:
        for leaf in grown.tree.take(4):
            grown.attach(leaf, THREE)
    told = [entry.node_id for entry in delta(grown).proposals]
    child = max(grown.tree.root.children.values(), key=lambda node: len(node.children))
    grown.tree.commit([child.token_id])
    while not grown.tree.complete:
        for leaf in grown.tree.take(4):
            grown.attach(leaf, THREE)
    told += [entry.node_id for entry in delta(grown).proposals]
    assert len(told) == len(set(told)) > 4


def test_draws_of_a_dead_node_are_not_told() -> None:
    """What a commit has dropped before it was sent stays here."""
    _, grown = growth(request(Rule.MSS))
    grown.attach(grown.tree.take(1)[0], THREE)
    grown.tree.commit([40])
    assert not [node for node, _ in (grown.event(0) or Grown("", [], 0, False)).proposed]


def test_ids_outside_the_vocabulary_are_not_drawn() -> None:
    """An SSM with a larger vocabulary: the rest is renormalised before anything is drawn. Nothing left: no draws."""
    _, grown = growth(request(Rule.MSS))
    grown.attach(grown.tree.take(1)[0], [Candidate(60, math.log(0.9)), Candidate(7, math.log(0.1))])
    (entry,) = delta(grown).proposals
    assert list(entry.proposals.ids) == [7]
    _, grown = growth(request(Rule.MSS))
    grown.attach(grown.tree.take(1)[0], [Candidate(60, math.log(0.9))])
    event = grown.event(0)
    assert event is not None
    assert event.complete
    assert not event.proposed


def test_the_count_never_exceeds_the_tree() -> None:
    """With room for two nodes two are drawn: a constant of the session, not of what was drawn before."""
    _, grown = growth(request(Rule.MSS, max_nodes=2))
    grown.attach(grown.tree.take(1)[0], THREE)
    assert delta(grown).proposals[0].proposals.count == 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": common_pb2.SamplingParams(temperature=1.0)}, "sampling.seed"),
        ({"mode": 9}, "mode"),
    ],
)
def test_what_cannot_be_drawn_is_refused(fields: dict[str, object], field: str) -> None:
    """No seed, or a mode that does not exist."""
    with pytest.raises(InvalidArgument) as caught:
        growth(request(Rule.MSS, **fields))
    assert caught.value.field == field
