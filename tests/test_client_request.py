"""The keywords of `generate` become the right request, or a clear error before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from graftree import Client, SpeculationOptions, StructuredOutput
from graftree.errors import InvalidArgument
from graftree.sdk.options import build_request
from graftree.v1 import common_pb2, generation_pb2


def test_nothing_given_is_nothing_set() -> None:
    """A bare prompt leaves every optional message out, so the router's defaults apply."""
    assert build_request("x", {}) == generation_pb2.GenerateRequest(prompt="x")


def test_every_keyword_lands_in_its_field() -> None:
    """One request with all keywords has all of them, where the contract puts them."""
    request = build_request(
        None,
        {
            "token_ids": [1, 2],
            "request_id": "8c1f9c3e-3f5e-4c39-9a44-93a0a4a5d2f1",
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.75,
            "min_p": 0.25,
            "seed": 2**64 - 1,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {7: -100.0},
            "bad_words": ["foo"],
            "bad_words_token_ids": [[1], (2, 3)],
            "banned_token_ids": [4],
            "allowed_token_ids": (5, 6),
            "n": 3,
            "priority": -7,
            "max_new_tokens": 9,
            "min_new_tokens": 2,
            "stop": "end",
            "stop_token_ids": [5],
            "ignore_eos": True,
            "log_probs": True,
            "alternatives": 3,
            "log_probs_mode": "processed",
            "echo_prompt_token_ids": True,
            "speculation": SpeculationOptions(max_nodes=4, max_depth=2, mode="mss"),
            "timeout": 3.0,
        },
    )
    expected = generation_pb2.GenerateRequest(
        request_id="8c1f9c3e-3f5e-4c39-9a44-93a0a4a5d2f1",
        token_ids=generation_pb2.TokenIds(ids=[1, 2]),
        stopping=generation_pb2.StoppingParams(
            max_new_tokens=9, min_new_tokens=2, stop=["end"], stop_token_ids=[5], ignore_eos=True
        ),
        output=generation_pb2.OutputParams(
            log_probs=True,
            alternatives=3,
            echo_prompt_token_ids=True,
            log_probs_mode=common_pb2.LOG_PROBS_MODE_PROCESSED,
        ),
        n=3,
        priority=-7,
        speculation=generation_pb2.SpeculationParams(mode=common_pb2.SPECULATION_MODE_MSS, max_nodes=4, max_depth=2),
    )
    sampling = expected.sampling
    sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p = 0.5, 3, 0.75, 0.25
    sampling.seed, sampling.repetition_penalty = 2**64 - 1, 1.5
    sampling.presence_penalty, sampling.frequency_penalty = 0.5, -0.5
    sampling.logit_bias[7] = -100.0
    sampling.bad_words.append("foo")
    sampling.bad_words_token_ids.add(ids=[1])
    sampling.bad_words_token_ids.add(ids=[2, 3])
    sampling.banned_token_ids.append(4)
    sampling.allowed_token_ids.extend([5, 6])
    assert request == expected


def test_chat_messages() -> None:
    """Messages keep their order and their roles."""
    request = build_request(None, {"chat": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]})
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", "s"), ("user", "u")]


def test_empty_token_ids_are_an_input() -> None:
    """An empty list is sent as what it is: the router says what is wrong with it."""
    assert build_request(None, {"token_ids": []}).WhichOneof("input") == "token_ids"


def test_a_seed_alone_stays_greedy() -> None:
    """Setting some sampling field does not silently turn the temperature on."""
    sampling = build_request("x", {"seed": 3}).sampling
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0.0


@pytest.mark.parametrize("speculation", [False, SpeculationOptions(off=True)])
def test_speculation_off(speculation: bool | SpeculationOptions) -> None:
    """Both spellings of "no speculation" are the same request."""
    assert build_request("x", {"speculation": speculation}).speculation.off


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (StructuredOutput(json_schema={"type": "object"}), {"json_schema": '{"type": "object"}'}),
        (StructuredOutput(json_schema="{}"), {"json_schema": "{}"}),
        (
            StructuredOutput(json_object=True, disable_any_whitespace=True),
            {"json_object": True, "disable_any_whitespace": True},
        ),
        (StructuredOutput(regex="a+"), {"regex": "a+"}),
        (StructuredOutput(grammar="start: A"), {"grammar": "start: A"}),
        (
            StructuredOutput(choice=["a", "b"]),
            {"choice": common_pb2.StructuredOutputParams.Choice(options=["a", "b"])},
        ),
        (StructuredOutput(choice=[]), {"choice": common_pb2.StructuredOutputParams.Choice()}),
    ],
)
def test_structured_output(wanted: StructuredOutput, expected: dict[str, Any]) -> None:
    """Each constraint lands in its field; a schema may be given as the object it is."""
    request = build_request("x", {"structured_output": wanted})
    assert request.structured_output == common_pb2.StructuredOutputParams(**expected)


