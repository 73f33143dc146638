"""`process`, `pick`, `choose`, `describe` against transformers' processors and against the formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graftree import noise
from graftree.errors import GraftreeError, InvalidArgument
from graftree.sampling import GREEDY, SamplingContext, SamplingParams, choose, describe, pick, process

VOCAB = 3000
PROMPT, OUTPUT, PATH = [1, 5, 9, 5], [700, 5, 700], [8, 9]


def logits(seed: int, vocab: int = VOCAB) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(scale=3.0, size=vocab)


def context(vocab: int = VOCAB, **options: Any) -> SamplingContext:
    return SamplingContext(PROMPT, OUTPUT, vocab_size=vocab, **options)


def reference(row: NDArray[np.float64], params: SamplingParams, seen: list[int]) -> NDArray[np.float64]:
    """transformers' processors, in vLLM's order, in float64."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    scores = processors(torch.tensor([seen]), torch.tensor(row)[None].clone())
    result: NDArray[np.float64] = torch.log_softmax(scores[0], -1).numpy()
    return result


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.0, top_k=1),
    SamplingParams(temperature=0.8, top_k=50),
    SamplingParams(top_k=VOCAB + 7),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.5, top_p=0.999),
    SamplingParams(top_p=1e-4),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.4, temperature=0.5),
    SamplingParams(temperature=0.7, top_k=300, top_p=0.95, min_p=0.001, repetition_penalty=1.2),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_equals_transformers(params: SamplingParams, seed: int) -> None:
    """Same tokens kept, same log probabilities, at a node two levels below the root."""
    row = logits(seed)
    got = process(row, params, context(), PATH)
    want = reference(row, params, PROMPT + OUTPUT + PATH)
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    kept = np.isfinite(want)
    assert np.abs(got[kept] - want[kept]).max() < 1e-9


def test_flat_distributions_sort_the_whole_vocabulary() -> None:
    """top-p looks beyond the most likely thousand where it must."""
    row = np.random.default_rng(0).normal(scale=1e-3, size=VOCAB)
    params = SamplingParams(top_p=0.9)
    got, want = process(row, params, context()), reference(row, params, PROMPT)
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    assert np.isfinite(got).sum() > 2000


def test_frequency_and_presence_look_at_output_and_path() -> None:
    """OpenAI's formula: minus f times the count, minus p once; the prompt does not count."""
    row = logits(1)
    got = process(row, SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), context(), PATH)
    want = row.copy()
    for token, count in {700: 2, 5: 1, 8: 1, 9: 1}.items():
        want[token] -= 0.5 * count + 0.25
    want -= want.max() + math.log(np.exp(want - want.max()).sum())
    assert np.abs(got - want).max() < 1e-12


def test_penalties_follow_the_path_and_leave_the_context_alone() -> None:
    """A token's second use inside one run is penalised, on that path only, and again after the commit."""
    row = np.zeros(VOCAB)
    row[[3, 4]] = 2.0, 1.5
    params, place = SamplingParams(temperature=0.0, presence_penalty=1.0), context()
    assert choose(row, params, place) == 3
    assert choose(row, params, place, [3]) == 4
    assert choose(row, params, place) == 3
    place.extend([3])
    assert choose(row, params, place) == 4
    assert choose(row, params, place, [4]) == 3


def test_repetition_penalty_by_sign() -> None:
    """Positive logits are divided, others multiplied, once however often the token occurs."""
    row = np.zeros(VOCAB)
    row[[5, 700, 9]] = 4.0, -4.0, 1.0
    got = process(row, SamplingParams(repetition_penalty=2.0), context(), PATH)
    raw = got - got[0]
    assert raw[5] == pytest.approx(2.0)
    assert raw[700] == pytest.approx(-8.0)
    assert raw[9] == pytest.approx(0.5)


