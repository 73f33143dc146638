"""`Drawing`: children of a node in the modes that draw them, instead of taking the drafter's best.

The drafter says what it thinks the LLM's distribution is, without knowing the noise; the draws are made here, so
every drafter serves every mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graftree.acceptance import Rule, draw_proposals
from graftree.proposals import DraftDistribution, draft_salt
from graftree.sampling import SamplingParams
from speculator_service.drafters.base import Candidate
from speculator_service.living_tree import Node

# Chance that the n-th draw is accepted, measured on SmolLM2-135M and a cut of it at temperature 1. It hardly depends
# on which token was drawn: x comes with probability q(x) and passes with min(1, p(x) / q(x)).
_BY_RANK = {
    Rule.MSS: (0.37, 0.09, 0.04, 0.04, 0.02),
    Rule.MSS_WITHOUT_REPLACEMENT: (0.37, 0.11, 0.05, 0.04, 0.03),
}
WORTH_DRAWING = 5  # draws per node; further ones are accepted too seldom to be worth a row


@dataclass(frozen=True)
class Drawing:
    """How one session's children are drawn.

    Attributes:
        rule: MSS, MSS_WITHOUT_REPLACEMENT or NAIVE.
        params: the request's, with the seed.
        count: draws per node. A constant: that it depended on what was drawn before at the node would be a bias.
        salt: of this speculator in this session.
        vocab_size: ids at or above this are not drawn.
    """

    rule: Rule
    params: SamplingParams
    count: int
    salt: int
    vocab_size: int

    def children(
        self, node: Node, candidates: Sequence[Candidate]
    ) -> tuple[list[Candidate], DraftDistribution | None]:
        """Draw a node's children, once in its life.

        Args:
            node: whose children are wanted.
            candidates: what the drafter answered.

        Returns:
            The tokens drawn, without repeats, in draw order, each with the log of its chance to be accepted; and what
            the verifier must know to test them: q, or None where nothing was drawn or the rule tests no draws.
        """
        chances = {token: log_prob for token, log_prob in candidates if token < self.vocab_size}
        if not chances:
            return [], None
        ids, log_q = np.array(list(chances)), np.array(list(chances.values()))
        top = DraftDistribution.truncate(log_q)
        q = DraftDistribution(ids[top.ids], top.weights)
        tokens = draw_proposals(
            self.rule, q, self.count, self.params, node.position + 1, draft_salt(self.salt, node.id)
        )
        if not self.rule.tests_draws:
            return [Candidate(token, chances[token]) for token in dict.fromkeys(tokens)], None
        # A drafter that leaves much of the mass to others is right as much more seldom.
        mass = min(0.0, math.log(np.exp(log_q).sum()))
        by_rank = _BY_RANK[self.rule]
        drawn: dict[int, Candidate] = {}
        for rank, token in enumerate(tokens):
            # Once rejected a token has no probability left, so its repeats are never accepted.
            drawn.setdefault(token, Candidate(token, mass + math.log(by_rank[min(rank, len(by_rank) - 1)])))
        return list(drawn.values()), q
