"""Trials 5 to 9: what a request asks for holds for every token of a run, not only for the last one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graftree import Client
from graftree.sampling import SamplingContext, SamplingParams, process
from graftree.sdk.options import Mode
from tests import trials
from tests.trials import MODES, PROMPT, SPECULATORS, TOKENIZER, compared, plainly
from tests.verifier_harness import greedy, reference_model

LENGTH = 14
GREEDY: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": LENGTH}
REPETITIVE = [65, 66, 67, 66] * 6


@pytest.fixture(scope="module", params=SPECULATORS)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with trials.stack(SPECULATORS[request.param]) as client:
        yield client


@pytest.fixture(scope="module")
def said() -> list[int]:
    """What the LLM says greedily, by transformers."""
    return greedy(PROMPT, LENGTH)


@torch.inference_mode()
def rows(tokens: list[int], count: int) -> list[Any]:
    """The LLM's logits that the last `count` tokens were chosen from, by transformers."""
    logits = reference_model()(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -count:]
    return list(logits.double().numpy())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trial_5_log_probs(client: Client, mode: Mode, kind: Any, temperature: float) -> None:
    """Three alternatives for each token, of both distributions: as computed in float64 over the whole text."""
    options: dict[str, Any] = {"temperature": temperature, "seed": 4, "top_k": 40, "presence_penalty": 0.7}
    result = compared(client, mode, **GREEDY, **options, log_probs=True, alternatives=3, log_probs_mode=kind)
    tokens = list(result.token_ids)
    assert len(result.log_probs) == LENGTH
    params = SamplingParams(**options)
    for index, (row, got) in enumerate(zip(rows(PROMPT + tokens, LENGTH), result.log_probs, strict=True)):
        wanted = torch.log_softmax(torch.tensor(row), -1).numpy()
        if kind == "processed":
            wanted = process(row, params, SamplingContext(PROMPT, tokens[:index], vocab_size=len(row)))
        order = sorted(range(len(wanted)), key=lambda token: -wanted[token])
        assert got.token_id == tokens[index]
        assert got.log_prob == pytest.approx(wanted[tokens[index]], abs=1e-3)
        assert wanted[order[got.rank - 1]] == pytest.approx(wanted[tokens[index]], abs=1e-3)
        assert [value for _, value in got.alternatives] == pytest.approx(wanted[order[:3]].tolist(), abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.4}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.8}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_trial_6_penalties(client: Client, mode: Mode, penalty: dict[str, float]) -> None:
    """On a repetitive prompt, greedily and sampled: as plain decoding, and not as without the penalty."""
    prompt = {"token_ids": REPETITIVE, "max_new_tokens": 24}
    for sampling in ({}, {"temperature": 0.8, "seed": 6}):
        result = compared(client, mode, **prompt, **sampling, **penalty)
        if mode == MODES[0]:
            assert result.token_ids != plainly(client, **prompt, **sampling).token_ids


def test_trial_6_by_transformers(client: Client) -> None:
    """Greedy with a repetition penalty is what transformers' own generate says."""
    result = compared(client, token_ids=REPETITIVE, max_new_tokens=24, repetition_penalty=1.5)
    ids = torch.tensor([REPETITIVE])
    output = reference_model().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        repetition_penalty=1.5,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert list(result.token_ids) == output[0, len(REPETITIVE) :].tolist()


@pytest.mark.parametrize("mode", MODES)
def test_trial_7_second_use_within_a_run(client: Client, mode: Mode) -> None:
    """A token is pushed so far up that it is said again and again, and a frequency penalty takes it back use by use:
    the choice flips inside a run, at the first use where the penalties outweigh the push."""
    pushed, push = 200, 25.0
    bias = {"logit_bias": {pushed: push}}
    assert plainly(client, **GREEDY, **bias).token_ids[:4] == (pushed,) * 4
    flips = set()
    for frequency in (1.0, 1.5, 2.0):
        tokens = list(compared(client, mode, **GREEDY, **bias, frequency_penalty=frequency).token_ids)
        flips.add(use := next(place for place, token in enumerate(tokens) if token != pushed))
        for place, row in enumerate(rows(PROMPT + tokens[: use + 1], use + 1)):
            row[pushed] += push - frequency * place
            assert (row.argmax() == pushed) == (place < use)
    assert min(flips) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["logit_bias", "banned_token_ids", "bad_words_token_ids", "allowed_token_ids"])
