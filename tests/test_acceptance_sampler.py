"""The sampler draws what `outcome` computes, from noise streams that share nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from graftree import noise
from graftree.acceptance import ROOT, Rule, accept, choose_token, draw_proposals, outcome, residual
from graftree.noise import Stream
from graftree.proposals import DraftDistribution, Proposals, draft_salt
from graftree.sampling import GREEDY, SamplingContext, SamplingParams, choose, pick
from graftree.tree import TokenTree, node_id
from graftree.v1 import common_pb2
from tests.acceptance_exact import Floats, distribution, normalised

MSS_RULES = [Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT]
_U64 = np.uint64


def p_value(counts: NDArray[np.int64], expected: Floats) -> float:
    possible = expected > 1e-15
    assert counts[~possible].sum() == 0
    assert possible.sum() > 1
    return float(stats.chisquare(counts[possible], expected[possible] * counts.sum()).pvalue)


def test_rules_have_the_wires_numbers() -> None:
    """A rule is the SpeculationMode of the same name; unset is TARGET_ONLY."""
    for rule in Rule:
        assert common_pb2.SpeculationMode.Value(f"SPECULATION_MODE_{rule.name}") == rule
    assert len(common_pb2.SpeculationMode.values()) == len(Rule) + 1
    assert Rule.from_proto(common_pb2.SPECULATION_MODE_UNSPECIFIED) is Rule.TARGET_ONLY
    assert Rule.from_proto(common_pb2.SPECULATION_MODE_MSS) is Rule.MSS


@pytest.mark.parametrize(
    ("rule", "draws"),
    [
        (Rule.MSS, [(0, 0, 1), (2,)]),
        (Rule.MSS, [(0,), (0, 2)]),
        (Rule.MSS_WITHOUT_REPLACEMENT, [(0, 2, 1), (3,)]),
        (Rule.NAIVE, [(0,), (1,)]),
        (Rule.TARGET_ONLY, [(0,), (1,)]),
    ],
)
def test_the_sampler_draws_from_the_exact_outcome(rule: Rule, draws: list[tuple[int, ...]]) -> None:
    """χ² at one node, fixed draws of two speculators, noise of 4000 positions."""
    p = normalised([1, 4, 3, 2])
    proposals = [Proposals(distribution([5, 3, 2, 1]), draws[0]), Proposals(distribution([1, 1, 6, 2]), draws[1])]
    params = SamplingParams(seed=6)
    tokens = [choose_token(rule, np.log(p), proposals, params, position) for position in range(4000)]
    assert p_value(np.bincount(tokens, minlength=4), outcome(rule, p, proposals)) > 0.01


@pytest.mark.parametrize("rule", list(Rule))
def test_at_temperature_0_every_rule_is_argmax(rule: Rule) -> None:
    """Proposals and noise play no part; ties go to the lowest id."""
    wrong = [Proposals(distribution([1, 1, 1]), (2, 2))]
    assert choose_token(rule, np.log([0.3, 0.6, 0.1]), wrong, GREEDY, 3) == 1
    assert choose_token(rule, np.log([0.4, 0.4, 0.2]), wrong, GREEDY, 3) == 0


def test_target_only_is_pick() -> None:
    """Token by token what plain decoding picks, whatever was proposed."""
    params, log_p = SamplingParams(seed=5), np.log([0.3, 0.6, 0.1])
    for position in range(100):
        proposals = [Proposals(distribution([1, 1, 1]), (position % 3,))]
        assert choose_token(Rule.TARGET_ONLY, log_p, proposals, params, position) == pick(log_p, params, position)


# --- trial 31: noise streams, 131,072 draws

P = np.array([0.1, 0.6, 0.3])
Q = DraftDistribution.of([0, 1, 2], [2, 1, 1])
TRIALS = 131_072
SEED, SALT = 2024, 77


def uniforms(seed: int, stream: Stream, count: int = TRIALS) -> Floats:
    """(count, 3) `noise.uniform` of tokens 0..2 at positions 0..count - 1, all at once."""

    def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
        return x ^ (x >> _U64(31))

    gamma = _U64(0x9E3779B97F4A7C15)
    start = noise.mix64(seed ^ (int(stream) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1))
    keys = mix64(_U64(start) + np.arange(1, count + 1, dtype=np.uint64) * gamma)
    x = mix64(keys[:, None] + np.arange(1, 4, dtype=np.uint64) * gamma)
    return ((x >> _U64(11)).astype(np.float64) + 0.5) * 2.0**-53


def gumbels(u: Floats) -> Floats:
    return -np.log(-np.log(u))


def emitted(rule: Rule, draft: Floats, test: Floats, due: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """One draw from Q and the token emitted, for each row of uniforms."""
    if rule is Rule.MSS_WITHOUT_REPLACEMENT:
        drawn = np.argmax(np.log(Q.probs) + gumbels(draft), axis=1)
    else:
        drawn = np.searchsorted(np.cumsum(Q.probs), draft[:, 0], side="right")
    if rule in (Rule.TARGET_ONLY, Rule.NAIVE):
        return drawn, np.argmax(np.log(P) + gumbels(due), axis=1)
    accepted = test[:, 0] < np.minimum(1.0, P / Q.probs)[drawn]
    with np.errstate(divide="ignore"):
        rest = np.argmax(np.log(residual(P, Q)) + gumbels(due), axis=1)
    return drawn, np.where(accepted, drawn, rest)


def streams(rule: Rule) -> tuple[Floats, Floats, Floats]:
    return (
        uniforms(noise.mix64(noise.mix64(SEED) ^ SALT), Stream.DRAFT),
        uniforms(SEED, Stream.ACCEPT),
        uniforms(SEED, Stream.TARGET if rule is Rule.TARGET_ONLY else Stream.RESIDUAL),
    )


@pytest.mark.parametrize("rule", list(Rule))
def test_trial_31_every_rule_is_unbiased(rule: Rule) -> None:
    """131,072 tokens are distributed as p. They are the sampler's own: shown on the first 200 positions."""
    drawn, tokens = emitted(rule, *streams(rule))
    params = SamplingParams(seed=SEED)
    for position in range(200):
        own = draw_proposals(rule, Q, 1, params, position, SALT)
        assert own == (drawn[position],) or rule is Rule.TARGET_ONLY
        assert choose_token(rule, np.log(P), [Proposals(Q, own)], params, position) == tokens[position]
    assert p_value(np.bincount(tokens, minlength=3), P) > 0.01


