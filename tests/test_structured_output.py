"""Structured output through the whole of Graftree: valid, equal to plain decoding, and still fast."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import pytest

from graftree.client import AsyncClient, Client
from graftree.config import DEFAULT_MODEL
from graftree.errors import InvalidArgument
from graftree.local_stack import LocalStack
from graftree.sdk.options import GenerateOptions, SpeculationOptions, StructuredOutput
from graftree.sdk.results import Result
from tests.drafters import spec

LLM = "random:llama?layers=1&hidden=32&heads=4&kv_heads=2&vocab=512&context=256&seed=0&scale=3"
PADDED = LLM + "&padded=24"
EOS = 257

LEAF = {
    "type": "object",
    "properties": {"v": {"enum": [1, 22, "x"]}},
    "required": ["v"],
    "additionalProperties": False,
}
# Each bounds the length of what satisfies it.
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["router", "verifier", "speculator"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 300},
        },
        "required": ["name", "kind", "count"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "the end"}]},
        "minItems": 2,
        "maxItems": 5,
    },
    {
        "$defs": {"leaf": LEAF},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    {"type": "string", "pattern": "^[a-f]{2,6}-[0-9]{1,3}$"},
]

REQUESTS: list[tuple[str, GenerateOptions]] = [
    (
        f"Request {index}: ",
        {
            "structured_output": StructuredOutput(json_schema=SCHEMAS[index % 4], disable_any_whitespace=True),
            "max_new_tokens": 120,
            "temperature": (0.0, 0.7, 1.0, 1.5)[index // 4 % 4],
            "top_p": (1.0, 0.9)[index % 2],
            "repetition_penalty": (1.0, 1.2, 1.0)[index % 3],
            "seed": index,
        },
    )
    for index in range(200)
]


def ask(
    target: str,
    requests: Sequence[tuple[str, GenerateOptions]],
    *,
    done: Callable[[], None] = lambda: None,
    **more: Any,
) -> list[Result]:
    """All at once, 32 under way; `done` is called behind each."""

    async def run() -> list[Result]:
        slots = asyncio.Semaphore(32)
        async with AsyncClient(target) as client:

            async def one(prompt: str, options: GenerateOptions) -> Result:
                async with slots:
                    result = await client.generate(prompt or None, **{**options, **more})  # type: ignore[typeddict-item]
                done()
                return result

            return await asyncio.gather(*(one(*request) for request in requests))

    return asyncio.run(run())


@contextlib.contextmanager
def stack(model: str, *speculators: str, verifiers: int = 1) -> Iterator[LocalStack]:
    options = {"kv_tokens": 16_384, "device": "cpu"}
    with LocalStack(
        model,
        speculators,
        verifiers=verifiers,
        in_process=True,
        verifier_options=options,
        # What is drafted decides what is accepted, not this machine's load.
        router_options={"adaptive": False, "draft_wait_ms": 500},
    ) as started:
        yield started


@pytest.fixture(scope="module")
def plain() -> list[Result]:
    """What plain decoding says."""
    with stack(LLM) as started:
        return ask(started.target, REQUESTS, speculation=False)


@pytest.mark.parametrize(
    "drafter", [spec("Wrong", model=LLM, width="2"), spec("Perfect", model=LLM)], ids=["wrong", "perfect"]
)
def test_valid_in_200_of_200(drafter: str, plain: list[Result]) -> None:
    """Every answer is valid JSON that its schema accepts and the one of plain decoding, whoever drafts; good
    speculators are accepted all the same."""
    with stack(LLM, drafter) as started:
        results = ask(started.target, REQUESTS)
    for result, expected, (_, options) in zip(results, plain, REQUESTS, strict=True):
        structured = options["structured_output"]
        assert structured is not None
        assert result.finish_reason == "stop"
        assert result.token_ids[-1] == EOS
        jsonschema.validate(json.loads(result.text), structured.json_schema)
        assert (result.text, result.token_ids, result.usage) == (expected.text, expected.token_ids, expected.usage)
    tokens = sum(result.usage.completion_tokens for result in results)
    steps = sum(result.speculation.num_spec_steps for result in results)
    assert steps <= tokens
    if "Perfect" in drafter:
        assert tokens / steps > 1.1
    assert len({result.text for result in results}) > 50


OTHERS: list[tuple[StructuredOutput, str]] = [
    (StructuredOutput(regex=r"(left|right)( then (left|right)){0,3}\."), r"(left|right)( then (left|right)){0,3}\."),
    (StructuredOutput(regex=r"[α-ω]{3}/[0-9]{1,9}x"), r"[α-ω]{3}/[0-9]{1,9}x"),
    (StructuredOutput(choice=["yes", "no", 'so "so"\n', "日本"]), r'yes|no|so "so"\n|日本'),
    (StructuredOutput(grammar='start: "<" NAME ("," NAME)? ">"\nNAME: /[a-z]{1,4}/'), r"<[a-z]{1,4}(,[a-z]{1,4})?>"),
]
OTHER_REQUESTS: list[tuple[str, GenerateOptions]] = [
    ("Say: ", {"structured_output": shape, "temperature": 0.8, "seed": seed, "max_new_tokens": 100})
    for shape, _ in OTHERS
    for seed in range(5)
]


def check_others(results: Sequence[Result]) -> None:
    for index, result in enumerate(results):
        pattern = OTHERS[index // 5][1]
        for sample in (result, *result.others):
            assert sample.finish_reason == "stop"
            assert re.fullmatch(pattern, sample.text), sample.text


def said(results: Sequence[Result]) -> list[tuple[str, tuple[int, ...]]]:
    return [(result.text, result.token_ids) for result in results]


def test_other_constraints_while_a_verifier_dies() -> None:
    """Regex, choice and grammar, on a model with padding rows: whole matches, as in plain decoding, from one verifier
    and from another that takes over in the middle."""
    with stack(PADDED, spec("Perfect", model=PADDED), verifiers=2) as started:
        expected = ask(started.target, OTHER_REQUESTS, speculation=False)
        check_others(expected)
        with AsyncKiller(started, after=3) as killer:
            results = ask(started.target, OTHER_REQUESTS, done=killer.done)
        assert killer.killed
        assert said(results) == said(expected)


class AsyncKiller:
    """Kills verifier 0 once `after` requests are through."""

    def __init__(self, started: LocalStack, after: int) -> None:
        self._started, self._left, self._thread = started, after, threading.Thread(target=self._kill)
        self.killed = False

    def done(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._thread.start()

    def _kill(self) -> None:
        self._started.kill("verifier", 0)
        self.killed = True

    def __enter__(self) -> AsyncKiller:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_every_mode_and_several_samples() -> None:
    """The acceptance modes that draw, two samples a prompt: every sample matches."""
    with stack(LLM, f"model:{LLM}&scale=4".replace("scale=3&", "")) as started:
        for mode in ("mss", "mss_without_replacement", "naive"):
            results = ask(started.target, OTHER_REQUESTS, n=2, speculation=SpeculationOptions(mode=mode))
            check_others(results)
            assert sum(result.speculation.num_accepted_tokens for result in results) > 0


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (StructuredOutput(json_schema='{"type": "foo"}'), "structured_output.json_schema"),
        (StructuredOutput(json_schema='{"type": "array", "uniqueItems": true}'), "structured_output.json_schema"),
        (StructuredOutput(json_schema=" " * 65_537), "structured_output.json_schema"),
        (StructuredOutput(regex="(a"), "structured_output.regex"),
        (StructuredOutput(grammar="start: nothing"), "structured_output.grammar"),
        (StructuredOutput(choice=["a", "a"]), "structured_output.choice.options"),
        (StructuredOutput(regex="a", disable_any_whitespace=True), "structured_output.disable_any_whitespace"),
    ],
)
def test_what_cannot_be_is_refused(refusing: Client, shape: StructuredOutput, field: str) -> None:
    """INVALID_ARGUMENT with the field, before anything starts."""
    with pytest.raises(InvalidArgument) as caught:
        refusing.generate("x", structured_output=shape)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ignore_eos": True}, "stopping.stop_token_ids"),
        ({"ignore_eos": True, "stop_token_ids": [ord("a")]}, "stopping.stop_token_ids"),
        ({"min_new_tokens": 9}, "structured_output"),
        ({"logit_bias": {ord("b"): -100}}, "structured_output"),
        ({"bad_words": ["b"]}, "structured_output"),
    ],
)
def test_options_that_leave_nothing(refusing: Client, options: GenerateOptions, field: str) -> None:
    """What structured output cannot be combined with ends in an error that says so, never in a hang."""
    with pytest.raises(InvalidArgument) as caught:
        refusing.generate("x", structured_output=StructuredOutput(choice=["b"]), **options)
    assert caught.value.field == field


@pytest.fixture(scope="module")
def refusing() -> Iterator[Client]:
    with stack(LLM) as started, Client(started.target) as client:
        yield client


def test_stop_conditions_come_first(refusing: Client) -> None:
    """A stop string, a stop token or the length may end the output before its constraint does."""
    shape = StructuredOutput(choice=["abcdef"])
    for options, text, reason in (
        ({"stop": "cd"}, "ab", "stop"),
        ({"stop_token_ids": [ord("f")]}, "abcdef", "stop"),
        ({"max_new_tokens": 1}, "a", "length"),
        ({"ignore_eos": True, "stop_token_ids": [258]}, "abcdef", "stop"),
    ):
        result = refusing.generate("x", structured_output=shape, **options)  # type: ignore[arg-type]
        assert result.finish_reason == reason
        assert result.text.startswith(text) if reason == "length" else result.text == text


@pytest.mark.real_model
def test_real_model() -> None:
    """SmolLM2 fills in a schema, drafted by a cut of itself and by n-grams: valid, and as plain decoding."""
    requests: list[tuple[str, GenerateOptions]] = [
        (
            "",
            {
                "chat": [{"role": "user", "content": f"Describe {thing} as JSON."}],
                "structured_output": StructuredOutput(json_schema=SCHEMAS[0]),
                "max_new_tokens": 120,
                "temperature": temperature,
                "seed": 3,
            },
        )
        for thing in ("a router", "a teapot")
        for temperature in (0.0, 1.0)
    ]
    with stack(DEFAULT_MODEL, "ngram", f"model:{DEFAULT_MODEL}?layers=0,1,2,29") as started:
        plain = ask(started.target, requests, speculation=False)
        results = ask(started.target, requests)
    assert said(results) == said(plain)
    for result in results:
        jsonschema.validate(json.loads(result.text), SCHEMAS[0])
    assert sum(result.speculation.num_accepted_tokens for result in results) > 0
