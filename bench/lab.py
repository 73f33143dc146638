"""A laboratory for acceptance: an LLM and an SSM in one process, along texts that each rule samples itself.

A walk asks for p and q at the nodes it visits only, and what is drawn at a node depends on that node alone. So the
trees are never built: they are drawn along the walk, and the tokens and steps are those of whole trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.node_success import Scheme
from graftree.acceptance import Rule, choose_token, draw_proposals
from graftree.models.load import load
from graftree.models.runner import Rows, TreeRunner, chain_rows
from graftree.proposals import DraftDistribution, Proposals, draft_salt
from graftree.sampling import GREEDY, SamplingContext, SamplingParams, process
from graftree.tree import node_id

Floats = NDArray[np.float64]

RULES: dict[Scheme, Rule] = {
    "naive": Rule.NAIVE,
    "mss": Rule.MSS,
    "mss_without_replacement": Rule.MSS_WITHOUT_REPLACEMENT,
    "top_k": Rule.TARGET_ONLY,
    "shared_noise": Rule.TARGET_ONLY,
}
SALT = 1  # of the one speculator there is


@dataclass
class Walker:
    """Counts the verify steps that one way of drafting takes along a text.

    Attributes:
        scheme: how children are drawn.
        expansion: children per node of each level, SpecInfer's <k1, k2, ..., km>.
        steps: tokens of each step so far; the last one may still be under way.
    """

    scheme: Scheme
    expansion: tuple[int, ...]
    steps: list[int] = field(default_factory=list)
    _depth: int = 0

    def draw(self, q: DraftDistribution, params: SamplingParams, position: int, salt: int) -> tuple[int, ...]:
        """The children of the node that the walk is at, in draw order."""
        count = self.expansion[self._depth] if self._depth < len(self.expansion) else 0
        shown = GREEDY if self.scheme == "top_k" else params  # the most likely tokens are those drawn without noise
        return draw_proposals(RULES[self.scheme], q, count, shown, position, salt)

    def emitted(self, passed: bool) -> None:
        """A token came out at the node; `passed` if a child carries it."""
        if self._depth == 0:
            self.steps.append(0)
        self.steps[-1] += 1
        self._depth = self._depth + 1 if passed else 0


class Text:
    """One prompt and what a rule samples after it.

    Args:
        prompt: its tokens.
        rule: all walkers' schemes are this rule's.
        walkers: more than one only where the rule's tokens do not depend on what is drawn.
        seed: of the request.
        vocab_size: V.
    """

    def __init__(
        self, prompt: Sequence[int], rule: Rule, walkers: Sequence[Walker], seed: int, vocab_size: int
    ) -> None:
        assert len(walkers) == 1 or not rule.tests_draws
        self.rule, self.walkers, self.output = rule, walkers, list[int]()
        self.finished = False
        self._params = SamplingParams(seed=seed)
        self._context = SamplingContext(prompt, vocab_size=vocab_size)
        self._address = 0

    def distributions(self, llm: Floats, ssm: Floats) -> tuple[Floats, DraftDistribution]:
        """log p, (V,), and q of the next token from both models' logits, (V,) each."""
        log_p, log_q = (process(logits, self._params, self._context, self.output) for logits in (llm, ssm))
        return log_p, DraftDistribution.truncate(log_q)

    def advance(self, log_p: Floats, q: DraftDistribution) -> int:
        """Emit the next token and tell the walkers."""
        position = len(self._context) + len(self.output)
        salt = draft_salt(SALT, self._address)
        drawn = [walker.draw(q, self._params, position, salt) for walker in self.walkers]
        proposals = [Proposals(q, drawn[0])] if self.rule.tests_draws else []
        token = choose_token(self.rule, log_p, proposals, self._params, position)
        for walker, children in zip(self.walkers, drawn, strict=True):
            walker.emitted(token in children)
        self.output.append(token)
        self._address = node_id(self._address, token)
        return token


@dataclass
class Cursor:
    """One text in a model's cache: rows 0..length - 1 hold its tokens, `pending` come next."""

    blocks: list[int]
    length: int
    pending: list[int]


class Decoder:
    """A model over many texts that grow by a token a step. Copies of a prompt share its blocks."""

    def __init__(self, model: str, *, kv_tokens: int) -> None:
        self.runner = TreeRunner(load(model), kv_tokens=kv_tokens)
        self._allocated: list[int] = []

    def open(self, prompt: Sequence[int], copies: int, room: int) -> list[Cursor]:
        """Prefill a prompt for texts of up to `room` further tokens."""
        size = self.runner.kv.block_size
        shared = (len(prompt) - 1) // size  # each copy runs at least the prompt's last token itself
        common = self._allocate(shared)
        if common:
            self.runner.forward([chain_rows(common, 0, prompt[: shared * size])])
        own = -(-(len(prompt) - shared * size + room) // size)
        rest = list(prompt[shared * size :])
        return [Cursor([*common, *self._allocate(own)], shared * size, list(rest)) for _ in range(copies)]

    def step(self, cursors: Sequence[Cursor]) -> Floats:
        """(n, V) logits after each text's last token; the pending tokens go into the cache."""
        batch: list[Rows] = []
        for cursor in cursors:
            last = len(cursor.pending) - 1
            batch.append(chain_rows(cursor.blocks, cursor.length, cursor.pending, logits=[last]))
            cursor.length += len(cursor.pending)
            cursor.pending = []
        return np.stack([logits[0].double().cpu().numpy() for logits in self.runner.forward(batch)])

    def close(self) -> None:
        """Forget all texts."""
        self.runner.pool.free(self._allocated)
        self._allocated = []

    def _allocate(self, count: int) -> list[int]:
        blocks = self.runner.pool.allocate(count)
        self._allocated += blocks
        return blocks
