"""The first tokens of every acceptance mode through the real parts are distributed as the LLM's own.

`tests/test_distribution.py` does the same for the acceptance rules alone. Here draws come out of living trees that
grow best first; they travel as deltas, some late and some twice, are merged, cut to a budget, re-rooted and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from bench.distribution import (
    LENGTH,
    MODEL,
    PROMPT,
    SETTINGS,
    VOCAB,
    Outcome,
    exact_distribution,
    logits_of_all_paths,
)
from graftree.acceptance import Rule
from graftree.proposals import DraftDistribution
from graftree.sampling import SamplingContext, process
from graftree.tree import TokenTree
from graftree.v1.verification_pb2 import VerifyStep
from router.merge import MergedTree
from speculator_service.drafters.base import Candidate
from speculator_service.drawing import Drawing
from speculator_service.living_tree import Node
from tests.mode_lab import Floats, Lab, Path

SAMPLES = 2000
PARAMS = SETTINGS["processed"]

draw = Drawing.children


@cache
def log_p(path: Path) -> Floats:
    """(V,) the LLM's processed distribution after up to two tokens."""
    return process(logits()[path], PARAMS, SamplingContext(PROMPT, (), vocab_size=VOCAB), path)


@cache
def logits() -> dict[Path, Floats]:
    return logits_of_all_paths()


def good(path: Path) -> Floats:
    """Near the LLM's, cut to six tokens."""
    noisy = np.maximum(log_p(path), -6.0) + np.random.default_rng([1, *path]).normal(0, 0.5, VOCAB)
    noisy -= np.log(np.exp(noisy).sum())
    noisy[np.argsort(noisy)[:2]] = -np.inf
    return noisy


def adversarial(path: Path) -> Floats:
    """Sure of the tokens that the LLM likes least."""
    log_q = np.full(VOCAB, -np.inf)
    log_q[np.argsort(log_p(path), kind="stable")[:3]] = np.log([0.6, 0.3, 0.05])
    return log_q


BOTH: dict[str, Callable[[Path], Floats]] = {"good": good, "adversarial": adversarial}


def sample(lab: Lab, count: int) -> Outcome:
    counts = np.zeros((VOCAB,) * LENGTH, dtype=np.int64)
    for text in lab.samples([replace(PARAMS, seed=seed) for seed in range(count)]):
        counts[text] += 1
    return Outcome(counts, exact_distribution(PARAMS), 0.0)


@pytest.mark.parametrize("rule", list(Rule))
def test_merged_trees_of_every_mode(rule: Rule) -> None:
    """χ² of two and of three tokens, a good and an adversarial speculator in one tree."""
    lab = Lab(MODEL, PROMPT, LENGTH, rule=rule, drafters=BOTH)
    outcome = sample(lab, SAMPLES)
    assert outcome.p_value(tokens=2) > 0.01
    assert outcome.p_value() > 0.01
    assert lab.accepted > SAMPLES / 4, "tokens that come out of drafts are what is tested here"


def best_instead_of_draws(
    self: Drawing, node: Node, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], DraftDistribution | None]:
    _, q = draw(self, node, candidates)
    return [Candidate(token, min(chance, 0.0)) for token, chance in candidates[: self.count]], q


def test_a_speculator_that_does_not_draw_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends the most likely children as if they had been drawn: the verifier knows the draws by itself."""
    monkeypatch.setattr(Drawing, "children", best_instead_of_draws)
    lab = Lab(MODEL, PROMPT, LENGTH, rule=Rule.MSS, drafters=BOTH)
    assert sample(lab, SAMPLES).p_value() > 0.01


def test_a_draw_dropped_by_its_value_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias that keeping every proposal whole avoids: the lab sees it."""

    def with_a_low_child(tree: MergedTree, cut: TokenTree) -> list[VerifyStep.NodeProposals]:
        children = cut.children()
        return [entry for entry in whole(tree, cut) if {0, 1, 2} & set(children[entry.node])]

    whole = MergedTree.proposals
    monkeypatch.setattr(MergedTree, "proposals", with_a_low_child)
    lab = Lab(MODEL, PROMPT, LENGTH, rule=Rule.MSS, drafters=BOTH)
    assert sample(lab, 3000).p_value(tokens=2) < 1e-3
