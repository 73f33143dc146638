"""Which of the guessed tokens the LLM says: every acceptance rule.

Notation at one node: p is the LLM's processed distribution, q a speculator's. `choose_token` emits one token there,
and the walk goes on while a child carries it; the last token is the bonus token. Whatever was proposed, what is
emitted at a node is distributed as p.

TARGET_ONLY   t = argmax(log p + g). g depends on (seed, position, token) alone, so t does not depend on the tree:
              "drafter-invariant speculative decoding" (Daliri, Musco, Suresh, arXiv 2408.07978), on a tree.
NAIVE         t ~ p with noise that no drafter shares (SpecInfer's baseline, ASPLOS'24, section 4.3).
MSS           SpecInfer's multi-step speculative sampling (Algorithm 2). For each draw x ~ q, in order:
                  accept x with probability min(1, p(x) / q(x));
                  otherwise p <- norm(max(p - q, 0)).
              When no draw is left: t ~ p.
MSS_WITHOUT_REPLACEMENT
              The same on draws without replacement (multi-candidate sampling, Yang et al., arXiv 2401.06706): a
              rejected x also leaves its q, which is renormalised.

The MSS rules are exact under these conditions, each with a test that shows the bias without it:
  * draws are tested in draw order with their multiplicity, each against the q it was drawn from;
  * draws, tests and residual draws use disjoint noise, and no two (speculator, node) pairs share any;
  * a node's draws are used whole, or cut by `graftree.proposals.cut`.

At temperature 0 every rule is t = argmax p (VerifyGreedy of SpecInfer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftree import noise
from graftree.errors import GraftreeError, InvalidArgument
from graftree.noise import Stream
from graftree.proposals import DraftDistribution, Proposals
from graftree.sampling import SamplingContext, SamplingParams, choose, pick, process
from graftree.tree import TokenTree

Floats = NDArray[np.float64]

ROOT = -1


class Rule(IntEnum):
    """The numbers are graftree.v1.SpeculationMode's."""

    TARGET_ONLY = 1
    MSS = 2
    MSS_WITHOUT_REPLACEMENT = 3
    NAIVE = 4

    @classmethod
    def from_proto(cls, mode: int, *, field: str = "mode") -> Rule:
        """Of a SpeculationMode; unset means TARGET_ONLY.

        Raises:
            InvalidArgument: names `field`; no mode has this number.
        """
        try:
            return cls(mode or cls.TARGET_ONLY)
        except ValueError:
            known = ", ".join(rule.to_proto() for rule in cls)
            raise InvalidArgument(field, mode, f"one of {known}") from None

    def to_proto(self) -> str:
        """Name of the SpeculationMode, as messages take it."""
        return f"SPECULATION_MODE_{self.name}"

    def at(self, params: SamplingParams) -> Rule:
        """The rule in force: at temperature 0 every one is TARGET_ONLY."""
        return Rule.TARGET_ONLY if params.greedy else self

    @property
    def tests_draws(self) -> bool:
        """Whether the verifier needs each node's `Proposals`."""
        return self in (Rule.MSS, Rule.MSS_WITHOUT_REPLACEMENT)


# --- the formulas


def acceptance_probability(p: Floats, q: DraftDistribution, token: int) -> float:
    """min(1, p(x) / q(x)) for a token x that was drawn from q; p is (V,)."""
    return min(1.0, float(p[token]) / q[token])


