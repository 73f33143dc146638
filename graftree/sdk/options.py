"""`GenerateOptions`: the keywords of `generate` and `stream`, and the request they make."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from graftree.errors import InvalidArgument
from graftree.tree_limits import MAX_TREE_DEPTH, MAX_TREE_NODES
from graftree.v1 import common_pb2, generation_pb2

Mode = Literal["target_only", "mss", "mss_without_replacement", "naive"]
LogProbsMode = Literal["raw", "processed"]


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How to speculate; changes the speed, never the answer (but for the modes other than target_only at a
    temperature above 0, which give another draw from the same distribution).

    Attributes:
        off: plain decoding, no speculator is asked.
        max_nodes: most tree nodes per verify step; None = the router's budget, 0 = plain decoding.
        max_depth: deepest tree; None = the router's limit.
        mode: rule of acceptance; None = target_only.
    """

    off: bool = False
    max_nodes: int | None = None
    max_depth: int | None = None
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the output must look like; exactly one constraint is given (StructuredOutputParams in the protos).

    Attributes:
        json_schema: a JSON Schema, as text or as the object itself.
        json_object: any JSON object.
        regex: a regular expression that the whole output matches.
        grammar: a context-free grammar in llguidance's Lark.
        choice: one of these texts.
        disable_any_whitespace: JSON without white space between its tokens.
    """

    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    disable_any_whitespace: bool = False


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate` and `stream`. Beside `prompt`, exactly one of `token_ids` and `chat` may be the input.

    `chat` holds {"role": ..., "content": ...} messages. `temperature` is 0 (greedy) unless given; `n` samples need
    more, and the result holds them as `samples`. `timeout` is in seconds for the whole generation. Ranges are those
    of graftree/v1/*.proto, meanings those of docs/sampling.md.
    """

    token_ids: Sequence[int] | None
    chat: Sequence[Mapping[str, str]] | None
    request_id: str | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    bad_words_token_ids: Sequence[Sequence[int]] | None
    banned_token_ids: Sequence[int] | None
    allowed_token_ids: Sequence[int] | None
    n: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    log_probs: bool
    alternatives: int
    log_probs_mode: LogProbsMode | None
    echo_prompt_token_ids: bool
    speculation: SpeculationOptions | bool | None
    structured_output: StructuredOutput | None
    priority: int | None
    timeout: float | None


_SAMPLING = tuple(each.name for each in common_pb2.SamplingParams.DESCRIPTOR.fields if not each.is_repeated)
_STOPPING = ("max_new_tokens", "min_new_tokens", "ignore_eos")
_MODES: dict[Mode, common_pb2.SpeculationMode] = {
    "target_only": common_pb2.SPECULATION_MODE_TARGET_ONLY,
    "mss": common_pb2.SPECULATION_MODE_MSS,
    "mss_without_replacement": common_pb2.SPECULATION_MODE_MSS_WITHOUT_REPLACEMENT,
    "naive": common_pb2.SPECULATION_MODE_NAIVE,
}
_LOG_PROBS_MODES: dict[LogProbsMode, common_pb2.LogProbsMode] = {
    "raw": common_pb2.LOG_PROBS_MODE_RAW,
    "processed": common_pb2.LOG_PROBS_MODE_PROCESSED,
}
_OUTPUT = ("log_probs", "alternatives", "echo_prompt_token_ids")


