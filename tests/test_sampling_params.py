"""SamplingParams: the wire, and every limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from graftree.errors import InvalidArgument
from graftree.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_SEQUENCES,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_BANNED_TOKENS,
    MAX_BIASES,
    SamplingParams,
)
from graftree.v1 import common_pb2


def test_unset_fields_are_off() -> None:
    """An empty message means temperature 1 and no processor."""
    params = SamplingParams.from_proto(common_pb2.SamplingParams())
    params.validate(vocab_size=2)
    assert params == SamplingParams()
    assert params.seed is None
    assert not params.greedy
    assert not params.penalised


def test_fields_that_are_set_to_zero_are_not_unset() -> None:
    """Presence decides: temperature 0 is greedy, seed 0 is a seed."""
    params = SamplingParams.from_proto(common_pb2.SamplingParams(temperature=0, seed=0))
    assert params.greedy
    assert params.seed == 0


def test_the_wire_keeps_everything() -> None:
    """to_proto and from_proto are inverse for numbers that 32-bit floats hold."""
    params = SamplingParams(
        temperature=0.75,
        top_k=40,
        top_p=0.875,
        min_p=0.0625,
        seed=2**64 - 1,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        logit_bias={7: -100.0, 8: 2.5},
        bad_words=("one", "two words"),
        bad_words_token_ids=((3,), (4, 5)),
        banned_token_ids=(6,),
        allowed_token_ids=(1, 2, 3),
    )
    assert SamplingParams.from_proto(params.to_proto()) == params


GOOD: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"top_k": 0},
    {"top_k": 2**32 - 1},
    {"top_p": 1e-6},
    {"min_p": 1.0},
    {"repetition_penalty": 100.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": {0: -100.0, 9: 100.0}},
    {"seed": 2**64 - 1},
    {"bad_words": ("x" * MAX_BAD_WORD_BYTES,) * MAX_BAD_WORDS},
    {"bad_words_token_ids": ((9,) * MAX_BAD_SEQUENCE_TOKENS,) * MAX_BAD_SEQUENCES},
    {"banned_token_ids": (9,) * MAX_BANNED_TOKENS},
    {"allowed_token_ids": (9,) * MAX_ALLOWED_TOKENS},
    {"allowed_token_ids": (1, 2), "banned_token_ids": (2,)},
]

BAD: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 100.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_k", {"top_k": -1}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": math.nan}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("min_p", {"min_p": math.nan}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": math.inf}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("presence_penalty", {"presence_penalty": math.nan}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("seed", {"seed": 2**64}),
    ("logit_bias[3]", {"logit_bias": {3: math.nan}}),
    ("logit_bias[3]", {"logit_bias": {3: 100.5}}),
    ("logit_bias", {"logit_bias": {10: 1.0}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 0.0)}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(10), -100.0)}),
    ("bad_words", {"bad_words": ("x",) * (MAX_BAD_WORDS + 1)}),
    ("bad_words[1]", {"bad_words": ("x", "")}),
    ("bad_words[0]", {"bad_words": ("é" * (MAX_BAD_WORD_BYTES // 2 + 1),)}),
    ("bad_words_token_ids", {"bad_words_token_ids": ((1, 2),) * (MAX_BAD_SEQUENCES + 1)}),
    ("bad_words_token_ids[1]", {"bad_words_token_ids": ((1,), ())}),
    ("bad_words_token_ids[0]", {"bad_words_token_ids": ((1,) * (MAX_BAD_SEQUENCE_TOKENS + 1),)}),
    ("bad_words_token_ids", {"bad_words_token_ids": ((1, 10),)}),
    ("banned_token_ids", {"banned_token_ids": (1,) * (MAX_BANNED_TOKENS + 1)}),
    ("banned_token_ids", {"banned_token_ids": (10,)}),
    ("banned_token_ids", {"banned_token_ids": tuple(range(9)), "bad_words_token_ids": ((9,),)}),
    ("allowed_token_ids", {"allowed_token_ids": (1,) * (MAX_ALLOWED_TOKENS + 1)}),
    ("allowed_token_ids", {"allowed_token_ids": (10,)}),
    ("allowed_token_ids", {"allowed_token_ids": (1, 2), "banned_token_ids": (1,), "logit_bias": {2: -100.0}}),
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_the_limits_themselves_are_accepted(fields: dict[str, Any]) -> None:
    """Closed ends of each range pass."""
    SamplingParams(**fields).validate(vocab_size=10)


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: str(value)[:60])
def test_a_value_out_of_range_names_its_field(field: str, fields: dict[str, Any]) -> None:
    """The error carries the field's path, the value and the limit; NaN passes nowhere."""
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**fields).validate(vocab_size=10)
    assert caught.value.field == f"sampling.{field}"
    assert caught.value.limit


def test_long_lists_are_refused_before_their_entries_are_read() -> None:
    """A message of many small entries is as much work as it has entries: their number is looked at first."""
    message = common_pb2.SamplingParams(bad_words_token_ids=[{}] * (MAX_BAD_SEQUENCES + 1))
    with pytest.raises(InvalidArgument, match="at most 256 entries"):
        SamplingParams.from_proto(message)
    message = common_pb2.SamplingParams(bad_words_token_ids=[{"ids": [1] * (MAX_BAD_SEQUENCE_TOKENS + 1)}])
    with pytest.raises(InvalidArgument, match="1 to 256 tokens"):
        SamplingParams.from_proto(message)
