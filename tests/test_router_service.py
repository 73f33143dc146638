"""The public service: stops, log probabilities, joining and replay, cancellation, admission, Redis, drain."""

from __future__ import annotations

import asyncio
import uuid
from random import Random

import grpc
import pytest

from graftree.errors import AlreadyExists, InvalidArgument, ResourceExhausted, Unavailable
from graftree.sdk.options import SpeculationOptions
from graftree.store.embedded import EmbeddedRedis
from graftree.store.sessions import SessionStore
from graftree.text.tokenizer import Tokenizer
from graftree.v1 import generation_pb2 as pb
from graftree.v1 import generation_pb2_grpc
from graftree.v1.verification_pb2 import Verdict, VerifyStep
from tests.fakes import CONTEXT, MODEL, FakeSpeculator, FakeVerifier, chain, plain
from tests.router_harness import PROMPT, harness, until

TOKENIZER = Tokenizer.load(MODEL)
IDENTIFIER = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"


@pytest.mark.parametrize("depth", range(8))
async def test_stop_token_at_every_depth_of_a_run(depth: int) -> None:
    """A token declared the end is the last one, wherever in a run it falls; usage and figures end with it."""
    reference = plain(PROMPT, 8)
    async with harness(FakeVerifier(), FakeSpeculator()) as stack:
        options = {"token_ids": PROMPT, "max_new_tokens": 30, "stop_token_ids": [reference[depth]], "log_probs": True}
        fast = await stack.client.generate(**options)
        slow = await stack.client.generate(**options, speculation=SpeculationOptions(off=True))
    assert list(fast.token_ids) == reference[: depth + 1]
    assert fast.text == slow.text
    assert fast.finish_reason == slow.finish_reason == "stop"
    assert fast.stop_token_id == reference[depth]
    assert fast.usage.completion_tokens == len(fast.log_probs) == depth + 1
    assert slow.token_ids == fast.token_ids
    assert slow.speculation.num_draft_tokens == 0
    figures = fast.speculation
    assert figures.mean_acceptance_length * figures.num_spec_steps == pytest.approx(depth + 1)
    assert sum(k * n for k, n in enumerate(figures.acceptance_histogram)) == figures.num_accepted_tokens <= depth + 1


@pytest.mark.parametrize("limit", range(1, 10))
async def test_exact_length(limit: int) -> None:
    """max_new_tokens 1 to 9 with trees of depth 4: exactly that many tokens, and usage says so."""
    async with harness(FakeVerifier(), FakeSpeculator()) as stack:
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=limit)
    assert list(result.token_ids) == plain(PROMPT, limit)
    assert (result.usage.completion_tokens, result.finish_reason) == (limit, "length")


async def test_stop_string_within_a_run() -> None:
    """Text ends before the stop string, ids with the token that completed it, and plain decoding agrees."""
    reference = plain(PROMPT, 12)
    text = TOKENIZER.decode(reference)
    stop = next(text[at : at + 3] for at in range(4, len(text)) if "\ufffd" not in text[at : at + 3])
    async with harness(FakeVerifier(), FakeSpeculator()) as stack:
        options = {"token_ids": PROMPT, "max_new_tokens": 12, "stop": [stop]}
        fast = await stack.client.generate(**options)
        slow = await stack.client.generate(**options, speculation=SpeculationOptions(off=True))
    assert (fast.text, fast.token_ids, fast.usage) == (slow.text, slow.token_ids, slow.usage)
    assert fast.stop_string == stop
    assert fast.text == text[: text.index(stop)]
    assert stop in TOKENIZER.decode(list(fast.token_ids))
    assert stop not in TOKENIZER.decode(list(fast.token_ids[:-1]))


@pytest.mark.parametrize("missing", range(1, 7))
async def test_context_limit(missing: int) -> None:
    """Prompts that end 1 to 6 tokens before the context's end finish with reason length and no error."""
    prompt = [7] * (CONTEXT - missing)
    verifier, speculator = FakeVerifier(), FakeSpeculator(draft=chain(6))
    async with harness(verifier, speculator) as stack:
        result = await stack.client.generate(token_ids=prompt, max_new_tokens=50)
    assert list(result.token_ids) == plain(prompt, missing)
    assert result.finish_reason == "length"
    assert all(step.committed_length + len(step.tree.token_ids) < CONTEXT for step in verifier.steps)


