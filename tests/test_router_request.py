"""Validation: every limit of generation.proto is refused with field, value and limit, before anything starts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from graftree.config import RouterConfig
from graftree.errors import AlreadyExists, InvalidArgument
from graftree.text.tokenizer import Tokenizer
from graftree.v1 import generation_pb2 as pb
from router import request as requests
from router.difference import refuse_another
from router.request import GenerationPlan, ModelLimits
from tests.fakes import CONTEXT, MODEL, VOCAB

TOKENIZER = Tokenizer.load("random:llama?vocab=512")
EOS = TOKENIZER.eos_token_ids


def message(**fields: Any) -> pb.GenerateRequest:
    if not {"prompt", "token_ids", "chat"} & fields.keys():
        fields["token_ids"] = {"ids": [1, 2, 3]}
    return pb.GenerateRequest(**fields)


def plan(request: pb.GenerateRequest, context: int = CONTEXT, **config: Any) -> GenerationPlan:
    settings = RouterConfig(model=MODEL, **config)
    requests.check(request, settings)
    return requests.plan(
        request,
        requests.tokenize(request, TOKENIZER),
        identifier=requests.request_id(request, Random(1)),
        eos_token_ids=EOS,
        limits=ModelLimits(VOCAB, context),
        config=settings,
        source=Random(2),
    )


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({"request_id": "abc"}, "request_id", "UUID"),
        ({"token_ids": {"ids": []}}, "token_ids.ids", "at least 1"),
        ({"prompt": ""}, "prompt", "at least 1"),
        ({"prompt": "x" * 101}, "prompt", "at most 100 bytes"),
        ({"chat": {}}, "chat.messages", "at least one"),
        ({"chat": {"messages": [{"role": "user"}] * 4097}}, "chat.messages", "at most 4096"),
        ({"chat": {"messages": [{"role": "user", "content": "é" * 60}]}}, "chat", "at most 100 bytes"),
        ({"token_ids": {"ids": [VOCAB]}}, "token_ids.ids", "below the vocabulary size 512"),
        ({"token_ids": {"ids": [1] * 256}}, "token_ids.ids", "256 tokens.*at most 255"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature", "0 to 100"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p", "above 0"),
        ({"sampling": {"logit_bias": {VOCAB: 1}}}, "sampling.logit_bias", "512"),
        ({"stopping": {"max_new_tokens": 0}}, "stopping.max_new_tokens", "at least 1"),
        ({"stopping": {"max_new_tokens": 3, "min_new_tokens": 4}}, "stopping.min_new_tokens", "max_new_tokens, 3"),
        ({"stopping": {"stop": ["x"] * 17}}, "stopping.stop", "at most 16"),
        ({"stopping": {"stop": ["a", ""]}}, r"stopping.stop\[1\]", "1 to 256 bytes"),
        ({"stopping": {"stop": ["é" * 129]}}, r"stopping.stop\[0\]", "1 to 256 bytes"),
        ({"stopping": {"stop_token_ids": [1] * 65}}, "stopping.stop_token_ids", "at most 64"),
        ({"stopping": {"stop_token_ids": [1, 600]}}, r"stopping.stop_token_ids\[1\]", "below the vocabulary"),
        ({"output": {"log_probs": True, "alternatives": 21}}, "output.alternatives", "at most 20"),
        ({"output": {"alternatives": 2}}, "output.alternatives", "0 without"),
        ({"speculation": {"mode": 77}}, "speculation.mode", "TARGET_ONLY"),
        ({"speculation": {"max_nodes": 1025}}, "speculation.max_nodes", "at most 1024"),
        ({"speculation": {"max_depth": 0}}, "speculation.max_depth", "1 to 128"),
    ],
)
def test_refused(fields: dict[str, Any], field: str, limit: str) -> None:
    """Each violation names the field, the value and the limit."""
    with pytest.raises(InvalidArgument, match=limit) as caught:
        plan(message(**fields), max_prompt_bytes=100)
    assert str(caught.value).startswith(field.replace("\\", ""))


def test_no_input() -> None:
    """A request without input is refused."""
    with pytest.raises(InvalidArgument, match="exactly one of"):
        plan(pb.GenerateRequest())


def test_defaults() -> None:
    """Unset fields take the documented defaults: greedy, the router's lengths and budget, the model's EOS."""
    made = plan(message(), default_max_new_tokens=7, tree_budget=5, tree_depth=3)
    assert made.sampling.greedy
    assert made.sampling.seed == Random(2).getrandbits(64)
    assert (made.stops.max_new_tokens, made.max_length) == (7, 10)
    assert (made.max_nodes, made.max_depth) == (5, 3)
    assert made.stops.stop_token_ids == frozenset(EOS)
    assert plan(message(stopping={"ignore_eos": True, "stop_token_ids": [4]})).stops.stop_token_ids == {4}
    assert plan(message(speculation={"off": True})).max_nodes == 0
    assert plan(message(speculation={"max_nodes": 0})).max_nodes == 0
    assert plan(message(stopping={"min_new_tokens": 9}), default_max_new_tokens=7).stops.max_new_tokens == 9
    assert plan(message(sampling={"seed": 5})).sampling.temperature == 1


@pytest.mark.parametrize("missing", [1, 2, 4])
def test_context_bounds_the_answer(missing: int) -> None:
    """A prompt that ends `missing` tokens before the context's end gets that many tokens, not an error."""
    made = plan(message(token_ids={"ids": [1] * (CONTEXT - missing)}))
    assert (made.stops.max_new_tokens, made.max_length) == (missing, CONTEXT)


