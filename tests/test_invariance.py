"""The central promise: the tokens of a request do not depend on who speculates, joins, leaves, lies or dies.

Through whole stacks: real sockets, real Valkey, and real processes where something is killed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from graftree import Client, LocalStack
from graftree.config import DEFAULT_MODEL
from graftree.models.load import load
from tests.drafters import spec

ARCHITECTURES = [
    "random:llama?seed=0",
    "random:qwen2?seed=1",
    "random:qwen3?seed=2",
    "random:opt?seed=3",
    "random:gpt2?seed=4",
    "random:mistral?seed=5&window=24",
]
PROMPT = "the quick brown fox the quick brown"
SAMPLED = {"max_new_tokens": 48, "temperature": 0.8, "seed": 7, "ignore_eos": True}


def watched(client: Client, prompt: str, after: int, act: Callable[[], object], **options: Any) -> list[int]:
    """Stream a request and do something when `after` tokens are out."""
    tokens: list[int] = []
    acted = False
    for chunk in client.stream(prompt, **options):
        tokens.extend(chunk.token_ids)
        if not acted and len(tokens) >= after:
            act()
            acted = True
    assert acted
    return tokens


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_speculators_never_change_a_token(model: str) -> None:
    """Sampled with a seed: none, n-gram, an SSM, three merged (one always wrong), one killed, one added."""
    perfect, wrong = spec("Perfect", model=model), spec("Wrong", model=model)
    with (
        LocalStack(
            model, speculators=[], in_process=True, router_options={"adaptive": False, "draft_wait_ms": 20}
        ) as stack,
        Client(stack.target) as client,
    ):
        plain = client.generate(PROMPT, **SAMPLED)
        assert plain.usage.completion_tokens == 48
        assert plain.speculation.num_draft_tokens == 0
        stack.add("speculator", "ngram")
        assert client.generate(PROMPT, **SAMPLED).token_ids == plain.token_ids
        stack.add("speculator", perfect)
        accepted = client.generate(PROMPT, **SAMPLED)
        assert accepted.token_ids == plain.token_ids
        assert accepted.speculation.num_accepted_tokens > 0
        stack.add("speculator", wrong)
        assert client.generate(PROMPT, **SAMPLED).token_ids == plain.token_ids
        killed = watched(client, PROMPT, 5, lambda: stack.kill("speculator", 1), **SAMPLED)
        assert tuple(killed) == plain.token_ids
        joined = watched(client, PROMPT, 5, lambda: stack.add("speculator", perfect), **SAMPLED)
        assert tuple(joined) == plain.token_ids


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_greedy_is_transformers_generate(model: str) -> None:
    """Temperature 0 through the stack equals `transformers` generate on the same weights, token by token."""
    loaded = load(model)
    prompt = [5, 17, 250, 33, 17, 250, 33, 17]
    ids = torch.tensor([prompt])
    expected = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    speculators = ["ngram", spec("Perfect", model=model)]
    with LocalStack(model, speculators, in_process=True) as stack, Client(stack.target) as client:
        got = client.generate(token_ids=prompt, max_new_tokens=40, temperature=0.0, ignore_eos=True)
    assert list(got.token_ids) == expected


def test_a_speculator_process_killed_or_added_mid_request() -> None:
    """SIGKILL of a real speculator process mid-request, and a new one mid-request: the same tokens, no error."""
    model = ARCHITECTURES[0]
    options = {**SAMPLED, "max_new_tokens": 120}
    with LocalStack(model, ["ngram", f"model:{model}"], threads=1) as stack, Client(stack.target) as client:
        plain = client.generate(PROMPT, speculation=False, **options).token_ids
        killed = watched(client, PROMPT, 10, lambda: stack.kill("speculator", 1), **options)
        assert tuple(killed) == plain
        joined = watched(client, PROMPT, 10, lambda: stack.add("speculator", f"model:{model}"), **options)
        assert tuple(joined) == plain
        assert client.generate(PROMPT, **options).token_ids == plain


def test_many_at_once() -> None:
    """16 concurrent requests with different options over 2 verifiers and 3 speculators equal one at a time."""
    model = ARCHITECTURES[0]
    requests: list[dict[str, Any]] = [
        {
            "prompt": f"{PROMPT} {i % 5}",
            "max_new_tokens": 8 + 3 * i,
            "temperature": (0.0, 0.7, 1.3)[i % 3],
            "seed": i,
            "top_k": (0, 20)[i % 2],
            "top_p": (1.0, 0.9, 0.5)[i // 2 % 3],
            "repetition_penalty": (1.0, 1.3)[i // 4 % 2],
            "log_probs": i % 4 == 0,
            "stop": ["zz"] if i % 5 == 0 else [],
            "speculation": i % 7 != 6,
        }
        for i in range(16)
    ]
    speculators = ["ngram", spec("Perfect", model=model), spec("Wrong", model=model)]
    with LocalStack(model, speculators, verifiers=2, in_process=True) as stack, Client(stack.target) as client:
        alone = [client.generate(**request) for request in requests]
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda request: client.generate(**request), requests))
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.text, one.finish_reason, one.usage) == (
            other.token_ids,
            other.text,
            other.finish_reason,
            other.usage,
        )
        assert [p.token_id for p in one.log_probs] == [p.token_id for p in other.log_probs]
        assert [p.log_prob for p in one.log_probs] == pytest.approx([p.log_prob for p in other.log_probs], abs=1e-3)


@pytest.mark.real_model
def test_invariant_on_the_real_model() -> None:
    """The default model, sampled: none, n-gram, an SSM cut from it, three merged, one killed, one added."""
    ssm, wrong = f"model:{DEFAULT_MODEL}?layers=0,1,29", spec("Wrong", model=f"{DEFAULT_MODEL}?layers=0,1")
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    prompt = "List three colours and three animals. Colours:"
    with LocalStack(DEFAULT_MODEL, []) as stack, Client(stack.target) as client:
        plain = client.generate(prompt, **options).token_ids
        stack.add("speculator", "ngram")
        assert client.generate(prompt, **options).token_ids == plain
        stack.add("speculator", ssm)
        assert client.generate(prompt, **options).token_ids == plain
        stack.add("speculator", wrong)
        merged = client.generate(prompt, **options)
        assert merged.token_ids == plain
        assert merged.speculation.num_draft_tokens > 0
        assert tuple(watched(client, prompt, 5, lambda: stack.kill("speculator", 1), **options)) == plain
        assert tuple(watched(client, prompt, 5, lambda: stack.add("speculator", ssm), **options)) == plain
