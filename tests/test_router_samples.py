"""Several samples of one prompt: openings, events, records, failover, replay, cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from graftree.errors import AlreadyExists, InvalidArgument, ResourceExhausted
from graftree.rpc.status import to_failure
from graftree.store.sessions import SessionStore
from graftree.v1 import generation_pb2 as pb
from tests.fakes import FakeSpeculator, FakeVerifier, plain
from tests.router_harness import PROMPT, harness, until
from tests.store_redis import client

IDENTIFIER = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"
OPTIONS: dict[str, Any] = {"token_ids": PROMPT, "temperature": 1.0, "max_new_tokens": 8}


async def test_openings_events_and_usage() -> None:
    """Each sample opens on one verifier with the request's seed plus its index, and names the first as its sibling;
    the events carry the index."""
    verifier = FakeVerifier()
    async with harness(verifier, FakeSpeculator(), FakeVerifier("verifier-1")) as stack:
        seed = 2**64 - 2
        async with stack.client.stream(**OPTIONS, n=4, seed=seed) as stream:
            chunks = [chunk async for chunk in stream]
    result = stream.result
    openings = verifier.opened
    assert [opening.sampling.seed for opening in openings] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert [opening.prefix_of for opening in openings] == ["", *[openings[0].session_id] * 3]
    assert len({opening.salt for opening in openings}) == 4
    assert {chunk.index for chunk in chunks} == {0, 1, 2, 3}
    for sample in result.samples:
        assert list(sample.token_ids) == plain(PROMPT, 8)
        assert sample.seed == (seed + sample.index) % 2**64
        assert (sample.usage.prompt_tokens, sample.usage.completion_tokens) == (3, 8)
        assert next(chunk.offset for chunk in chunks if chunk.index == sample.index) == 0
    assert (result.total_usage.prompt_tokens, result.total_usage.completion_tokens) == (3, 32)


async def test_the_last_end_carries_the_total() -> None:
    """On the wire: one `started` that says how many, one `finished` a sample, the total in the last one alone."""
    async with harness(FakeVerifier()) as stack:
        stub = stack.client._stub(0)
        request = pb.GenerateRequest(token_ids={"ids": PROMPT}, sampling={"temperature": 1}, n=3)
        request.stopping.max_new_tokens = 5
        events = [event async for event in stub.Generate(request)]
    assert [event.started.n for event in events if event.HasField("started")] == [3]
    ends = [event.finished for event in events if event.HasField("finished")]
    assert sorted(end.index for end in ends) == [0, 1, 2]
    assert [end.HasField("total_usage") for end in ends] == [False, False, True]
    assert (ends[-1].total_usage.prompt_tokens, ends[-1].total_usage.completion_tokens) == (3, 15)
    assert events[-1].HasField("finished")


async def test_a_record_for_each_sample() -> None:
    """Redis holds one record per sample, under one hash tag, with the sample's own seed and tokens."""
    async with harness(FakeVerifier()) as stack, client("valkey") as redis:
        await stack.client.generate(**OPTIONS, n=3, seed=5, request_id=IDENTIFIER)
        store = SessionStore(redis, ttl_seconds=60)
        names = [IDENTIFIER, f"{IDENTIFIER}#1", f"{IDENTIFIER}#2"]
        records = [await store.load(name) for name in names]
        keys = [key.decode() async for key in redis.scan_iter(f"*{IDENTIFIER}*")]
    assert [record.seed for record in records if record] == [5, 6, 7]
    assert all(record is not None and record.finished for record in records)
    assert {record.token_ids for record in records if record} == {tuple(plain(PROMPT, 8))}
    assert len(keys) == 6
    assert all(f"{{s:{IDENTIFIER}}}" in key for key in keys)