def test_trial_31_a_residual_draw_that_reuses_the_drafts_noise_is_biased() -> None:
    """63 % where 60 % is due: what the draft favoured by noise wins again in the residual."""
    _, test, due = streams(Rule.MSS_WITHOUT_REPLACEMENT)
    _, tokens = emitted(Rule.MSS_WITHOUT_REPLACEMENT, due, test, due)
    assert np.bincount(tokens, minlength=3)[1] / TRIALS == pytest.approx(0.63, abs=0.004)


@pytest.mark.parametrize("rule", MSS_RULES)
def test_trial_31_an_acceptance_test_that_reuses_the_drafts_noise_is_biased(rule: Rule) -> None:
    """The token drawn by small uniforms then passes its test too often, or too rarely by large ones."""
    _, test, due = streams(rule)
    _, tokens = emitted(rule, test, test, due)
    assert np.abs(np.bincount(tokens, minlength=3) / TRIALS - P).max() > 0.02


def test_trial_31_under_accept_iff_equal_shared_noise_is_sound() -> None:
    """TARGET_ONLY's child comes from the verifier's own noise: agreement goes up, the tokens are those of above."""
    _, tokens = emitted(Rule.TARGET_ONLY, *streams(Rule.TARGET_ONLY))
    params, agreed = SamplingParams(seed=SEED), 0
    for position in range(3000):
        child = draw_proposals(Rule.TARGET_ONLY, Q, 1, params, position, SALT)
        agreed += child[0] == tokens[position]
    distance = 0.5 * np.abs(P - Q.probs).sum()
    assert agreed / 3000 > (1 - distance) / (1 + distance) - 0.03  # Daliri, Musco, Suresh
    assert agreed / 3000 > P @ Q.probs + 0.1  # an independent draw


# --- the walk

VOCAB = 3
PROMPT = (2, 2)


@cache
def table(path: tuple[int, ...]) -> Floats:
    """A fixed distribution for every path."""
    return np.random.default_rng([len(path), *path]).dirichlet(np.full(VOCAB, 4.0))


@cache
def guess(path: tuple[int, ...], speculator: int) -> DraftDistribution:
    return distribution(np.random.default_rng([9, speculator, len(path), *path]).integers(1, 9, VOCAB).tolist())


TREE = TokenTree(0, (1, 0, 2), (-1, -1, 0), (-1.0,) * 3)  # root -> 1, 0;  1 -> 2


def logits_of(tree: TokenTree, start: Sequence[int] = ()) -> dict[int, Floats]:
    paths = {node: [*start, *(tree.path(node) if node != ROOT else ())] for node in range(-1, len(tree))}
    return {node: np.log(table(tuple(path))) for node, path in paths.items()}


