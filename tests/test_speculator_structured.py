"""Structured output and the model drafter: it guesses what may be said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from graftree.grammar import Grammars
from graftree.text.tokenizer import Tokenizer
from graftree.v1.common_pb2 import SamplingParams, StructuredOutputParams
from tests.test_speculator_model import PROMPT, Stack

EOS = 257
SHAPE = StructuredOutputParams(
    json_schema='{"type": "array", "items": {"enum": ["on", "off", 12]}, "minItems": 1}', disable_any_whitespace=True
)
GRAMMARS = Grammars(lambda: Tokenizer.load("random:llama?vocab=512"))


def open_session(stack: Stack, sampling: SamplingParams | None = None, **changes: Any) -> None:
    stack.open("a", PROMPT, sampling, **{"structured_output": SHAPE, "stop_token_ids": [EOS], **changes})
    stack.settle()


def paths(stack: Stack) -> Iterable[tuple[int, ...]]:
    return [tuple(stack.trees["a"].path(node)) for node in stack.trees["a"].nodes()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_node_is_allowed(temperature: float) -> None:
    """Of the tree at the start, and of the ones behind each commit."""
    stack = Stack()
    open_session(stack, SamplingParams(temperature=temperature, seed=3))
    output: list[int] = []
    for token in b'["on",12,':
        constraint = GRAMMARS.constrain(SHAPE, vocab_size=512, stop_token_ids=[EOS], output_ids=output)
        assert paths(stack)
        for path in paths(stack):
            for depth, drafted in enumerate(path):
                assert constraint.allowed(path[:depth])[drafted]
        stack.commit("a", [token])
        stack.settle()
        output.append(token)


def test_a_dead_end_has_no_children() -> None:
    """Where nothing may follow, nothing is drafted, and the session goes on."""
    stack = Stack()
    word = StructuredOutputParams(choice=StructuredOutputParams.Choice(options=["on"]))
    sampling = SamplingParams(temperature=0.0, logit_bias={ord("n"): -100.0})
    open_session(stack, sampling, structured_output=word)
    (on,) = Tokenizer.load("random:llama?vocab=512").encode("on")
    assert set(paths(stack)) == {(ord("o"),), (on,), (on, EOS)}
    assert not stack.events or all(type(event).__name__ == "Grown" for event in stack.events)


@pytest.mark.parametrize(
    "changes",
    [
        {"structured_output": StructuredOutputParams(regex="(")},
        {"structured_output": StructuredOutputParams()},
        {"stop_token_ids": []},
    ],
)
def test_what_cannot_be_followed_is_ignored(changes: dict[str, Any]) -> None:
    """A speculator drafts without it: guesses are only guesses."""
    stack = Stack()
    open_session(stack, **changes)
    assert len(list(paths(stack))) == 24
