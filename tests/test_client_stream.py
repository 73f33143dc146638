"""`Client` and `AsyncClient` against a scripted service: results, streams, cancellation, errors."""

from __future__ import annotations

import asyncio
import threading

import pytest

from graftree import AsyncClient, Chunk, Client, FinishReason
from graftree.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    GraftreeError,
    Incompatible,
    InvalidArgument,
    NotFound,
    NoVerifier,
    ResourceExhausted,
    Stale,
    Unavailable,
)
from graftree.sdk.results import PodInfo, Result, TokenLogProb
from graftree.sdk.streams import AsyncStream, Stream
from graftree.v1 import generation_pb2
from tests.fake_generation import FakeGeneration, script

PIECES = [("He", [4]), ("", [5]), ("llo", [6, 7])]


def test_generate_gathers_the_stream() -> None:
    """Text, ids, log-probs, usage, speculation, timings, seed and ids of the request all arrive in the result."""
    with FakeGeneration(script(PIECES)) as service, Client(service.target) as client:
        result = client.generate("p", log_probs=True)
    assert (result.text, result.token_ids) == ("Hello", (4, 5, 6, 7))
    assert result.finish_reason == "length"
    assert result.finish_reason is FinishReason.LENGTH
    assert f"{result.finish_reason}" == "length"
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total_tokens) == (3, 4, 7)
    assert result.speculation.acceptance_histogram == (1, 1)
    assert result.speculation.mean_acceptance_length == 1.5
    assert (result.timings.ttft_ns, result.timings.decode_ns, result.timings.commit_ns) == (1, 2, 8)
    assert result.log_probs[3] == TokenLogProb(7, -0.5, 1, ((7, -0.5),))
    assert (result.seed, result.request_id, result.model) == (5, "r-1", "fake")
    assert result.prompt_token_ids == (9, 8, 7)
    assert result.stop_string is None
    assert result.stop_token_id is None
    assert service.requests[0].prompt == "p"


def test_samples_are_gathered_by_index() -> None:
    """Chunks and ends of several samples come mixed; each sample's result has its own, and the totals count all."""
    usage = generation_pb2.Usage(prompt_tokens=3, completion_tokens=2)
    started, *_ = script([], seed=2**64 - 1)
    started.started.n = 2
    chunks = [
        generation_pb2.GenerationChunk(token_ids=[token], text=text, offset=offset, index=index)
        for text, token, offset, index in [("a", 1, 0, 0), ("x", 7, 0, 1), ("y", 8, 1, 1), ("b", 2, 1, 0)]
    ]
    ends = [generation_pb2.GenerationFinished(index=i, reason=1 + i, usage=usage) for i in (1, 0)]
    responses = [started, *(generation_pb2.GenerateResponse(chunk=chunk) for chunk in chunks)]
    responses += [generation_pb2.GenerateResponse(finished=end) for end in ends]
    with FakeGeneration(responses) as service, Client(service.target) as client:
        with client.stream("p", n=2, temperature=1.0) as stream:
            assert [(chunk.index, chunk.text) for chunk in stream] == [(0, "a"), (1, "x"), (1, "y"), (0, "b")]
        result = stream.result
        first, second = result.samples
        assert first is result
        assert [(each.text, each.token_ids, each.index) for each in result.samples] == [
            ("ab", (1, 2), 0),
            ("xy", (7, 8), 1),
        ]
        assert (first.finish_reason, second.finish_reason) == ("stop", "length")
        assert (first.seed, second.seed) == (2**64 - 1, 0)
        assert (second.usage.total_tokens, result.total_usage.completion_tokens) == (5, 4)
        assert (result.total_usage.prompt_tokens, second.samples) == (3, (second,))
        service.responses = responses[:-1]
        with Client(service.target, reconnect=None) as firm, pytest.raises(Unavailable, match="broke off"):
            firm.generate("p", n=2, temperature=1.0)
        service.responses = responses[2:3]
        with pytest.raises(GraftreeError, match="sample 1 of 1"):
            client.generate("p")


def test_results_are_frozen() -> None:
    """A result cannot be changed by accident."""
    with FakeGeneration(script(PIECES)) as service, Client(service.target) as client:
        result = client.generate("p")
    with pytest.raises(AttributeError):
        result.text = ""  # type: ignore[misc]


def test_stream_yields_chunks_and_holds_the_result() -> None:
    """Chunks come in order with their offsets; the result is there after the last one and not before."""
    with FakeGeneration(script(PIECES)) as service, Client(service.target) as client:
        stream = client.stream("p")
        first = next(stream)
        assert isinstance(first, Chunk)
        assert stream.request_id == "r-1"
        with pytest.raises(Unavailable):
            _ = stream.result
        rest = list(stream)
        assert [(each.text, each.token_ids, each.offset) for each in (first, *rest)] == [
            ("He", (4,), 0),
            ("", (5,), 1),
            ("llo", (6, 7), 2),
        ]
        assert stream.result.text == "Hello"


async def test_async_client_has_the_same_surface() -> None:
    """Every public name of Client and Stream is there for asyncio, and gives equal values."""

    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    assert public(Stream) - {"close"} == public(AsyncStream) - {"aclose"}
    with FakeGeneration(script(PIECES)) as service:
        async with AsyncClient(service.target) as client:
            result = await client.generate("p")
            chunks = [chunk async for chunk in client.stream("p")]
            info = await client.model_info()
        with Client(service.target) as other:
            assert result == await asyncio.to_thread(other.generate, "p")
            assert info == await asyncio.to_thread(other.model_info)
    assert "".join(chunk.text for chunk in chunks) == "Hello"
    assert info.pods == (PodInfo("v0", "verifier", "fake", "127.0.0.1:1", "ready", 4),)


