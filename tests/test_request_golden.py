"""Every request that is refused: which status, which reason, which field, what was given, what would have been right.

The table is the contract with clients. Each row goes through the real service; what is refused has reached no pod and
no record in Redis.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from graftree.rpc.status import DETAILS_KEY
from graftree.v1 import generation_pb2 as pb
from graftree.v1 import generation_pb2_grpc
from tests.fakes import CONTEXT, FakeVerifier
from tests.router_harness import Harness, harness
from tests.store_redis import client

INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
IDS = {"token_ids": {"ids": [1, 2, 3]}}
HOT = {"temperature": 1.0}
NAN, INFINITE = float("nan"), float("inf")


def sampling(**fields: Any) -> dict[str, Any]:
    return {**IDS, "sampling": fields}


def stopping(**fields: Any) -> dict[str, Any]:
    return {**IDS, "stopping": fields}


def output(**fields: Any) -> dict[str, Any]:
    return {**IDS, "output": fields}


def speculation(**fields: Any) -> dict[str, Any]:
    return {**IDS, "speculation": fields}


def structured(**fields: Any) -> dict[str, Any]:
    return {**IDS, "structured_output": fields}


# request                                         field                      value                  limit
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    # What to continue.
    ({}, "input", "''", "exactly one of prompt, token_ids and chat"),
    ({"prompt": ""}, "prompt", "'0 tokens'", "at least 1 token"),
    ({"prompt": "x" * 1001}, "prompt", "1001", "at most 1000 bytes of text"),
    ({"token_ids": {}}, "token_ids.ids", "'0 tokens'", "at least 1 token"),
    ({"token_ids": {"ids": [1, 512]}}, "token_ids.ids", "512", "token ids below the vocabulary size 512"),
    (
        {"token_ids": {"ids": [1] * CONTEXT}},
        "token_ids.ids",
        "'256 tokens'",
        "at most 255 tokens: the model's context holds 256",
    ),
    ({"prompt": "x" * 300}, "prompt", "'300 tokens'", "at most 255 tokens: the model's context holds 256"),
    ({"chat": {}}, "chat.messages", "0", "at least one message"),
    (
        {"chat": {"messages": [{"role": "user", "content": "é" * 500}]}},
        "chat",
        "1004",
        "at most 1000 bytes of text",
    ),
    (
        {"chat": {"messages": [{"role": "nobody", "content": "secret"}]}},
        "chat.messages",
        "['nobody']",
        "messages that the model's template takes: unknown role nobody",
    ),
    ({**IDS, "request_id": "abc"}, "request_id", "'abc'", "a UUID, or empty"),
    # How tokens are chosen.
    (sampling(temperature=-0.5), "sampling.temperature", "-0.5", "a number from 0 to 100"),
    (sampling(temperature=101), "sampling.temperature", "101.0", "a number from 0 to 100"),
    (sampling(temperature=NAN), "sampling.temperature", "nan", "a number from 0 to 100"),
    (sampling(top_p=0), "sampling.top_p", "0.0", "a number above 0, at most 1"),
    (sampling(top_p=1.5), "sampling.top_p", "1.5", "a number above 0, at most 1"),
    (sampling(min_p=-0.5), "sampling.min_p", "-0.5", "a number from 0 to 1"),
    (sampling(min_p=1.5), "sampling.min_p", "1.5", "a number from 0 to 1"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", "0.0", "a number above 0, at most 100"),
    (sampling(repetition_penalty=INFINITE), "sampling.repetition_penalty", "inf", "a number above 0, at most 100"),
    (sampling(presence_penalty=2.5), "sampling.presence_penalty", "2.5", "a number from -2 to 2"),
    (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty", "-2.5", "a number from -2 to 2"),
    (sampling(logit_bias={3: 100.5}), "sampling.logit_bias[3]", "100.5", "a number from -100 to 100"),
    (sampling(logit_bias={512: 1}), "sampling.logit_bias", "512", "token ids below the vocabulary size 512"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 0)), "sampling.logit_bias", "1025", "at most 1024 entries"),
    (
        sampling(logit_bias=dict.fromkeys(range(512), -100)),
        "sampling.logit_bias",
        "512",
        "leaves at least one token",
    ),
    (sampling(bad_words=["x"] * 129), "sampling.bad_words", "129", "at most 128 entries"),
    (sampling(bad_words=["x", ""]), "sampling.bad_words[1]", "0", "1 to 256 bytes"),
    (sampling(bad_words=["é" * 129]), "sampling.bad_words[0]", "258", "1 to 256 bytes"),
    (sampling(bad_words=["x", " "]), "sampling.bad_words[1]", "'0 tokens'", "a text of at least one token"),
    (
        sampling(bad_words=["Q"], bad_words_token_ids=[{"ids": [i, i]} for i in range(256)]),
        "sampling.bad_words",
        "'257 token sequences'",
        "at most 256 with bad_words_token_ids",
    ),
    (
        sampling(bad_words_token_ids=[{"ids": [1]}] * 257),
        "sampling.bad_words_token_ids",
        "257",
        "at most 256 entries",
    ),
    (
        sampling(bad_words_token_ids=[{"ids": [1]}, {}]),
        "sampling.bad_words_token_ids[1]",
        "0",
        "1 to 256 tokens",
    ),
    (
        sampling(bad_words_token_ids=[{"ids": [1] * 257}]),
        "sampling.bad_words_token_ids[0]",
        "257",
        "1 to 256 tokens",
    ),
    (
        sampling(bad_words_token_ids=[{"ids": [1, 512]}]),
        "sampling.bad_words_token_ids",
        "512",
        "token ids below the vocabulary size 512",
    ),
    (sampling(banned_token_ids=[1] * 1025), "sampling.banned_token_ids", "1025", "at most 1024 entries"),
    (sampling(banned_token_ids=[512]), "sampling.banned_token_ids", "512", "token ids below the vocabulary size 512"),
    (
        sampling(banned_token_ids=range(512)),
        "sampling.banned_token_ids",
        "512",
        "leaves at least one token",
    ),
    (sampling(allowed_token_ids=[1] * 65537), "sampling.allowed_token_ids", "65537", "at most 65536 entries"),
    (
        sampling(allowed_token_ids=[512]),
        "sampling.allowed_token_ids",
        "512",
        "token ids below the vocabulary size 512",
    ),
    (
        sampling(allowed_token_ids=[5, 6], banned_token_ids=[5], logit_bias={6: -100}),
        "sampling.allowed_token_ids",
        "2",
        "at least one that is not banned",
    ),
    # When to stop.
    (stopping(max_new_tokens=0), "stopping.max_new_tokens", "0", "at least 1"),
    (stopping(max_new_tokens=3, min_new_tokens=4), "stopping.min_new_tokens", "4", "at most max_new_tokens, 3"),
    (
        stopping(min_new_tokens=254),
        "stopping.min_new_tokens",
        "254",
        "at most 253: the model's context holds 256 tokens, 3 of them the prompt's",
    ),
    (
        {**stopping(min_new_tokens=1, stop_token_ids=[5, 6]), "sampling": {"allowed_token_ids": [5, 6]}},
        "stopping.min_new_tokens",
        "1",
        "0: only tokens that end the answer can be chosen",
    ),
    (stopping(stop=["x"] * 17), "stopping.stop", "17", "at most 16 strings"),
    (stopping(stop=["a", ""]), "stopping.stop[1]", "0", "1 to 256 bytes"),
    (stopping(stop=["é" * 129]), "stopping.stop[0]", "258", "1 to 256 bytes"),
    (stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids", "65", "at most 64 tokens"),
    (stopping(stop_token_ids=[1, 512]), "stopping.stop_token_ids[1]", "512", "below the vocabulary size 512"),
    # What to send back.
    (output(alternatives=2), "output.alternatives", "2", "0 without output.log_probs"),
    (output(alternatives=21, log_probs=True), "output.alternatives", "21", "at most 20"),
    (output(log_probs_mode=2), "output.log_probs_mode", "2", "unset without output.log_probs"),
    (
        output(log_probs_mode=3, log_probs=True),
        "output.log_probs_mode",
        "3",
        "one of LOG_PROBS_MODE_RAW, LOG_PROBS_MODE_PROCESSED",
    ),
    ({**IDS, "n": 0}, "n", "0", "1 to 16 samples"),
    ({**IDS, "n": 17, "sampling": HOT}, "n", "17", "1 to 16 samples"),
    ({**IDS, "priority": 101}, "priority", "101", "-100 to 100"),
    ({**IDS, "priority": -101}, "priority", "-101", "-100 to 100"),
    ({**IDS, "n": 2}, "n", "2", "1 at sampling.temperature 0: greedy samples are all the same"),
    (
        {**IDS, "n": 2, "sampling": {"temperature": 0}},
        "n",
        "2",
        "1 at sampling.temperature 0: greedy samples are all the same",
    ),
    # How to speculate.
    (
        speculation(mode=5),
        "speculation.mode",
        "5",
        "one of SPECULATION_MODE_TARGET_ONLY, SPECULATION_MODE_MSS, SPECULATION_MODE_MSS_WITHOUT_REPLACEMENT, "
        "SPECULATION_MODE_NAIVE",
    ),
    (speculation(max_nodes=1025), "speculation.max_nodes", "1025", "at most 1024"),
    (speculation(max_nodes=4, off=True), "speculation.max_nodes", "4", "0 or unset with speculation.off"),
    (speculation(max_depth=0), "speculation.max_depth", "0", "1 to 128"),
    (speculation(max_depth=129), "speculation.max_depth", "129", "1 to 128"),
    # What the output must look like.
    (
        structured(),
        "structured_output",
        "'none'",
        "one of json_schema, json_object, regex, grammar and choice",
    ),
    (structured(json_object=False), "structured_output.json_object", "False", "true, or unset"),
    (structured(regex=""), "structured_output.regex", "'0 bytes'", "1 to 65536 bytes"),
    (structured(regex="x" * 65537), "structured_output.regex", "'65537 bytes'", "1 to 65536 bytes"),
    (structured(choice={}), "structured_output.choice.options", "0", "1 to 1024 texts"),
    (
        structured(regex="a", disable_any_whitespace=True),
        "structured_output.disable_any_whitespace",
        "True",
        "false without json_schema or json_object",
    ),
    (
        {**structured(regex="a"), "stopping": {"stop_token_ids": [65]}},
        "stopping.stop_token_ids",
        "'no token to end with'",
        "at least one: structured output ends with an end-of-sequence token, or a stop token without text",
    ),
]


async def refusal(stack: Harness, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, dict[str, Any]]:
    """Status and rich details that a request is refused with."""
    async with grpc.aio.insecure_channel(stack.client.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request):
                pass
    status = next(value for key, value in caught.value.trailing_metadata() or () if key == DETAILS_KEY)
    details: dict[str, Any] = {}
    for packed in status_pb2.Status.FromString(status).details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                details[kind.__name__] = kind.FromString(packed.value)
    return caught.value.code(), details


async def test_golden_table() -> None:
    """Row by row: INVALID_ARGUMENT, and BadRequest and ErrorInfo name field, value and limit; nothing was queued."""
    verifier = FakeVerifier()
    async with harness(verifier, max_prompt_bytes=1000) as stack, client("valkey") as redis:
        before = {key async for key in redis.scan_iter("graftree:v1:{s:*")}
        for fields, field, value, limit in REFUSED:
            code, details = await refusal(stack, pb.GenerateRequest(**fields))
            info = details["ErrorInfo"]
            assert (code, info.reason) == INVALID, field
            assert (info.metadata["field"], info.metadata["value"], info.metadata["limit"]) == (field, value, limit)
            (violation,) = details["BadRequest"].field_violations
            assert (violation.field, violation.description) == (field, f"got {value}; {limit}")
            assert "RetryInfo" not in details
        assert {key async for key in redis.scan_iter("graftree:v1:{s:*")} == before
        assert not len(stack.router.generations)
    assert not verifier.opened


async def test_the_limits_themselves_are_accepted() -> None:
    """The last value of each range that is still allowed, all at once."""
    async with harness(FakeVerifier(), max_prompt_bytes=1000) as stack:
        request = pb.GenerateRequest(
            token_ids={"ids": [1] * 200},
            sampling={
                "temperature": 100,
                "top_k": 2**32 - 1,
                "top_p": 1,
                "min_p": 1,
                "seed": 2**64 - 1,
                "repetition_penalty": 100,
                "presence_penalty": 2,
                "frequency_penalty": -2,
                "logit_bias": dict.fromkeys(range(256), 100),
                "bad_words": ["x" * 256] * 128,
                "bad_words_token_ids": [{"ids": [7] * 256}] * 255,
                "banned_token_ids": [1] * 1024,
                "allowed_token_ids": range(512),
            },
            stopping={
                "max_new_tokens": 56,
                "min_new_tokens": 56,
                "stop": ["x" * 256] * 16,
                "stop_token_ids": [5] * 64,
            },
            output={"log_probs": True, "alternatives": 20, "log_probs_mode": 2},
            speculation={"mode": 4, "max_nodes": 1024, "max_depth": 128},
            n=16,
            priority=100,
        )
        events = [event async for event in stack.client._stub(0).Generate(request)]
    assert sum(event.HasField("finished") for event in events) == 16
    assert events[-1].finished.total_usage.completion_tokens == 16 * 56


IDENTIFIER = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"


@pytest.mark.parametrize(
    ("situation", "code", "reason", "retry"),
    [
        ("id in use for another n", grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS", False),
        ("max_requests under way", grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED", True),
        ("router going away", grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", True),
        ("verifiers gone", grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER", True),
    ],
)
async def test_refused_for_what_is_going_on(situation: str, code: grpc.StatusCode, reason: str, retry: bool) -> None:
    """Good requests at a bad time: status, reason, and whether to try again."""
    verifier = FakeVerifier()
    async with harness(verifier, max_requests=1, connect_timeout_seconds=0.3) as stack:
        request = pb.GenerateRequest(**IDS, stopping={"max_new_tokens": 5}, sampling=HOT)
        if situation == "id in use for another n":
            await stack.client.generate(token_ids=[1, 2, 3], max_new_tokens=5, request_id=IDENTIFIER, temperature=1.0)
            request.request_id, request.n = IDENTIFIER, 2
        elif situation == "max_requests under way":
            verifier.holding = True
            running = asyncio.create_task(stack.client.generate(token_ids=[1, 2, 3]))
            await verifier.until(lambda: bool(verifier.held))
        elif situation == "router going away":
            stack.router.generations.draining = True
        else:
            await stack.remove(verifier)
        got, details = await refusal(stack, request)
        if situation == "max_requests under way":
            running.cancel()
    assert (got, details["ErrorInfo"].reason, "RetryInfo" in details) == (code, reason, retry)
    assert "BadRequest" not in details
