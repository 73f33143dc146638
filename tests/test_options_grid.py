"""The grid of `python -m bench.options` on a tiny model: 60 combinations of options, speculation on and off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.options import compare, frequent_tokens, grid, near_tie, run, summary
from graftree import Client, LocalStack
from graftree.sdk.results import Result
from tests.drafters import spec

MODEL = "random:llama?layers=2&hidden=32&context=256&seed=3&scale=3"
INPUTS = [{"prompt": "One, two, three. One, two, "}, {"prompt": "a b a b a b a"}]


def test_60_combinations_of_options() -> None:
    """Tokens, text, log probabilities, usage and reason are plain decoding's for every one of them, and drafts are
    accepted; every option of the grid meets something."""
    speculators = ["ngram", f"model:{MODEL}", spec("Wrong", model=MODEL, width="2")]
    with LocalStack(MODEL, speculators, in_process=True, threads=1) as stack, Client(stack.target) as client:
        tokens, words = frequent_tokens(client, INPUTS, 16)
        combinations = grid(tokens, words)
        outcomes = run(client, INPUTS, combinations, length=14, workers=4)
    assert len(combinations) == len({each.name for each in combinations}) == 60
    assert len(outcomes) == 120
    assert [outcome for outcome in outcomes if outcome.difference and not outcome.near_tie] == []
    assert summary(outcomes, 60).finish(None) == 0


@pytest.fixture(scope="module")
def result() -> Result:
    with LocalStack(MODEL, [], in_process=True, threads=1) as stack, Client(stack.target) as client:
        return client.generate(
            token_ids=[65, 66], max_new_tokens=6, log_probs=True, alternatives=3, echo_prompt_token_ids=True
        )


def test_the_comparison_sees_differences(result: Result) -> None:
    """Each thing that must be equal is noticed when it is not, and only real near-ties count as such."""
    assert compare(result, result) == ("", 0.0)
    entry = result.log_probs[2]
    other = entry.alternatives[1][0]
    parted = replace(result, token_ids=(*result.token_ids[:2], other, *result.token_ids[3:]))
    assert compare(parted, result)[0] == "token_ids of sample 0"
    assert not near_tie(parted, result, False)
    close = replace(entry, alternatives=(entry.alternatives[0], (other, entry.log_prob - 1e-4)))
    tied = replace(result, log_probs=(*result.log_probs[:2], close, *result.log_probs[3:]))
    assert near_tie(parted, tied, False)
    assert not near_tie(parted, tied, True)  # under noise these two are far apart
    shorter = replace(result, token_ids=result.token_ids[:-1])
    assert compare(shorter, result)[0] == "token_ids of sample 0"
    assert not near_tie(shorter, result, False)
    assert compare(replace(result, text="x"), result)[0] == "text of sample 0"
    assert compare(replace(result, stop_token_id=3), result)[0] == "stop_token_id of sample 0"
    usage = replace(result.usage, completion_tokens=7)
    assert compare(replace(result, usage=usage), result)[0] == "usage of sample 0"
    worse = replace(result, log_probs=(replace(result.log_probs[0], log_prob=-99.0), *result.log_probs[1:]))
    assert compare(worse, result)[0].startswith("log probabilities")