@pytest.mark.parametrize("rule", list(Rule))
def test_a_walk_is_the_exact_joint_outcome(rule: Rule) -> None:
    """χ² of (first token, second token or none) over 2000 seeds, on a fixed tree with fixed draws."""
    proposals = {ROOT: [Proposals(distribution([1, 8, 3]), (1, 0))], 0: [Proposals(distribution([1, 1, 9]), (2,))]}
    first, logits = outcome(rule, table(()), proposals[ROOT]), logits_of(TREE)
    joint = np.zeros((VOCAB, VOCAB + 1))
    joint[:, VOCAB] = first
    for token, node in ((1, 0), (0, 1)):
        joint[token] = [*first[token] * outcome(rule, table((token,)), proposals.get(node, [])), 0.0]
    counts = np.zeros_like(joint, dtype=np.int64)
    context = SamplingContext(PROMPT, vocab_size=VOCAB)
    for seed in range(2000):
        got = accept(TREE, logits.__getitem__, SamplingParams(seed=seed), context, rule=rule, proposals=proposals)
        tokens = [*got.token_ids, VOCAB][:2]
        counts[tokens[0], tokens[1]] += 1
    assert p_value(counts.ravel(), joint.ravel()) > 0.01


@pytest.mark.parametrize("rule", list(Rule))
def test_steps_with_drafts_of_two_speculators(rule: Rule) -> None:
    """χ² of two tokens over 1000 seeds of the whole loop: both speculators draw, the tree is walked, cut and redrawn.

    The tree keeps every child of the root and grows below the first speculator's first draw only, so most walks end
    early and the second token comes from the next step.
    """
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for seed in range(1000):
        params = SamplingParams(seed=seed)
        output: list[int] = []
        while len(output) < 2:
            tree, proposals = drafted(rule, params, output)
            context = SamplingContext(PROMPT, output, vocab_size=VOCAB)
            logits = logits_of(tree, output)
            output += accept(tree, logits.__getitem__, params, context, rule=rule, proposals=proposals).token_ids
        counts[output[0], output[1]] += 1
    exact = np.array([table(())[t] * table((t,)) for t in range(VOCAB)])
    assert p_value(counts.ravel(), exact.ravel()) > 0.01


def drafted(rule: Rule, params: SamplingParams, output: list[int]) -> tuple[TokenTree, dict[int, list[Proposals]]]:
    tokens, parents, proposals = list[int](), list[int](), dict[int, list[Proposals]]()
    for node, path in ((ROOT, output), (0, None)):
        path = [*output, tokens[0]] if path is None else path
        address = 0
        for token in path:
            address = node_id(address, token)
        position, children = len(PROMPT) + len(path), dict[int, None]()
        for speculator in (0, 1):
            q = guess(tuple(path), speculator)
            drawn = draw_proposals(rule, q, 2 - speculator, params, position, draft_salt(speculator, address))
            proposals.setdefault(node, []).append(Proposals(q, drawn))
            children.update(dict.fromkeys(drawn))
        tokens += children
        parents += [node] * len(children)
    return TokenTree(0, tuple(tokens), tuple(parents), (-1.0,) * len(tokens)), proposals


def test_target_only_says_what_plain_decoding_says() -> None:
    """The default rule, whatever the tree and whatever proposals come with it."""
    logits, context = logits_of(TREE), SamplingContext(PROMPT, vocab_size=VOCAB)
    ends = Counter[int]()
    for seed in range(200):
        params = SamplingParams(seed=seed)
        got = accept(TREE, logits.__getitem__, params, context, proposals={ROOT: [Proposals(guess((), 0), (2,))]})
        plain: list[int] = []
        for _ in got.token_ids:
            plain.append(choose(np.log(table(tuple(plain))), params, context, plain))
        assert list(got.token_ids) == plain
        assert [TREE.token_ids[node] for node in got.nodes] == plain[:-1]
        ends[len(got.nodes)] += 1
    assert set(ends) == {0, 1, 2}


@pytest.mark.parametrize("rule", MSS_RULES)
def test_an_accepted_draw_without_a_node_is_the_bonus_token(rule: Rule) -> None:
    """Nodes can be cut from the tree at will: the draw is still tested, and the walk ends with it."""
    certain = {ROOT: [Proposals(distribution([0, 0, 1]), (2,))]}
    logits = {ROOT: np.array([-np.inf, -np.inf, 0.0])}
    got = accept(
        TREE,
        logits.__getitem__,
        SamplingParams(seed=1),
        SamplingContext(PROMPT, vocab_size=VOCAB),
        rule=rule,
        proposals=certain,
    )
    assert (got.token_ids, got.nodes) == ((2,), ())


def test_repeated_draws_share_one_node() -> None:
    """Draws 1, 1, 0 lead to two nodes. A repeat is never accepted, it takes more of q from what is due."""
    proposals = {ROOT: [Proposals(distribution([3, 5, 1]), (1, 1, 0))]}
    context, logits = SamplingContext(PROMPT, vocab_size=VOCAB), logits_of(TREE)
    firsts = set()
    for seed in range(200):
        got = accept(TREE, logits.__getitem__, SamplingParams(seed=seed), context, rule=Rule.MSS, proposals=proposals)
        firsts.add((got.token_ids[0], got.nodes[:1]))
    assert firsts == {(1, (0,)), (2, ())}