async def test_what_the_verifier_is_told() -> None:
    """Sampling with its seed, stops, minimum, limits and log probabilities travel in the opening."""
    verifier = FakeVerifier()
    async with harness(verifier, random=Random(3)) as stack:
        results = [
            await stack.client.generate(
                token_ids=PROMPT,
                max_new_tokens=6,
                min_new_tokens=2,
                temperature=0.5,
                stop_token_ids=[5],
                log_probs=True,
                alternatives=2,
                speculation=SpeculationOptions(max_nodes=9, max_depth=2),
                seed=seed,
            )
            for seed in (None, None, 11)
        ]
    first, second, third = verifier.opened
    assert first.sampling.seed == results[0].seed
    assert len({first.sampling.seed, second.sampling.seed, 11}) == 3
    assert third.sampling.seed == results[2].seed == 11
    assert (first.sampling.temperature, first.min_new_tokens, list(first.stop_token_ids)) == (0.5, 2, [5])
    assert (first.max_length, first.max_nodes, first.log_probs, first.alternatives) == (9, 9, True, 2)


async def test_tree_budget_and_depth_of_a_request() -> None:
    """max_nodes and max_depth bound every step's tree."""
    verifier, speculator = FakeVerifier(), FakeSpeculator(draft=chain(4))
    async with harness(verifier, speculator) as stack:
        for options, most in [({"max_nodes": 2}, 2), ({"max_depth": 1}, 1), ({"max_nodes": 0}, 0)]:
            verifier.steps.clear()
            result = await stack.client.generate(
                token_ids=PROMPT, max_new_tokens=20, speculation=SpeculationOptions(**options)
            )
            assert list(result.token_ids) == plain(PROMPT, 20)
            assert max(len(step.tree.token_ids) for step in verifier.steps) == most
    assert len(speculator.opened) == 2


async def test_errors_name_the_field() -> None:
    """A refused request carries BadRequest, and reaches no pod."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack:
        with pytest.raises(InvalidArgument, match=r"257 tokens.*255.*256") as caught:
            await stack.client.generate(token_ids=[1] * 257)
        assert caught.value.field == "token_ids.ids"
        with pytest.raises(InvalidArgument, match="at most 1024") as caught:
            await stack.client.generate(token_ids=PROMPT, speculation=SpeculationOptions(max_nodes=1025))
        assert caught.value.field == "speculation.max_nodes"
    assert not verifier.opened


async def test_repeated_id_joins_and_replays() -> None:
    """The same request under the same id gets the same events, while it runs and after; another one is refused."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack:
        options = {"token_ids": PROMPT, "max_new_tokens": 8, "request_id": IDENTIFIER, "temperature": 1.0}
        verifier.holding = True
        first = asyncio.create_task(stack.client.generate(**options))
        await verifier.until(lambda: len(verifier.held) == 1)
        second = asyncio.create_task(stack.client.generate(**options))
        await until(lambda: stack.metrics.attached == 1)
        with pytest.raises(AlreadyExists):
            await stack.client.generate(**{**options, "max_new_tokens": 9})
        verifier.holding = False
        verifier.release()
        results = [await first, await second, await stack.client.generate(**options)]
        assert results[0] == results[1] == results[2]
        assert list(results[0].token_ids) == plain(PROMPT, 8)
        assert len(verifier.opened) == 1
        with pytest.raises(AlreadyExists):
            await stack.client.generate(**{**options, "seed": 4})


async def test_replay_can_be_off() -> None:
    """With replay_seconds 0 a router keeps nothing; for a moment a repeated id is told again from its record."""
    verifier = FakeVerifier()
    async with harness(verifier, replay_seconds=0) as stack:
        options = {"token_ids": PROMPT, "max_new_tokens": 8, "request_id": IDENTIFIER, "temperature": 1.0}
        one = await stack.client.generate(**options)
        other = await stack.client.generate(**options)
        assert (one.token_ids, one.seed, one.text) == (other.token_ids, other.seed, other.text)
        assert len(verifier.opened) == 1
        assert (stack.metrics.attached, stack.metrics.resumed) == (0, 1)
        assert 0 < await stack.router.redis.pttl(f"graftree:v1:{{s:{IDENTIFIER}}}:record") <= 1000