def build_request(prompt: str | None, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """The request that `prompt` and `options` ask for.

    Raises:
        TypeError: an unknown keyword.
        InvalidArgument: a value that its field cannot hold; ranges are the router's to check.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - GenerateOptions.__annotations__.keys()):
        known = ", ".join(sorted(GenerateOptions.__annotations__))
        raise TypeError(f"unknown option {unknown[0]!r}; known: {known}")
    timeout = given.get("timeout")
    if timeout is not None and not (_is_number(timeout) and 0 < timeout < math.inf):
        raise InvalidArgument("timeout", timeout, "seconds, a number above 0 and finite; None = no limit")
    request = generation_pb2.GenerateRequest()
    _set(request, "request_id", given.get("request_id"))
    _set(request, "n", given.get("n"))
    _set(request, "priority", given.get("priority"))
    _set_input(request, prompt, given)
    for message, name in [
        *((request.sampling, name) for name in _SAMPLING),
        *((request.stopping, name) for name in _STOPPING),
        *((request.output, name) for name in _OUTPUT),
    ]:
        _set(message, name, given.get(name))
    if (mode := given.get("log_probs_mode")) is not None:
        if not isinstance(mode, str) or mode not in _LOG_PROBS_MODES:
            raise InvalidArgument("output.log_probs_mode", mode, f"one of {', '.join(_LOG_PROBS_MODES)}")
        request.output.log_probs_mode = _LOG_PROBS_MODES[mode]
    _set_lists(request, given)
    _set_tokens(request.sampling, given)
    if request.HasField("sampling") and not request.sampling.HasField("temperature"):
        request.sampling.temperature = (
            0.0  # a seed or a penalty alone must not turn a greedy request into a random one
        )
    _set_speculation(request, given.get("speculation"))
    _set_structured_output(request, given.get("structured_output"))
    return request


def _set_input(request: generation_pb2.GenerateRequest, prompt: str | None, given: Mapping[str, Any]) -> None:
    inputs = {"prompt": prompt, "token_ids": given.get("token_ids"), "chat": given.get("chat")}
    names = [name for name, value in inputs.items() if value is not None]
    if len(names) != 1:
        raise InvalidArgument("input", ", ".join(names), "exactly one of prompt, token_ids and chat")
    if prompt is not None:
        _set(request, "prompt", prompt)
    elif names == ["token_ids"]:
        request.token_ids.SetInParent()
        _extend(request.token_ids, "ids", inputs["token_ids"], "token_ids")
    else:
        request.chat.SetInParent()
        if not isinstance(given["chat"], Sequence):
            raise InvalidArgument("chat", type(given["chat"]).__name__, "a list of messages")
        for index, message in enumerate(given["chat"]):
            field = f"chat.messages[{index}]"
            if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
                raise InvalidArgument(field, type(message).__name__, "a mapping with the keys role and content")
            added = request.chat.messages.add()
            _set(added, "role", message["role"], f"{field}.role")
            _set(added, "content", message["content"], f"{field}.content")


def _set_lists(request: generation_pb2.GenerateRequest, given: Mapping[str, Any]) -> None:
    stop = given.get("stop", ())
    for name, values in (
        ("stop", (stop,) if isinstance(stop, str) else stop),
        ("stop_token_ids", given.get("stop_token_ids", ())),
    ):
        if values != ():  # even an empty extend would mark the sub-message as present
            _extend(request.stopping, name, values, f"stopping.{name}")
    biases = given.get("logit_bias", {})
    if not isinstance(biases, Mapping):
        raise InvalidArgument("sampling.logit_bias", type(biases).__name__, "a mapping of token ids to numbers")
    for token_id, bias in biases.items():
        try:
            request.sampling.logit_bias[token_id] = bias
        except (TypeError, ValueError):
            pair = f"{_KINDS['TYPE_UINT32']}: {_KINDS['TYPE_FLOAT']}"
            raise InvalidArgument("sampling.logit_bias", (token_id, bias), pair) from None


def _set_tokens(sampling: common_pb2.SamplingParams, given: Mapping[str, Any]) -> None:
    words = given.get("bad_words")
    if isinstance(words, str):
        raise InvalidArgument("sampling.bad_words", "str", "a list of texts")
    for name in ("bad_words", "banned_token_ids", "allowed_token_ids"):
        if values := given.get(name):
            _extend(sampling, name, values, f"sampling.{name}")
    if given.get("allowed_token_ids") is not None and not sampling.allowed_token_ids:
        raise InvalidArgument("sampling.allowed_token_ids", 0, "at least one token; None = all")  # unset on the wire
    sequences = given.get("bad_words_token_ids", ())
    if not isinstance(sequences, Sequence):
        raise InvalidArgument(
            "sampling.bad_words_token_ids", type(sequences).__name__, "a list of lists of token ids"
        )
    for index, sequence in enumerate(sequences):
        _extend(sampling.bad_words_token_ids.add(), "ids", sequence, f"sampling.bad_words_token_ids[{index}]")


def _set_speculation(request: generation_pb2.GenerateRequest, speculation: SpeculationOptions | bool | None) -> None:
    if speculation is None or speculation is True:
        return
    if speculation is False:
        speculation = SpeculationOptions(off=True)
    if not isinstance(speculation, SpeculationOptions):
        raise InvalidArgument("speculation", type(speculation).__name__, "SpeculationOptions, True or False")
    wire = request.speculation
    for name in ("off", "max_nodes", "max_depth"):
        _set(wire, name, getattr(speculation, name))
    if speculation.mode is not None:
        if not isinstance(speculation.mode, str) or speculation.mode not in _MODES:
            raise InvalidArgument("speculation.mode", speculation.mode, f"one of {', '.join(_MODES)}")
        wire.mode = _MODES[speculation.mode]


def _set_structured_output(request: generation_pb2.GenerateRequest, wanted: StructuredOutput | None) -> None:
    if wanted is None:
        return
    if not isinstance(wanted, StructuredOutput):
        raise InvalidArgument("structured_output", type(wanted).__name__, "StructuredOutput")
    schema = wanted.json_schema
    values = {
        "json_schema": json.dumps(schema) if isinstance(schema, Mapping) else schema,
        "json_object": wanted.json_object or None,
        "regex": wanted.regex,
        "grammar": wanted.grammar,
        "choice": wanted.choice,
    }
    names = [name for name, value in values.items() if value is not None]
    if len(names) != 1:
        raise InvalidArgument("structured_output", ", ".join(names), f"exactly one of {', '.join(values)}")
    wire = request.structured_output
    if wanted.choice is not None:
        wire.choice.SetInParent()
        _extend(wire.choice, "options", wanted.choice, "structured_output.choice.options")
    else:
        _set(wire, names[0], values[names[0]], f"structured_output.{names[0]}")
    wire.disable_any_whitespace = wanted.disable_any_whitespace


def _set(message: Any, name: str, value: Any, field: str = "") -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):
        raise InvalidArgument(field or _path(message, name), _shown(value), _limit(message, name)) from None


def _extend(message: Any, name: str, values: Any, field: str) -> None:
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError):
        raise InvalidArgument(field, _shown(values), f"a list; each {_limit(message, name)}") from None


_PARENTS = {"SamplingParams": "sampling.", "StoppingParams": "stopping.", "OutputParams": "output."}


def _path(message: Any, name: str) -> str:
    parent = "speculation." if message.DESCRIPTOR.name == "SpeculationParams" else ""
    return _PARENTS.get(message.DESCRIPTOR.name, parent) + name


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> object:
    return value if isinstance(value, int | float | bool) else type(value).__name__


_KINDS = {
    "TYPE_UINT32": "an integer from 0 to 4294967295",
    "TYPE_SINT32": "an integer from -2147483648 to 2147483647",
    "TYPE_UINT64": "an integer from 0 to 18446744073709551615",
    "TYPE_FLOAT": "a number",
    "TYPE_BOOL": "True or False",
    "TYPE_STRING": "text that is valid Unicode",
}
_MOST = {"max_nodes": MAX_TREE_NODES, "max_depth": MAX_TREE_DEPTH}
_TYPES = {number: name for name, number in vars(FieldDescriptor).items() if name in _KINDS}


def _limit(message: Any, name: str) -> str:
    """What a field can hold; the wire library's own words would quote the value."""
    if message.DESCRIPTOR.name == "SpeculationParams" and name in _MOST:
        return f"an integer from 0 to {_MOST[name]}"
    return _KINDS[_TYPES[message.DESCRIPTOR.fields_by_name[name].type]]