def test_bias_adds_and_minus_100_bans() -> None:
    """A banned argmax is never chosen, at any temperature; a bias moves the argmax."""
    row = np.zeros(VOCAB)
    row[[10, 11]] = 300.0, 1.0
    ban = {10: -100.0}
    assert choose(row, SamplingParams(temperature=0.0, logit_bias=ban), context()) == 11
    log_probs = process(row, SamplingParams(logit_bias=ban), context())
    assert log_probs[10] == -math.inf
    assert choose(row, SamplingParams(temperature=0.0, logit_bias={**ban, 12: 50.0}), context()) == 12


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_bad_words_are_transformers(words: list[list[int]], output: list[int], path: list[int]) -> None:
    """Single tokens always, phrases where output and path end with all but the last; the prompt never counts."""
    params = SamplingParams(bad_words_token_ids=tuple(map(tuple, words)))
    row = np.arange(5.0)
    expected = row.copy()
    if said := output + path:
        reference_ = NoBadWordsLogitsProcessor(words)
        expected = reference_(torch.tensor([said]), torch.tensor(row)[None].clone())[0].numpy()
    for word in words:
        if len(word) == 1:
            expected[word[0]] = -math.inf
    got = process(row, params, SamplingContext([0, 1, 2, 3], output, vocab_size=5), path)
    assert np.array_equal(np.isfinite(got), np.isfinite(expected))


def test_banned_and_allowed_tokens() -> None:
    """Banned tokens never come, and where some are allowed only these, greedily and at a temperature."""
    row = np.zeros(VOCAB)
    row[[10, 11, 12]] = 30.0, 20.0, 10.0
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "seed": 1}
        assert choose(row, SamplingParams(**options, banned_token_ids=(10,)), context()) == 11
        assert choose(row, SamplingParams(**options, allowed_token_ids=(12, 11)), context()) == 11
        both = SamplingParams(**options, allowed_token_ids=(12, 11), banned_token_ids=(11,))
        assert choose(row, both, context()) == 12
        assert np.flatnonzero(np.isfinite(process(row, both, context()))).tolist() == [12]


def test_padding_is_never_chosen() -> None:
    """Ids that the tokenizer does not have are removed, also where they are the most likely."""
    row = np.zeros(VOCAB)
    row[[VOCAB - 1, 7]] = 30.0, 20.0
    place = context(token_count=VOCAB - 1)
    assert choose(row, GREEDY, place) == choose(row, SamplingParams(seed=3), place) == 7
    assert process(row, SamplingParams(), place)[VOCAB - 1] == -math.inf
    assert choose(row, SamplingParams(temperature=0.0, logit_bias={VOCAB - 1: 5.0}), place) == 7


def test_no_token_left_is_the_requests_fault() -> None:
    """Options that leave no token behind some output are an argument error, and not one of the model."""
    params = SamplingParams(seed=1, allowed_token_ids=(5, 700), bad_words_token_ids=((700, 5), (700, 700)))
    assert choose(logits(0), params, context(), [5]) in (5, 700)
    with pytest.raises(InvalidArgument, match="no token is left"):
        choose(logits(0), params, context())


def test_min_new_tokens_forbids_stops_until_they_are_out() -> None:
    """Path tokens count as output; the token after the last forbidden one is free. Unknown ids are ignored."""
    row = np.zeros(VOCAB)
    row[[2, 6]] = 5.0, 4.0
    place = context(min_new_tokens=len(OUTPUT) + 2, stop_token_ids=[2, VOCAB + 1])
    for params in (GREEDY, SamplingParams(temperature=1e-6, seed=1)):
        assert choose(row, params, place) == 6
        assert choose(row, params, place, [0]) == 6
        assert choose(row, params, place, [0, 0]) == 2
    assert process(row, SamplingParams(), place)[2] == -math.inf
    assert process(row, SamplingParams(), place, [0, 0])[2] > -math.inf