@pytest.mark.parametrize("moment", ["before the first token", "mid run"])
async def test_cancel_reaches_every_pod(moment: str) -> None:
    """When the client leaves, verifier and speculator are told at once, during a verify step too."""
    verifier, speculator = FakeVerifier(), FakeSpeculator()
    async with harness(verifier, speculator) as stack:
        verifier.holding = moment == "before the first token"
        stream = stack.client.stream(token_ids=PROMPT, max_new_tokens=200)
        reading = asyncio.create_task(anext(aiter(stream)))
        if moment == "mid run":
            await reading
            verifier.holding = True
        await verifier.until(lambda: len(verifier.held) == 1)
        stream.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await verifier.until(lambda: len(verifier.closed) == 1)
        await speculator.until(lambda: len(speculator.closed) == 1)
        assert not verifier.sessions
        assert not speculator.sessions
        assert len(stack.router.generations) == 0
        assert stack.metrics.cancelled == 1


async def test_cancelled_generation_can_be_taken_up_again() -> None:
    """A request repeated after its client left continues the record: the same seed, the same tokens."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack:
        options = {"token_ids": PROMPT, "max_new_tokens": 30, "request_id": IDENTIFIER, "temperature": 1.0}
        async with stack.client.stream(**options) as stream:
            await anext(aiter(stream))
        await verifier.until(lambda: len(verifier.closed) == 1)
        result = await stack.client.generate(**options)
        assert list(result.token_ids) == plain(PROMPT, 30)
        assert result.seed == verifier.opened[0].sampling.seed
        assert verifier.opened[1].epoch == 2
        record = await SessionStore(stack.router.redis, ttl_seconds=60).load(IDENTIFIER)
        assert record is not None
        assert (record.token_ids, record.finished) == (result.token_ids, True)


async def test_cancel_and_repeat_at_once() -> None:
    """Cancelling and repeating a request over and over, without a pause, ends in the right answer."""
    verifier = FakeVerifier()
    async with harness(verifier, FakeSpeculator()) as stack:
        options = {"token_ids": PROMPT, "max_new_tokens": 60, "request_id": IDENTIFIER}
        for _ in range(8):
            async with stack.client.stream(**options) as stream:
                await anext(aiter(stream))
        result = await stack.client.generate(**options)
        assert list(result.token_ids) == plain(PROMPT, 60)
        await verifier.until(lambda: not verifier.sessions)
        assert stack.metrics.commit_failures == 0


async def test_one_reader_leaving_cancels_nothing() -> None:
    """A generation goes on while any stream reads it."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack:
        options = {"token_ids": PROMPT, "max_new_tokens": 8, "request_id": IDENTIFIER}
        verifier.holding = True
        staying = asyncio.create_task(stack.client.generate(**options))
        await verifier.until(lambda: len(verifier.held) == 1)
        leaving = asyncio.create_task(stack.client.generate(**options))
        await until(lambda: stack.metrics.attached == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        verifier.holding = False
        verifier.release()
        assert list((await staying).token_ids) == plain(PROMPT, 8)


async def test_cancel_while_the_verifier_is_gone() -> None:
    """A session without a verifier can be cancelled like any other."""
    verifier = FakeVerifier()
    async with harness(verifier, connect_timeout_seconds=60) as stack:
        verifier.holding = True
        stream = stack.client.stream(token_ids=PROMPT, max_new_tokens=8)
        reading = asyncio.create_task(anext(aiter(stream)))
        await verifier.until(lambda: len(verifier.held) == 1)
        await stack.remove(verifier)
        stream.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: not len(stack.router.generations))
        assert stack.metrics.cancelled == 1


async def test_admission() -> None:
    """One request more than max_requests is refused with RetryInfo; there is room again afterwards."""
    verifier = FakeVerifier()
    async with harness(verifier, max_requests=2) as stack:
        verifier.holding = True
        running = [asyncio.create_task(stack.client.generate(token_ids=PROMPT, max_new_tokens=3)) for _ in range(2)]
        await verifier.until(lambda: len(verifier.held) == 2)
        with pytest.raises(ResourceExhausted) as caught:
            await stack.client.generate(token_ids=PROMPT, max_new_tokens=3)
        assert caught.value.retry_after_s > 0
        verifier.holding = False
        verifier.release()
        await asyncio.gather(*running)
        await stack.client.generate(token_ids=PROMPT, max_new_tokens=3)