async def test_attach_and_replay() -> None:
    """The same request under the same id gets all samples, while they run and after; another n is another request."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack:
        options = {**OPTIONS, "n": 3, "request_id": IDENTIFIER}
        verifier.holding = True
        first = asyncio.create_task(stack.client.generate(**options))
        await verifier.until(lambda: len(verifier.held) == 3)
        second = asyncio.create_task(stack.client.generate(**options))
        await until(lambda: stack.metrics.attached == 1)
        with pytest.raises(AlreadyExists):
            await stack.client.generate(**{**options, "n": 2})
        verifier.holding = False
        verifier.release()
        results = [await first, await second, await stack.client.generate(**options)]
    assert results[0] == results[1] == results[2]
    assert len(results[0].samples) == 3
    assert len(verifier.opened) == 3


async def test_a_cancelled_request_is_taken_up_again() -> None:
    """Every sample goes on under its record's seed, with none given too; tokens are those of one undisturbed run."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack:
        options = {**OPTIONS, "n": 3, "request_id": IDENTIFIER}
        verifier.holding = True
        task = asyncio.create_task(stack.client.generate(**options))
        await verifier.until(lambda: len(verifier.held) == 3)
        seeds = [opening.sampling.seed for opening in verifier.opened]
        task.cancel()
        await verifier.until(lambda: len(verifier.closed) == 3)
        verifier.holding = False
        verifier.held.clear()
        result = await stack.client.generate(**options)
        assert stack.metrics.resumed == 3
    assert [opening.sampling.seed for opening in verifier.opened[3:]] == seeds
    assert [sample.seed for sample in result.samples] == seeds
    assert all(list(sample.token_ids) == plain(PROMPT, 8) for sample in result.samples)


async def test_a_sample_reopens_alone() -> None:
    """One that its verifier fails opens again without a sibling; the others do not notice."""
    verifier = FakeVerifier()
    failed: list[str] = []

    def script(step: Any, verdict: Any) -> Any:
        if step.session_id.startswith(f"{IDENTIFIER}#1") and step.step == 3 and not failed:
            failed.append(step.session_id)
            return to_failure(step.session_id, ResourceExhausted("no blocks"))
        return verdict

    verifier.script = script
    async with harness(verifier) as stack:
        result = await stack.client.generate(**OPTIONS, n=3, request_id=IDENTIFIER)
        assert stack.metrics.failovers == 1
    assert failed
    assert all(list(sample.token_ids) == plain(PROMPT, 8) for sample in result.samples)
    assert [bool(opening.prefix_of) for opening in verifier.opened] == [False, True, True, False]
    assert verifier.opened[3].sampling.seed == verifier.opened[1].sampling.seed
    assert len(verifier.opened[3].token_ids) == len(PROMPT) + 2


async def test_all_samples_survive_their_verifier() -> None:
    """The verifier dies mid-run: each sample goes on elsewhere, at its own next token."""
    first = FakeVerifier()
    async with harness(first) as stack:
        first.holding = True
        task = asyncio.create_task(stack.client.generate(**OPTIONS, n=3))
        await first.until(lambda: len(first.held) == 3)
        first.release()
        await first.until(lambda: len(first.held) == 3)
        second = FakeVerifier("verifier-1")
        await stack.add(second)
        await stack.remove(first)
        result = await task
        await second.stop()
    assert all(list(sample.token_ids) == plain(PROMPT, 8) for sample in result.samples)
    assert len(second.opened) == 3


async def test_an_error_ends_all_samples() -> None:
    """What one sample cannot survive is the request's error, and no session stays on the verifier."""
    verifier = FakeVerifier()

    def script(step: Any, verdict: Any) -> Any:
        if "#2" in step.session_id:
            return to_failure(step.session_id, InvalidArgument("sampling", "no token is left", "options"))
        return verdict

    verifier.script = script
    async with harness(verifier) as stack:
        with pytest.raises(InvalidArgument):
            await stack.client.generate(**{**OPTIONS, "max_new_tokens": 200}, n=3)
        await verifier.until(lambda: not verifier.sessions)


async def test_cancelling_leaves_no_session() -> None:
    """The client leaves: every sample's session is closed on every pod."""
    verifier, speculator = FakeVerifier(), FakeSpeculator()
    async with harness(verifier, speculator) as stack:
        verifier.holding = True
        task = asyncio.create_task(stack.client.generate(**OPTIONS, n=4))
        await verifier.until(lambda: len(verifier.held) == 4)
        task.cancel()
        await verifier.until(lambda: not verifier.sessions)
        await speculator.until(lambda: not speculator.sessions)
        await until(lambda: stack.metrics.cancelled == 1)
