"""Every acceptance mode through a whole stack, with good, cheap and wrong speculators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from bench.distribution import MODEL, PROMPT
from graftree import AsyncClient, Client, LocalStack
from graftree.sdk.options import Mode, SpeculationOptions
from tests.drafters import spec
from tests.verifier_harness import reference_model

TINY = MODEL.replace("context=64", "context=256")
LLM = "random:llama?layers=1&seed=3&scale=3"
MODES = get_args(Mode)
TEXT = {"prompt": "One, two, three. One, two, ", "max_new_tokens": 40, "ignore_eos": True}


def patient(model: str, speculators: list[str]) -> LocalStack:
    """A stack whose router waits for drafts: with models this small they would come too late to be accepted."""
    options = {"adaptive": False, "draft_wait_ms": 1000.0}
    return LocalStack(model, speculators, in_process=True, threads=1, router_options=options)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """The LLM's own weights as SSM, n-grams, and a drafter that is always wrong."""
    speculators = ["ngram", f"model:{LLM}", spec("Wrong", model=LLM, width="2")]
    with patient(LLM, speculators) as stack, Client(stack.target) as client:
        yield client


@pytest.mark.parametrize("mode", MODES)
def test_at_temperature_0_every_mode_is_plain_decoding(client: Client, mode: Mode) -> None:
    """The same tokens as without speculation, and drafts are accepted."""
    plain = client.generate(**TEXT, speculation=False)
    result = client.generate(**TEXT, speculation=SpeculationOptions(mode=mode))
    assert result.token_ids == plain.token_ids
    assert result.text == plain.text
    assert result.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("mode", MODES)
def test_sampled(client: Client, mode: Mode) -> None:
    """Figures agree with each other; where tokens are a function of the request alone, they are plain decoding's."""
    options: dict[str, Any] = {**TEXT, "temperature": 0.8, "seed": 7}
    result = client.generate(**options, speculation=SpeculationOptions(mode=mode))
    figures = result.speculation
    assert len(result.token_ids) == 40
    assert figures.num_accepted_tokens > 0
    assert sum(k * steps for k, steps in enumerate(figures.acceptance_histogram)) == figures.num_accepted_tokens
    assert figures.num_accepted_tokens + figures.num_spec_steps >= 40
    if mode in ("target_only", "naive"):
        plain = client.generate(**options, speculation=SpeculationOptions(mode=mode, off=True))
        assert result.token_ids == plain.token_ids


@pytest.fixture(scope="module")
def tiny() -> Iterator[LocalStack]:
    """A tiny vocabulary, so that drafts meet often: n-grams and an SSM of other weights."""
    speculators = [f"model:{TINY.replace('seed=3', 'seed=4')}", "ngram"]
    with patient(TINY, speculators) as stack:
        yield stack


@pytest.mark.parametrize("mode", MODES)
async def test_every_token_is_distributed_as_the_llm_says(tiny: LocalStack, mode: Mode) -> None:
    """Probability integral transform of 1440 tokens, each given the text before it: uniform, whatever was drafted.

    Tokens are ordered from the most likely one, so tokens that drafts favour or avoid would pile up on one side.
    """
    values, lots = list[float](), np.random.default_rng(1)
    options: dict[str, Any] = {"token_ids": PROMPT, "temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True}
    options["speculation"] = SpeculationOptions(mode=mode)
    async with AsyncClient(tiny.target) as client:
        results = await asyncio.gather(*[client.generate(**options, seed=seed) for seed in range(24)])
    for result in results:
        for token, p in zip(result.token_ids, probabilities(result.token_ids), strict=True):
            values.append(float(p[p > p[token]].sum() + lots.random() * p[token]))
    assert sum(result.speculation.num_accepted_tokens for result in results) > 100
    assert stats.kstest(values, "uniform").pvalue > 0.01


def probabilities(output: tuple[int, ...]) -> NDArray[np.float64]:
    """(len(output), V) of the next token after the prompt and each prefix of `output`, by transformers' forward."""
    network = reference_model(TINY)
    with torch.inference_mode():
        logits = network(torch.tensor([[*PROMPT, *output]]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return torch.softmax(logits.double(), dim=-1).numpy()