def test_ties_go_to_the_lowest_id() -> None:
    """Greedy, with and without processors."""
    row = np.zeros(VOCAB, dtype=np.float32)
    row[[30, 20]] = 1.0
    assert choose(row, GREEDY, context()) == 20
    assert choose(row, SamplingParams(temperature=0.0, logit_bias={1: -1.0}), context()) == 20
    assert describe(row, 30, 3).rank == 2
    assert [token for token, _ in describe(row, 30, 3).alternatives] == [20, 30, 0]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=0), SamplingParams(seed=0, top_p=0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_raise(params: SamplingParams, bad: float) -> None:
    """A model that diverged is an error, not a token."""
    row = logits(0)
    row[17] = bad
    with pytest.raises(GraftreeError):
        choose(row, params, context())


def test_pick_is_the_gumbel_argmax_over_what_is_left() -> None:
    """argmax(log p + g) with the noise of (seed, absolute position, token); removed tokens get none."""
    params = SamplingParams(seed=11, top_k=20)
    log_probs = process(logits(2), params, context(), PATH)
    position = len(PROMPT) + len(OUTPUT) + len(PATH)
    want = int(np.argmax(log_probs + noise.gumbel(11, position, np.arange(VOCAB))))
    assert pick(log_probs, params, position) == want
    assert choose(logits(2), params, context(), PATH) == want


def test_frequencies_are_the_distribution() -> None:
    """Chi-square over 20,000 positions of one seed, and over 20,000 seeds at one position (p > 1e-3 each)."""
    row = np.array([0.1, 0.6, 0.3, 1e-9])
    place = SamplingContext([0], vocab_size=4)
    log_probs = process(np.log(row), SamplingParams(temperature=0.8, seed=1), place)
    expected = np.exp(log_probs[:3])
    for draws in (
        [pick(log_probs, SamplingParams(temperature=0.8, seed=123), position) for position in range(20_000)],
        [pick(log_probs, SamplingParams(temperature=0.8, seed=seed), 5) for seed in range(20_000)],
    ):
        counts = np.bincount(draws, minlength=4)
        assert counts[3] == 0
        assert scipy.stats.chisquare(counts[:3], expected / expected.sum() * len(draws)).pvalue > 1e-3


def test_describe_is_the_models_own_distribution() -> None:
    """Log probability, rank and alternatives as float64 log-softmax and a full sort give them."""
    row = logits(3).astype(np.float32)
    want = torch.log_softmax(torch.tensor(row, dtype=torch.float64), -1)
    order = torch.argsort(-want, stable=True).tolist()
    for token in (order[0], order[7], order[-1]):
        got = describe(row, token, 4)
        assert got.log_prob == pytest.approx(float(want[token]), abs=1e-12)
        assert order[got.rank - 1] == token
        assert [entry for entry, _ in got.alternatives] == order[:4]
        assert [value for _, value in got.alternatives] == pytest.approx([float(want[t]) for t in order[:4]])
    wire = describe(row, order[0], 2).to_proto()
    assert (wire.token_id, wire.rank, len(wire.alternatives)) == (order[0], 1, 2)
    assert describe(row, 5).alternatives == ()


def test_describe_of_the_processed_distribution() -> None:
    """Of what `process` gives: its log probabilities as they are, and no alternative that was removed."""
    params = SamplingParams(temperature=0.5, top_k=3)
    processed = process(logits(3), params, context())
    order = np.argsort(-processed, kind="stable").tolist()
    got = describe(processed, order[1], 8)
    assert got.log_prob == pytest.approx(processed[order[1]], abs=1e-12)
    assert got.rank == 2
    assert [token for token, _ in got.alternatives] == order[:3]
    assert [value for _, value in got.alternatives] == pytest.approx(processed[order[:3]].tolist())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12),
    st.floats(0.1, 5),
    st.integers(0, 14),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_always_a_distribution_that_keeps_the_argmax(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Whatever the truncation: probabilities sum to one, a most likely token stays, order is kept; logits that differ
    by less than their probabilities can tell are equals."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    params.validate(vocab_size=len(row))
    got = process(row, params, SamplingContext([0], vocab_size=len(row)))
    assert np.exp(got).sum() == pytest.approx(1.0)
    kept = np.isfinite(got)
    assert np.asarray(row)[kept].max() >= max(row) - 1e-12
    if not kept.all():
        assert np.asarray(row)[kept].min() >= np.asarray(row)[~kept].max() - 1e-12
