"""What is sampled through whole steps is the LLM's distribution: χ² on a model small enough to enumerate.

`python -m bench.distribution` runs the same samplers 200,000 times each on the whole grid of drafts and processors.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.distribution import DRAFTS, LENGTH, SETTINGS, VOCAB, Sampler, exact_distribution, logits_of_all_paths, run
from graftree.acceptance import Rule
from graftree.sampling import SamplingParams

Floats = NDArray[np.float64]


@cache
def logits() -> dict[tuple[int, ...], Floats]:
    return logits_of_all_paths()


@cache
def exact(setting: str) -> Floats:
    return exact_distribution(SETTINGS[setting])


def sampler(rule: Rule, drafts: str, setting: str) -> Sampler:
    return Sampler(rule, DRAFTS.get(drafts, (drafts,)), SETTINGS[setting], logits())


@pytest.mark.parametrize("rule", list(Rule))
def test_trial_10_adversarial_drafts(rule: Rule) -> None:
    """20,000 samples, two tokens: drafts that the LLM likes least change nothing in any mode."""
    outcome = run(sampler(rule, "adversarial", "temperature 1"), exact("temperature 1"), 20_000)
    assert outcome.p_value(tokens=2) > 0.01
    assert outcome.tokens_per_step < 1.1  # they are as bad as they should be


@pytest.mark.parametrize("rule", list(Rule))
def test_merged_drafts_and_processors(rule: Rule) -> None:
    """8,000 samples, three tokens: a good and an adversarial speculator in one tree, every processor's own path."""
    outcome = run(sampler(rule, "merged", "processed"), exact("processed"), 8_000)
    assert outcome.p_value() > 0.01
    assert outcome.tokens_per_step > 1.3  # most texts come from inside the tree


@pytest.mark.parametrize("setting", SETTINGS)
def test_without_noise_of_their_own_drafts_change_no_token(setting: str) -> None:
    """TARGET_ONLY and NAIVE: seed by seed the same texts from every kind of draft."""
    for rule in (Rule.TARGET_ONLY, Rule.NAIVE):
        texts = [[tokens for tokens, _ in sampler(rule, drafts, setting).samples(range(300))] for drafts in DRAFTS]
        assert texts[0] == texts[1] == texts[2]


def test_a_speculator_that_does_not_draw_from_its_q_is_seen() -> None:
    """The test has power: its most likely tokens in place of draws bias MSS beyond doubt."""
    outcome = run(sampler(Rule.MSS, "dishonest", "temperature 1"), exact("temperature 1"), 4_000)
    assert outcome.p_value() < 1e-6


@pytest.mark.parametrize("rule", list(Rule))
def test_what_is_computed_once_is_what_is_computed_each_time(rule: Rule) -> None:
    """Noise in blocks and remembered distributions: the very same texts and steps."""
    own = sampler(rule, "merged", "processed")
    assert list(own.samples(range(100))) == [own.sample(seed) for seed in range(100)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_exact_distribution_is_the_products_at_every_path(setting: str) -> None:
    """Float64 and processors written out agree with tree logits and `process`, to rounding."""
    whole, params = exact(setting), SETTINGS[setting]
    assert whole.sum() == pytest.approx(1.0, abs=1e-12)
    assert (whole == 0).any() == (params != SamplingParams())
    own = sampler(Rule.TARGET_ONLY, "good", setting)
    for path in product(range(VOCAB), repeat=LENGTH):
        steps = (np.exp(own.log_p[path[:depth]])[path[depth]] for depth in range(LENGTH))
        assert np.prod(list(steps)) == pytest.approx(whole[path], rel=1e-4, abs=1e-12)