def test_leaving_the_with_block_cancels() -> None:
    """The service sees the cancellation when a `with` block is left before the end."""
    with FakeGeneration(script(PIECES)[:-1], endless=True) as service, Client(service.target) as client:
        with client.stream("p") as stream:
            next(stream)
        assert service.gone.wait(10)


def test_breaking_out_of_a_loop_cancels() -> None:
    """A stream that nobody holds any more is cancelled, without a word from the caller."""
    with FakeGeneration(script(PIECES)[:-1], endless=True) as service, Client(service.target) as client:
        for _ in client.stream("p"):
            break
        assert service.gone.wait(10)


def test_cancel_from_another_thread() -> None:
    """The thread that waits for a chunk gets Cancelled when another one cancels."""
    with FakeGeneration(script([])[:1], endless=True) as service, Client(service.target) as client:
        stream = client.stream("p")
        threading.Timer(0.05, stream.cancel).start()
        with pytest.raises(Cancelled):
            next(stream)
        assert service.gone.wait(10)


async def test_async_cancellation() -> None:
    """Cancelling the stream raises Cancelled; cancelling the task raises CancelledError; both reach the service."""
    with FakeGeneration(script(PIECES)[:-1], endless=True) as service:
        async with AsyncClient(service.target) as client:
            async with client.stream("p") as stream:
                for _ in range(3):
                    await anext(stream)
                asyncio.get_running_loop().call_later(0.05, stream.cancel)
                with pytest.raises(Cancelled):
                    await anext(stream)
            assert await asyncio.to_thread(service.gone.wait, 10)
            service.gone.clear()
            task = asyncio.create_task(client.generate("p"))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(service.gone.wait, 10)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("sampling.temperature", -1.0, "0 to 100"),
        ResourceExhausted("full", retry_after_s=2.5),
        NoVerifier("none registered"),
        Unavailable("away"),
        NotFound("who"),
        AlreadyExists("taken"),
        Incompatible("other vocabulary"),
        Stale("late"),
        GraftreeError("oops"),
    ],
)
async def test_errors_come_back_as_they_were_raised(error: GraftreeError) -> None:
    """Both clients rebuild the service's exception: class, message, and what it carries."""
    with FakeGeneration(script(PIECES)[:2], error=error) as service:
        with Client(service.target, reconnect=None) as client, pytest.raises(type(error)) as caught:
            await asyncio.to_thread(client.generate, "p")
        async with AsyncClient(service.target, reconnect=None) as asynchronous:
            with pytest.raises(type(error)) as caught_too:
                await asynchronous.generate("p")
    for each in (caught.value, caught_too.value):
        assert type(each) is type(error)
        assert str(each) == str(error)
    if isinstance(error, ResourceExhausted):
        assert caught.value.retry_after_s == 2.5  # type: ignore[attr-defined]
    if isinstance(error, InvalidArgument):
        assert (caught.value.field, caught.value.limit) == (error.field, error.limit)  # type: ignore[attr-defined]


def test_a_stream_that_breaks_off_is_an_error() -> None:
    """An answer without its last event never passes for a whole one."""
    with FakeGeneration(script(PIECES)[:-1]) as service, Client(service.target, reconnect=None) as client:
        with pytest.raises(Unavailable, match="broke off after 4 tokens"):
            client.generate("p")
        with pytest.raises(Unavailable):
            list(client.stream("p"))


def test_a_lost_chunk_is_an_error() -> None:
    """A gap in the offsets is noticed."""
    responses = script(PIECES)
    del responses[2]
    with FakeGeneration(responses) as service, Client(service.target) as client:
        stream = client.stream("p")
        next(stream)
        with pytest.raises(GraftreeError, match="offset 2 after 1"):
            next(stream)


def test_nobody_there() -> None:
    """A target that does not answer is Unavailable at once, not a hang."""
    with FakeGeneration([]) as service:
        target = service.target
    with Client(target) as client, pytest.raises(Unavailable):
        client.generate("p")
    with Client(target) as client, pytest.raises(Unavailable):
        client.model_info()


def test_timeout() -> None:
    """A timeout ends the generation with Unavailable, on the service too."""
    with FakeGeneration(script([])[:1], endless=True) as service, Client(service.target) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("p", timeout=0.1)
        assert service.gone.wait(10)


async def test_unknown_keyword() -> None:
    """A misspelt keyword is a TypeError in every call."""
    with FakeGeneration([]) as service, Client(service.target) as client:
        with pytest.raises(TypeError):
            client.generate("p", max_tokens=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            client.stream("p", max_tokens=3)  # type: ignore[call-arg]
        async with AsyncClient(service.target) as asynchronous:
            with pytest.raises(TypeError):
                await asynchronous.generate("p", max_tokens=3)  # type: ignore[call-arg]


def test_one_client_many_threads() -> None:
    """A client may be shared between threads."""
    with FakeGeneration(script(PIECES)) as service, Client(service.target) as client:
        results: list[Result] = []
        threads = [threading.Thread(target=lambda: results.append(client.generate("p"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [each.text for each in results] == ["Hello"] * 4