async def test_tokens_reach_the_client_behind_their_commit() -> None:
    """Whatever chunk a client has seen is in the record already."""
    async with harness(FakeVerifier(), FakeSpeculator()) as stack:
        store = SessionStore(stack.router.redis, ttl_seconds=60)
        seen: list[int] = []
        async with stack.client.stream(token_ids=PROMPT, max_new_tokens=40, request_id=IDENTIFIER) as stream:
            async for chunk in stream:
                seen += chunk.token_ids
                record = await store.load(IDENTIFIER)
                assert record is not None
                assert list(record.token_ids[: len(seen)]) == seen
        assert list(record.token_ids) == plain(PROMPT, 40)


async def test_redis_away() -> None:
    """Redis gone in mid request: that request and new ones go on with the pods that are known."""
    verifier = FakeVerifier()
    with EmbeddedRedis() as redis:
        async with harness(verifier, FakeSpeculator(), redis=redis) as stack:

            def stop(step: VerifyStep, verdict: Verdict) -> Verdict:
                if redis.running and step.step == 5:
                    redis.stop()
                return verdict

            verifier.script = stop
            for _ in range(2):
                result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=40)
                assert list(result.token_ids) == plain(PROMPT, 40)


async def test_drain() -> None:
    """A draining router finishes what runs and takes nothing new."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack:
        verifier.holding = True
        running = asyncio.create_task(stack.client.generate(token_ids=PROMPT, max_new_tokens=3))
        await verifier.until(lambda: len(verifier.held) == 1)
        stopping = asyncio.create_task(stack.router.stop(drain_seconds=30))
        await until(lambda: stack.router.generations.draining)
        with pytest.raises(Unavailable, match="going away"):
            await stack.client.generate(token_ids=PROMPT, max_new_tokens=3)
        verifier.holding = False
        verifier.release()
        assert list((await running).token_ids) == plain(PROMPT, 3)
        await stopping


async def test_model_info() -> None:
    """GetModelInfo tells the verifiers' limits and the pods' states."""
    async with harness(FakeVerifier(), FakeSpeculator()) as stack:
        info = await stack.client.model_info()
    assert (info.model, info.model_fingerprint, info.vocab_size, info.max_context) == (MODEL, "m", 512, CONTEXT)
    assert [(pod.pod_id, pod.tier, pod.kind, pod.state) for pod in info.pods] == [
        ("speculator-0", "speculator", "chain", "ready"),
        ("verifier-0", "verifier", "fake", "ready"),
    ]


async def test_unread_streams_do_not_stop_others() -> None:
    """A client that does not read costs the others nothing."""
    async with harness(FakeVerifier()) as stack, grpc.aio.insecure_channel(stack.router.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = pb.GenerateRequest(token_ids={"ids": PROMPT}, stopping={"max_new_tokens": 200})
        request.request_id = str(uuid.UUID(int=1))
        unread = stub.Generate(request)
        await unread.read()
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=100)
        assert list(result.token_ids) == plain(PROMPT, 100)
        unread.cancel()


async def test_waits_for_a_draft_only_where_one_is_due() -> None:
    """Not adaptive, a step with an empty tree waits if a speculator was seen to answer in time, and then gains."""
    verifier, prompt_one = FakeVerifier(), FakeSpeculator(draft=chain(1))
    async with harness(verifier, prompt_one, adaptive=False, draft_wait_ms=1000) as stack:
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=40)
        assert list(result.token_ids) == plain(PROMPT, 40)
        assert stack.metrics.draft_waits == stack.metrics.draft_wins > 0
        assert result.speculation.mean_acceptance_length > 1.5
    mute = FakeSpeculator(draft=lambda _: [])
    async with harness(FakeVerifier(), mute, adaptive=False, draft_wait_ms=1000) as stack:
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=40)
        assert list(result.token_ids) == plain(PROMPT, 40)
    silent = FakeSpeculator()
    silent.script = lambda delta: None
    async with harness(FakeVerifier(), silent, adaptive=False, draft_wait_ms=1000) as stack:
        await stack.client.generate(token_ids=PROMPT, max_new_tokens=40)
        assert stack.metrics.draft_waits == 0