def test_chat_and_text() -> None:
    """Chat goes through the model's template, text through its tokenizer; a template's refusal names the field."""
    chat = message(chat={"messages": [{"role": "user", "content": "hi"}]})
    assert plan(chat).prompt_token_ids == tuple(TOKENIZER.encode_chat([{"role": "user", "content": "hi"}]))
    assert plan(message(prompt="hi")).prompt_token_ids == tuple(TOKENIZER.encode("hi"))
    with pytest.raises(InvalidArgument, match="role"):
        plan(message(chat={"messages": [{"role": "nobody", "content": "hi"}]}))


def test_identity() -> None:
    """Ids are lower case, and drawn where none is given."""
    identifier = "6F9619FF-8B86-D011-B42D-00CF4FC964FF"
    assert plan(message(request_id=identifier)).request_id == identifier.lower()
    assert requests.request_id(message(), Random(1)) != requests.request_id(message(), Random(2))


def test_bad_words_are_tokenized_as_vllm_does() -> None:
    """Without leading spaces, and behind one where that is another word of as many tokens; each sequence once."""
    (spaced,) = TOKENIZER.encode(" e")
    request = message(sampling={"bad_words": ["e", "  e", "Q", "QZ"], "bad_words_token_ids": [{"ids": [81]}]})
    request.sampling.temperature = 0
    sequences = requests.bad_words(request, TOKENIZER)
    assert sequences == ((101,), (spaced,), (81,), (81, 90))
    made = requests.plan(
        request,
        (1, 2, 3),
        identifier=requests.request_id(request, Random(1)),
        eos_token_ids=EOS,
        limits=ModelLimits(VOCAB, CONTEXT),
        config=RouterConfig(model=MODEL),
        source=Random(2),
        bad_words=sequences,
    )
    assert made.sampling.bad_words == ()
    assert made.sampling.bad_words_token_ids == ((81,), (101,), (spaced,), (81, 90))
    assert requests.bad_words(message(), TOKENIZER) == ()


def test_samples_of_a_plan() -> None:
    """Sample i has seed + i modulo 2**64, and nothing else differs."""
    made = plan(message(n=3, sampling={"seed": 2**64 - 1}))
    assert made.samples == 3
    assert [made.sample(index).seed for index in range(3)] == [2**64 - 1, 0, 1]
    assert made.sample(0) == made


def test_padding_is_no_token_to_choose() -> None:
    """Where only ids are allowed that the tokenizer does not have, the request is refused at once."""
    request = message(sampling={"allowed_token_ids": [VOCAB - 1], "temperature": 0})
    with pytest.raises(InvalidArgument, match="at least one that is not banned"):
        requests.plan(
            request,
            (1, 2, 3),
            identifier=requests.request_id(request, Random(1)),
            eos_token_ids=EOS,
            limits=ModelLimits(VOCAB, CONTEXT, token_count=VOCAB - 1),
            config=RouterConfig(model=MODEL),
            source=Random(2),
        )


SAME = {"prompt": "hello", "sampling": {"temperature": 0.5}, "stopping": {"stop": ["a", "b"]}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": {"temperature": 0.25}}, r"sampling\.temperature = 0\.25, it began with 0\.5"),
        ({"sampling": {"temperature": 0.5, "seed": 1}}, r"sampling\.seed = 1, it began with unset"),
        ({"prompt": "another"}, "prompt = a text of 7 characters, it began with a text of 5 characters"),
        ({"stopping": {"stop": ["a"]}}, r"stopping\.stop = 1 values, it began with 2 values"),
        ({"output": {"log_probs": True}}, "output = set, it began with unset"),
        ({"n": 2}, "n = 2, it began with unset"),
    ],
)
def test_another_request_under_the_same_id(changes: dict[str, Any], words: str) -> None:
    """The first field that differs is named, never with a text of the request; ids and resume_after do not count."""
    began = pb.GenerateRequest(**SAME)
    refuse_another("r", began, pb.GenerateRequest(**SAME, request_id="r", resume_after=[3]))
    with pytest.raises(AlreadyExists, match=words):
        refuse_another("r", began, pb.GenerateRequest(**{**SAME, **changes}))
