"""Several samples of one prompt through whole stacks: each is the request alone, and the prompt is read once."""

from __future__ import annotations

from typing import Any

import pytest

from graftree import Client, LocalStack
from graftree.sdk.options import SpeculationOptions, StructuredOutput
from tests import trials
from tests.trials import INVARIANT, SPECULATORS, agree
from verifier_service.counters import Counters

PROMPT = [32 + (11 * i + 5) % 95 for i in range(90)]
OPTIONS: dict[str, Any] = {"token_ids": PROMPT, "temperature": 0.9, "max_new_tokens": 20}


def counters(stack: LocalStack) -> Counters:
    found: Counters = stack.pods("verifier")[0].instance.counters  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("step_tokens", [32, 512])
@pytest.mark.parametrize("speculators", [[], SPECULATORS["merged"]], ids=["plain", "merged"])
def test_each_sample_is_the_request_alone(speculators: list[str], step_tokens: int) -> None:
    """Sample i = a single request with seed + i, in tokens, text, log probabilities and end; n prompts cost one."""
    options = {**OPTIONS, "log_probs": True, "alternatives": 2, "stop": ["a"], "repetition_penalty": 1.1}
    verifier = {"step_tokens": step_tokens}
    with (
        LocalStack(trials.MODEL, speculators, in_process=True, threads=1, verifier_options=verifier) as stack,
        Client(stack.target) as client,
    ):
        before = counters(stack).prefill_rows
        result = client.generate(**options, seed=2**64 - 1, n=4)
        assert counters(stack).prefill_rows - before == len(PROMPT) - 1
        assert counters(stack).shared_rows == 3 * (len(PROMPT) - 1)
        singles = [client.generate(**options, seed=seed) for seed in (2**64 - 1, 0, 1, 2)]
    assert len({single.token_ids for single in singles}) == 4
    assert result.total_usage.prompt_tokens == 90
    assert result.total_usage.completion_tokens == sum(len(single.token_ids) for single in singles)
    for sample, single in zip(result.samples, singles, strict=True):
        agree(sample)
        assert (sample.token_ids, sample.text, sample.finish_reason) == (
            single.token_ids,
            single.text,
            single.finish_reason,
        )
        assert (sample.seed, sample.stop_string, sample.usage) == (single.seed, single.stop_string, single.usage)
        for got, want in zip(sample.log_probs, single.log_probs, strict=True):
            assert got.log_prob == pytest.approx(want.log_prob, abs=1e-3)


@pytest.mark.parametrize("mode", trials.MODES)
def test_samples_in_every_mode(mode: Any) -> None:
    """Structured samples on one prompt, streamed: each satisfies the constraint, and where tokens follow from the
    request alone they are plain decoding's."""
    options: dict[str, Any] = {
        **OPTIONS,
        "structured_output": StructuredOutput(regex="[a-f]{3,9}[0-9]"),
        "stop_token_ids": [257],
        "seed": 5,
        "n": 3,
    }
    with trials.stack(SPECULATORS["merged"]) as client:
        stream = client.stream(**options, speculation=SpeculationOptions(mode=mode))
        texts = ["", "", ""]
        for chunk in stream:
            texts[chunk.index] += chunk.text
        assert texts == [sample.text for sample in stream.result.samples]
        assert all(text[:3].isalpha() and text[-1].isdigit() for text in texts)
        plain = client.generate(**options, speculation=SpeculationOptions(mode=mode, off=True))
        if mode in INVARIANT:
            assert texts == [sample.text for sample in plain.samples]


def test_a_verifier_that_cannot_take_all() -> None:
    """With room for two sessions, three samples come one after the other, and are the same."""
    with trials.stack([]) as client:
        expected = client.generate(**OPTIONS, seed=3, n=3)
    with trials.stack(
        [], verifier_options={"max_sessions": 2}, router_options={"connect_timeout_seconds": 30}
    ) as client:
        result = client.generate(**OPTIONS, seed=3, n=3)
    assert [sample.token_ids for sample in result.samples] == [sample.token_ids for sample in expected.samples]