def test_unknown_keyword_is_a_type_error() -> None:
    """A misspelt option is never ignored."""
    with pytest.raises(TypeError, match=r"unknown option 'max_tokens'; known: .*max_new_tokens"):
        build_request("x", {"max_tokens": 3})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("field", "prompt", "options"),
    [
        ("input", None, {}),
        ("input", "x", {"token_ids": [1]}),
        ("prompt", "\ud800", {}),
        ("prompt", 3, {}),
        ("token_ids", None, {"token_ids": [-1]}),
        ("token_ids", None, {"token_ids": 7}),
        ("chat.messages[0]", None, {"chat": ["hello"]}),
        ("chat.messages[1]", None, {"chat": [{"role": "user", "content": "x"}, {"role": "user"}]}),
        ("stopping.max_new_tokens", "x", {"max_new_tokens": -1}),
        ("n", "x", {"n": -1}),
        ("output.log_probs_mode", "x", {"log_probs": True, "log_probs_mode": "cooked"}),
        ("sampling.bad_words", "x", {"bad_words": "foo"}),
        ("sampling.bad_words", "x", {"bad_words": [3]}),
        ("sampling.bad_words_token_ids[1]", "x", {"bad_words_token_ids": [[1], 2]}),
        ("sampling.banned_token_ids", "x", {"banned_token_ids": [-1]}),
        ("sampling.allowed_token_ids", "x", {"allowed_token_ids": []}),
        ("stopping.max_new_tokens", "x", {"max_new_tokens": 1.5}),
        ("stopping.stop", "x", {"stop": [3]}),
        ("stopping.stop_token_ids", "x", {"stop_token_ids": [-3]}),
        ("sampling.temperature", "x", {"temperature": "hot"}),
        ("sampling.seed", "x", {"seed": -1}),
        ("sampling.logit_bias", "x", {"logit_bias": {-1: 1.0}}),
        ("speculation", "x", {"speculation": 4}),
        ("speculation.mode", "x", {"speculation": SpeculationOptions(mode="best")}),  # type: ignore[arg-type]
        ("speculation.mode", "x", {"speculation": SpeculationOptions(mode="unspecified")}),  # type: ignore[arg-type]
        ("structured_output", "x", {"structured_output": "json"}),
        ("structured_output", "x", {"structured_output": StructuredOutput()}),
        ("structured_output", "x", {"structured_output": StructuredOutput(regex="a", json_object=True)}),
        ("structured_output.regex", "x", {"structured_output": StructuredOutput(regex=3)}),  # type: ignore[arg-type]
        ("speculation.max_nodes", "x", {"speculation": SpeculationOptions(max_nodes=-1)}),
        ("speculation.mode", "x", {"speculation": SpeculationOptions(mode=["a"])}),  # type: ignore[arg-type]
        ("output.log_probs_mode", "x", {"log_probs_mode": ["raw"]}),
        ("timeout", "x", {"timeout": "5"}),
        ("timeout", "x", {"timeout": True}),
        ("sampling.logit_bias", "x", {"logit_bias": [1]}),
        ("sampling.bad_words_token_ids", "x", {"bad_words_token_ids": 5}),
        ("chat", None, {"chat": 5}),
    ],
)
def test_what_a_field_cannot_hold_names_the_field(field: str, prompt: Any, options: Any) -> None:
    """Values that the wire cannot carry are refused here with the field's name, and never quote the prompt."""
    with pytest.raises(InvalidArgument) as caught:
        build_request(prompt, options)
    assert caught.value.field == field
    assert "hello" not in str(caught.value)
    assert "\\ud800" not in str(caught.value)


def test_limits_are_the_real_ones() -> None:
    """Where a tree's limit is below what the wire can carry, the error names the tree's."""
    with pytest.raises(InvalidArgument, match="0 to 1024"):
        build_request("x", {"speculation": SpeculationOptions(max_nodes=-1)})
    with pytest.raises(InvalidArgument, match="0 to 128"):
        build_request("x", {"speculation": SpeculationOptions(max_depth=-1)})


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1:99999", "localhost:0", "[::1]:65536", "dns:///a:70000", "ipv6:[::1]:99999", "a:-1", "a:1,b:0"],
)
def test_ports_are_ports(target: str) -> None:
    """A port outside 1 to 65535, of which gRPC would take the last 16 bits, is refused."""
    with pytest.raises(InvalidArgument, match="1 to 65535"):
        Client(target)


@pytest.mark.parametrize("target", ["127.0.0.1:65535", "name", "[::1]:1", "::1", "unix:/tmp/a:99999", "dns:///a:80"])
def test_targets_that_are_names(target: str) -> None:
    """Whatever else gRPC takes as a name is left to it."""
    with Client(target) as client:
        assert client.target == target
