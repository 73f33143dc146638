"""What the trials share: a tiny LLM behind whole stacks whose speculators are perfect, wrong, or both merged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from graftree import Client, LocalStack
from graftree.sdk.options import Mode, SpeculationOptions
from graftree.sdk.results import Result
from graftree.text.tokenizer import Tokenizer
from tests import drafters
from tests.drafters import spec
from tests.verifier_harness import LLAMA

MODEL = LLAMA + "&eos=none"
TOKENIZER = Tokenizer.load(MODEL)
MODES: tuple[Mode, ...] = get_args(Mode)
# Tokens that follow from the request alone are compared with plain decoding's.
INVARIANT: tuple[Mode, ...] = ("target_only", "naive")

WRONG = spec("Wrong", model=MODEL, width="3")
SPECULATORS = {
    "perfect": [spec("Oracle")],
    "wrong": [WRONG],
    "merged": [spec("Perfect", model=MODEL, siblings="1"), WRONG, "ngram"],
}
PROMPT = [32 + (37 * i + 11) % 95 for i in range(12)]  # printable: text begins where the output does


@contextmanager
def stack(speculators: list[str], model: str = MODEL, **options: Any) -> Iterator[Client]:
    """Steps wait for a first draft, so that runs are verified however slow the machine is."""
    router = {"adaptive": False, "draft_wait_ms": 1000.0, "tree_depth": 4, **options.pop("router_options", {})}
    with (
        LocalStack(model, speculators, in_process=True, threads=1, router_options=router, **options) as running,
        Client(running.target) as client,
    ):
        yield client


def plainly(client: Client, **options: Any) -> Result:
    """Plain decoding. The oracle learns what it says, and what it would go on to say where no stop ended it."""
    mode = options.pop("speculation", SpeculationOptions()).mode
    plain = SpeculationOptions(off=True, mode=mode)
    prompt = options.get("token_ids") or TOKENIZER.encode(options["prompt"])
    stops = {"stop"} if "structured_output" in options else {"stop", "stop_token_ids"}
    endless = {key: value for key, value in options.items() if key not in stops | {"max_new_tokens"}}
    longer = min(len(prompt) + options["max_new_tokens"] + 6, 256) - len(prompt)
    ahead = client.generate(**endless, max_new_tokens=longer, speculation=plain)
    drafters.TEXTS[:] = [[*prompt, *ahead.token_ids]]
    return client.generate(**options, speculation=plain)


def compared(client: Client, mode: Mode = "target_only", **options: Any) -> Result:
    """The request with speculation; where its tokens follow from the request alone they are plain decoding's."""
    speculation = SpeculationOptions(mode=mode)
    plain = plainly(client, **options, speculation=speculation)
    result = client.generate(**options, speculation=speculation)
    agree(result)
    if not options.get("temperature") or mode in INVARIANT:
        same(result, plain)
    return result


def agree(result: Result) -> None:
    """What one result says in several ways is the same in all of them."""
    count = len(result.token_ids)
    figures = result.speculation
    assert result.usage.completion_tokens == count
    assert len(result.log_probs) in (0, count)
    assert all(each.token_id == token for each, token in zip(result.log_probs, result.token_ids, strict=False))
    assert sum(k * steps for k, steps in enumerate(figures.acceptance_histogram)) == figures.num_accepted_tokens
    assert sum(figures.acceptance_histogram) == figures.num_spec_steps
    assert figures.num_accepted_tokens <= min(count, figures.num_draft_tokens)
    assert abs(figures.mean_acceptance_length * figures.num_spec_steps - count) < 1e-9
    assert result.text == TOKENIZER.decode(list(result.token_ids)) or result.stop_string is not None


def same(result: Result, plain: Result, log_prob_error: float = 1e-3) -> None:
    """Tokens, text, log probabilities, usage and reason are plain decoding's."""
    agree(result)
    agree(plain)
    assert result.token_ids == plain.token_ids
    assert (result.text, result.usage, result.finish_reason) == (plain.text, plain.usage, plain.finish_reason)
    assert (result.stop_string, result.stop_token_id) == (plain.stop_string, plain.stop_token_id)
    assert len(result.log_probs) == len(plain.log_probs)
    for got, want in zip(result.log_probs, plain.log_probs, strict=True):
        assert got.token_id == want.token_id
        assert abs(got.log_prob - want.log_prob) <= log_prob_error
        assert len(got.alternatives) == len(want.alternatives)
        for (_, value), (_, expected) in zip(got.alternatives, want.alternatives, strict=True):
            assert abs(value - expected) <= log_prob_error
    assert plain.speculation.num_draft_tokens == 0