def test_trial_8_banned_tokens(client: Client, said: list[int], mode: Mode, how: str) -> None:
    """The tokens that would be said are banned one after the other, in each of four ways: they never come."""
    banned = list(dict.fromkeys(said))[:4]
    ways: dict[str, Any] = {
        "logit_bias": dict.fromkeys(banned, -100.0),
        "banned_token_ids": banned,
        "bad_words_token_ids": [[token] for token in banned],
        "allowed_token_ids": [token for token in range(256) if token not in banned],
    }
    for sampling in ({}, {"temperature": 1.0, "seed": 8}):
        result = compared(client, mode, **GREEDY, **sampling, **{how: ways[how]})
        assert not set(banned) & set(result.token_ids)
        if how == "allowed_token_ids":
            assert max(result.token_ids) < 256


@pytest.mark.parametrize("mode", MODES)
def test_trial_8_phrases(client: Client, said: list[int], mode: Mode) -> None:
    """Where the greedy text would say a phrase, its last token is replaced and nothing before it, at every place."""
    for place in range(0, LENGTH - 3, 2 if mode == MODES[0] else 5):
        phrase = said[place : place + 3]
        result = compared(client, mode, **GREEDY, bad_words_token_ids=[phrase])
        tokens = list(result.token_ids)
        first = next(at for at in range(LENGTH - 2) if said[at : at + 3] == phrase)
        assert tokens[: first + 2] == said[: first + 2]
        assert all(tokens[at : at + 3] != phrase for at in range(LENGTH - 2))


@pytest.mark.parametrize("mode", MODES)
def test_trial_8_bad_words(client: Client, mode: Mode) -> None:
    """Words of the greedy text are forbidden as text: as the tokenizer spells them they never come, neither at the
    beginning of a text nor behind a space."""
    allowed = [*range(65, 91), 32]  # letters that the tokenizer does not merge: there is one way to spell a word
    plain = plainly(client, **GREEDY, allowed_token_ids=allowed)
    words = [plain.text[at : at + 2] for at in (0, 3, 6)]
    result = compared(client, mode, **GREEDY, allowed_token_ids=allowed, bad_words=words)
    assert result.text != plain.text
    assert not any(word in result.text for word in words)


@pytest.mark.parametrize("mode", MODES)
def test_trial_8_min_p(client: Client, mode: Mode) -> None:
    """At a high temperature every token of every run is as likely as min-p demands."""
    options: dict[str, Any] = {"temperature": 2.5, "seed": 5, "min_p": 0.3}
    result = compared(client, mode, **GREEDY, **options)
    tokens = list(result.token_ids)
    for token, row in zip(tokens, rows(PROMPT + tokens, LENGTH), strict=True):
        assert (row[token] - row.max()) / 2.5 >= math.log(0.3) - 1e-3
    assert result.token_ids != plainly(client, **{**GREEDY, **options, "min_p": 0.0}).token_ids


@pytest.mark.parametrize("mode", MODES)
def test_trial_9_seeds(client: Client, mode: Mode) -> None:
    """The same seed says the same and another one something else."""
    options: dict[str, Any] = {**GREEDY, "temperature": 1.0}
    first = compared(client, mode, **options, seed=1)
    assert first.seed == 1
    assert first.token_ids != compared(client, mode, **options, seed=2).token_ids
    if mode in trials.INVARIANT:
        assert first.token_ids == compared(client, mode, **options, seed=1).token_ids


def test_trial_9_without_a_seed(client: Client) -> None:
    """No two of 20 requests share a seed, and the one that is reported gives the same tokens again."""
    options: dict[str, Any] = {**GREEDY, "temperature": 1.0}
    unseeded = [client.generate(**options) for _ in range(20)]
    assert len({result.seed for result in unseeded}) == 20
    assert len({result.token_ids for result in unseeded}) > 15
    assert client.generate(**options, seed=unseeded[7].seed).token_ids == unseeded[7].token_ids


def test_text_of_what_was_banned(client: Client) -> None:
    """The text is that of the tokens, also where options replaced some of them."""
    result = compared(client, prompt="abc abc abc", max_new_tokens=20, bad_words=["abc"], frequency_penalty=0.3)
    assert result.text == TOKENIZER.decode(list(result.token_ids))