def residual(p: Floats, q: DraftDistribution) -> Floats:
    """norm(max(p - q, 0)), (V,): what is still due after a draw from q was rejected.

    Where p = q up to rounding nothing is left to normalise. A rejection is then as unlikely as the rounding error
    (below 1e-15), and p itself stays due.
    """
    rest = p.copy()
    rest[q.ids] = np.maximum(p[q.ids] - q.probs, 0.0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p


def draws(rule: Rule, proposals: Sequence[Proposals]) -> Iterator[tuple[DraftDistribution, int]]:
    """Each draw that the rule tests, in order, with its distribution given the same speculator's draws before it."""
    if not rule.tests_draws:
        return
    for proposal in proposals:
        q = proposal.q
        for token in proposal.tokens:
            yield q, token
            if rule is Rule.MSS_WITHOUT_REPLACEMENT:
                q = q.without(token)


@dataclass(frozen=True, slots=True)
class AcceptanceTest:
    """Emit `token` with probability `chance`, else go on."""

    token: int
    chance: float


@dataclass(frozen=True, slots=True)
class ResidualDraw:
    """Emit a token drawn from p, (V,)."""

    p: Floats


def stages(rule: Rule, p: Floats, proposals: Sequence[Proposals]) -> Iterator[AcceptanceTest | ResidualDraw]:
    """The rule at one node: tests, and a draw from what is still due."""
    for q, token in draws(rule, proposals):
        yield AcceptanceTest(token, acceptance_probability(p, q, token))
        p = residual(p, q)
    yield ResidualDraw(p)


def outcome(rule: Rule, p: Floats, proposals: Sequence[Proposals]) -> Floats:
    """(V,) the exact distribution of the token emitted at a node, given the draws. Its mean over the draws is p."""
    emitted, reached = np.zeros_like(p), 1.0
    for stage in stages(rule, p, proposals):
        match stage:
            case AcceptanceTest(token, chance):
                emitted[token] += reached * chance
                reached *= 1.0 - chance
            case ResidualDraw(rest):
                emitted += reached * rest
    return emitted


# --- the sampler


def draw_proposals(
    rule: Rule, q: DraftDistribution, count: int, params: SamplingParams, position: int, salt: int
) -> tuple[int, ...]:
    """Tokens for the children of a node, in draw order.

    TARGET_ONLY ranks by log q + the verifier's own noise, at temperature 0 every rule by log q alone: different
    tokens, as are draws without replacement. MSS and NAIVE draw independently, with repeats.

    Args:
        rule: the session's.
        q: already truncated: what is drawn from must be what the verifier divides by.
        count: how many; fewer come where the support is smaller and tokens do not repeat.
        params: the session's; the seed must be set unless they are greedy.
        position: absolute position of the tokens.
        salt: of speculator and node, `graftree.proposals.draft_salt`. TARGET_ONLY does not use it.
    """
    if params.greedy:
        return _best(q, np.log(q.probs), count)
    assert params.seed is not None, "whoever opens a session draws its seed"
    if rule is Rule.TARGET_ONLY:
        return _best(q, np.log(q.probs) + noise.gumbel(params.seed, position, q.ids, Stream.TARGET), count)
    seed = noise.mix64(noise.mix64(params.seed) ^ salt)
    if rule is Rule.MSS_WITHOUT_REPLACEMENT:  # Gumbel top-k: the order is that of sequential draws
        return _best(q, np.log(q.probs) + noise.gumbel(seed, position, q.ids, Stream.DRAFT), count)
    uniforms = noise.uniform(seed, position, np.arange(count), Stream.DRAFT)
    drawn = np.searchsorted(np.cumsum(q.probs), uniforms, side="right")
    return tuple(q.ids[np.minimum(drawn, q.ids.size - 1)].tolist())


def _best(q: DraftDistribution, scores: Floats, count: int) -> tuple[int, ...]:
    return tuple(q.ids[np.lexsort((q.ids, -scores))[:count]].tolist())


def choose_token(
    rule: Rule, log_p: Floats, proposals: Sequence[Proposals], params: SamplingParams, position: int
) -> int:
    """The token emitted at a node: a draw from p, coupled to the proposals.

    Args:
        rule: the session's.
        log_p: (V,) from `graftree.sampling.process`.
        proposals: of the speculators in canonical order; the rules that test no draws ignore them.
        params: the session's; the seed must be set unless they are greedy.
        position: absolute position of the token.
    """
    if rule is Rule.TARGET_ONLY or params.greedy:
        return pick(log_p, params, position)
    assert params.seed is not None, "whoever opens a session draws its seed"
    for index, stage in enumerate(stages(rule, np.exp(log_p), proposals)):
        match stage:
            case AcceptanceTest(token, chance):
                if noise.uniform(params.seed, position, index, Stream.ACCEPT) < chance:
                    return token
            case ResidualDraw(rest):
                ids = np.flatnonzero(rest)
                gumbel = noise.gumbel(params.seed, position, ids, Stream.RESIDUAL)
                return int(ids[np.argmax(np.log(rest[ids]) + gumbel)])
    raise AssertionError("the last stage is a draw")


# --- the walk


@dataclass(frozen=True)
class Acceptance:
    """What one verify step says.

    Attributes:
        token_ids: (A + 1,) accepted draft tokens in order, then the bonus token.
        nodes: (A,) the accepted nodes, the root's child first.
    """

    token_ids: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def visited(self) -> tuple[int, ...]:
        """(A + 1,) the node each token was picked at; `ROOT` first."""
        return (ROOT, *self.nodes)


def walk(tree: TokenTree, token_at: Callable[[int, Sequence[int]], int]) -> Acceptance:
    """Go down from the root while a child carries the token emitted at its parent.

    Args:
        tree: valid guesses below the last committed token.
        token_at: (node index or `ROOT`, tokens from the root's child to it) -> token emitted there.

    Raises:
        GraftreeError: no token can be emitted at the root.
    """
    children = tree.children()
    node, path, nodes = ROOT, list[int](), list[int]()
    while True:
        try:
            token = token_at(node, path)
        except GraftreeError:
            if not nodes:
                raise
            # What came before may end the request, and then plain decoding never asks here: the run ends with the
            # token that led here, and the error is the next step's, if there is one.
            return Acceptance(tuple(path), tuple(nodes[:-1]))
        path.append(token)
        child = children[node].get(token)
        if child is None:
            return Acceptance(tuple(path), tuple(nodes))
        nodes.append(child)
        node = child


def accept(
    tree: TokenTree,
    logits: Callable[[int], NDArray[Any]],
    params: SamplingParams,
    context: SamplingContext,
    *,
    rule: Rule = Rule.TARGET_ONLY,
    proposals: Mapping[int, Sequence[Proposals]] | None = None,
    picks: Sequence[int] | None = None,
) -> Acceptance:
    """Walk the tree from its root.

    Args:
        tree: valid guesses below the last committed token.
        logits: node index or `ROOT` -> (V,) the LLM's logits there; asked for only along the walk.
        params: the session's.
        context: its committed tokens; not changed.
        rule: the session's.
        proposals: node index or `ROOT` -> its speculators' proposals in canonical order, for rules that test draws. A
            draw needs no node: where it is accepted without one, it is the bonus token.
        picks: what `choose` gives at the root and at each node, where that is known already; -1 = it is not.

    Raises:
        GraftreeError: the LLM's logits at the root are not finite, or no token is left there.
    """
    proposed = proposals or {}

    def token_at(node: int, path: Sequence[int]) -> int:
        if rule is Rule.TARGET_ONLY or params.greedy:
            if picks is not None and picks[node - ROOT] >= 0:
                return int(picks[node - ROOT])
            return choose(logits(node), params, context, path)
        log_p = process(logits(node), params, context, path)
        return choose_token(rule, log_p, proposed.get(node, ()), params, len(context) + len(path))

    return walk(tree, token_at)
