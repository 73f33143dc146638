"""Clients that lose their router: the application sees one stream, from whichever router, with nothing twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from random import Random

import grpc
import pytest
from grpc_status import rpc_status

from graftree import AsyncClient, Chunk, Client, Reconnect
from graftree.errors import (
    Cancelled,
    DeadlineExceeded,
    GraftreeError,
    InvalidArgument,
    LeaseLost,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from graftree.rpc.status import to_status
from graftree.sdk.answer import Answer
from graftree.sdk.journey import Journey
from graftree.sdk.results import Result
from graftree.v1 import generation_pb2 as pb
from tests.fake_generation import FakeGeneration, script

PIECES = [("He", [4]), ("", [5]), ("llo", [6, 7]), (" you", [8, 9, 10])]
TOKENS, TEXT = (4, 5, 6, 7, 8, 9, 10), "Hello you"
QUICK = Reconnect(attempts=6, first_pause=0.001, longest_pause=0.002)

Events = Iterator[pb.GenerateResponse]
Turn = Callable[[pb.GenerateRequest, grpc.ServicerContext], Events]


def events(
    request: pb.GenerateRequest, pieces: Sequence[tuple[str, list[int]]] = PIECES
) -> list[pb.GenerateResponse]:
    """What a router says to a request, resumed or new, whose runs happen to end where `pieces` do."""
    after = request.resume_after[0] if request.resume_after else 0
    started, *chunks, finished = script(list(pieces))
    started.started.request_id = request.request_id
    behind = [each for each in chunks if each.chunk.offset >= after]
    assert after in (0, *(each.chunk.offset + len(each.chunk.token_ids) for each in chunks))
    return [started, *behind, finished]


def whole(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Events:
    """A router that answers to the end."""
    yield from events(request)


def dies(count: int) -> Turn:
    """A router that is lost after `count` events."""

    def turn(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield from events(request)[:count]
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return turn


def says(error: GraftreeError, count: int = 0) -> Turn:
    """A router that ends with an error after `count` events."""

    def turn(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield from events(request)[:count]
        context.abort_with_status(rpc_status.to_status(to_status(error)))

    return turn


class Turns(FakeGeneration):
    """A router whose calls go by `turns`, one after the other; the last one stays."""

    def __init__(self, *turns: Turn) -> None:
        super().__init__([])
        self.turns = list(turns)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Events:
        """As its turn says."""
        self.requests.append(pb.GenerateRequest.FromString(request.SerializeToString()))
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        yield from turn(request, context)


def check(result: Result, chunks: Sequence[Chunk] = ()) -> None:
    """Every token, character, log probability and figure once."""
    assert (result.token_ids, result.text, result.finish_reason) == (TOKENS, TEXT, "length")
    assert [each.token_id for each in result.log_probs] == list(TOKENS)
    assert result.usage.completion_tokens == len(TOKENS)
    if chunks:
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == TOKENS
        assert "".join(chunk.text for chunk in chunks) == TEXT
        ends = [chunk.offset + len(chunk.token_ids) for chunk in chunks]
        assert [chunk.offset for chunk in chunks[1:]] == ends[:-1]


@pytest.mark.parametrize("count", range(6))
def test_lost_after_any_event(count: int) -> None:
    """Wherever a stream breaks, the next call asks for what is missing, and nothing comes twice."""
    with Turns(dies(count), whole) as service, Client(service.target, reconnect=QUICK) as client:
        stream = client.stream("p")
        check_stream = list(stream)
        check(stream.result, check_stream)
        assert stream.reconnects == 1
        first, second = service.requests
        assert first.request_id == second.request_id != ""
        assert not first.resume_after
        have = [0, 0, 1, 2, 4, 7][count]
        assert list(second.resume_after) == [have]
        seed = 5 if count else 0  # as the router said, if it did
        assert second.recollection == pb.Recollection(seed=seed, samples=[pb.TokenIds(ids=TOKENS[:have])])
        second.ClearField("resume_after")
        second.ClearField("recollection")
        assert first == second


@pytest.mark.parametrize("field", ["recollection.samples[0].ids[1]", "recollection.samples[0].ids"])
def test_what_it_remembers_is_not_the_models(field: str) -> None:
    """Asking again would end the same way: the error is the caller's, with the field in it, after one try."""
    refusal = says(InvalidArgument(field, 3, "4, as the model says there"))
    with Turns(dies(3), refusal, whole) as service, Client(service.target, reconnect=QUICK) as client:
        stream = client.stream("p")
        with pytest.raises(InvalidArgument) as caught:
            list(stream)
        assert caught.value.field == field
        assert len(service.requests) == 2


def test_lost_before_the_seed_is_known() -> None:
    """Where the answer depends on a seed that the router was to draw, nothing can be said of it; each router is asked
    to go on, then each to begin."""
    gone = says(Unavailable("Redis"))
    with Turns(gone, gone, whole) as one, Turns(gone, whole) as other:
        with Client([one.target, other.target], reconnect=QUICK, rng=Random(1)) as client:
            check(client.generate("p", temperature=1.0))
        asked = [request for each in (one, other) for request in each.requests]
        assert not any(request.HasField("recollection") for request in asked)
        assert sorted(len(request.resume_after) for request in asked) == [0, 0, 1, 1]


async def test_asyncio_too() -> None:
    """`AsyncClient` goes on like `Client`, through several losses."""
    with Turns(dies(2), dies(1), dies(2), says(Unavailable("going away"), 1), whole) as service:
        async with AsyncClient(service.target, reconnect=QUICK) as client:
            stream = client.stream("p")
            chunks = [chunk async for chunk in stream]
            check(stream.result, chunks)
            assert stream.reconnects == 4
            assert stream.request_id == service.requests[0].request_id


def test_the_next_router() -> None:
    """With several routers a lost generation goes on at another one; new ones begin at each in turn."""
    with Turns(dies(3), whole) as one, Turns(dies(3), whole) as other:
        with Client(f"{one.target}, {other.target}", reconnect=QUICK, rng=Random(1)) as client:
            for _ in range(2):
                check(client.generate("p"))
        assert [len(each.requests) for each in (one, other)] == [2, 2]
        assert len({request.request_id for each in (one, other) for request in each.requests}) == 2


def test_a_router_that_is_not_there() -> None:
    """Of several routers one that nobody listens at costs a try; generations and model_info go to the other."""
    with Turns(whole) as gone:
        pass
    with Turns(whole) as there, Client([gone.target, there.target], reconnect=QUICK, rng=Random(0)) as client:
        for _ in range(4):
            check(client.generate("p"))
            assert client.model_info().model == "fake"
        assert not any(request.resume_after for request in there.requests)


def test_the_end_alone_is_missing() -> None:
    """When only the status of a finished stream is lost, nobody is asked again."""
    with Turns(dies(6)) as service, Client(service.target, reconnect=QUICK) as client:
        check(client.generate("p"))
        assert len(service.requests) == 1


@pytest.mark.parametrize("error", [NotFound("unknown"), InvalidArgument("resume_after[0]", 2, "at most 1")])
def test_no_record_is_left(error: GraftreeError) -> None:
    """Where a router knows nothing, or less than was received, all of it is generated again under the seed in force,
    compared, and only what is new handed out, even where runs end elsewhere."""

    def again(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield from events(request, [("Hello", [4, 5, 6, 7, 8]), (" you", [9, 10])])

    pieces = [("He", [4]), ("", [5]), ("llo", [6, 7, 8]), (" you", [9, 10])]

    def lost(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield from events(request, pieces)[:3]
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    with Turns(lost, says(error), again) as service, Client(service.target, reconnect=QUICK) as client:
        stream = client.stream("p", temperature=1.0)
        chunks = list(stream)
        check(stream.result, chunks)
        first, second, third = service.requests
        assert list(second.resume_after) == [2]
        assert not third.resume_after
        assert not first.sampling.HasField("seed")
        seeded = isinstance(error, NotFound)  # a record that is there was begun without
        assert third.sampling.HasField("seed") == seeded
        assert third.sampling.seed == (5 if seeded else 0)
        assert chunks[2] == Chunk("llo", (6, 7, 8), chunks[2].log_probs, 2)


def test_no_record_is_left_and_a_router_is_gone() -> None:
    """The router that says so is the one that is asked for everything, not the next, which may not be there."""
    with Turns(whole) as gone:
        pass
    with Turns(dies(3), says(NotFound("unknown")), whole) as service:
        with Client([service.target, gone.target], reconnect=QUICK, rng=Random(0)) as client:
            stream = client.stream("p")
            chunks = list(stream)
            check(stream.result, chunks)
        assert [list(request.resume_after) for request in service.requests] == [[], [2], []]


def test_other_tokens_than_before() -> None:
    """An answer that changes is an error, never a silent mixture."""

    def other(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield from events(request, [("He", [4]), ("x", [11])])

    turns = (dies(3), says(NotFound("unknown")), other)
    with (
        Turns(*turns) as service,
        Client(service.target, reconnect=QUICK) as client,
        pytest.raises(GraftreeError, match="others than before"),
    ):
        client.generate("p")


def test_errors_that_are_answers() -> None:
    """What a router refuses is not asked again; a full one only in the middle of a generation."""
    for error in (InvalidArgument("n", 0, "1 to 16"), NotFound("who"), ResourceExhausted("full"), GraftreeError("x")):
        with Turns(says(error)) as service, Client(service.target, reconnect=QUICK) as client:
            with pytest.raises(type(error)):
                client.generate("p")
            assert len(service.requests) == 1
    full = says(ResourceExhausted("full", retry_after_s=0.001))
    with Turns(dies(2), full, full, whole) as service, Client(service.target, reconnect=QUICK) as client:
        check(client.generate("p"))


def test_attempts_are_bounded() -> None:
    """So many failures in a row, without a token, are too many; a token in between starts the count again."""
    with Turns(dies(1)) as service, Client(service.target, reconnect=QUICK) as client:
        with pytest.raises(Unavailable):
            client.generate("p")
        assert len(service.requests) == 1 + QUICK.attempts
    turns = [turn for count in (2, 2, 2) for turn in [dies(1)] * 5 + [dies(count)]]
    with Turns(*turns, whole) as service, Client(service.target, reconnect=QUICK) as client:
        check(client.generate("p"))


def test_a_generation_taken_by_another_stream() -> None:
    """A stream whose generation went elsewhere asks for it twice at most, whatever else it is allowed."""
    with Turns(says(LeaseLost("epoch 2"), 2)) as service, Client(service.target, reconnect=QUICK) as client:
        with pytest.raises(LeaseLost):
            client.generate("p")
        assert len(service.requests) == 3


def test_reconnecting_can_be_off() -> None:
    """Without it the first loss is the caller's, and no id is made up."""
    with Turns(dies(2), whole) as service, Client(service.target, reconnect=None) as client:
        with pytest.raises(Unavailable):
            client.generate("p")
        assert [request.request_id for request in service.requests] == [""]


def test_the_callers_time() -> None:
    """The timeout is for all tries together."""
    slow = Reconnect(attempts=100, first_pause=0.05, longest_pause=0.05)
    with Turns(dies(1)) as service, Client(service.target, reconnect=slow) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("p", timeout=0.2)
        assert 2 <= len(service.requests) <= 20


async def test_cancel_during_a_pause() -> None:
    """A stream that waits for its next try ends at once when it is cancelled."""
    patient = Reconnect(first_pause=60, longest_pause=60)
    with Turns(dies(2)) as service:
        with Client(service.target, reconnect=patient) as client:
            stream = client.stream("p")
            next(stream)
            threading.Timer(0.05, stream.cancel).start()
            with pytest.raises(Cancelled):
                await asyncio.to_thread(next, stream)
        async with AsyncClient(service.target, reconnect=patient) as asynchronous:
            other = asynchronous.stream("p")
            await anext(other)
            asyncio.get_running_loop().call_later(0.05, other.cancel)
            with pytest.raises(Cancelled):
                await anext(other)


def test_pauses() -> None:
    """They double from round to round over the routers, are jittered between half and all, and end at the longest."""
    policy = Reconnect(attempts=8, first_pause=0.1, longest_pause=0.4)
    journey = Journey(
        pb.GenerateRequest(prompt="p"),
        targets=2,
        first=3,
        policy=policy,
        rng=Random(0),
        clock=lambda: 0.0,
        timeout=None,
    )
    answer = Answer()
    pauses, targets = [], [journey.target]
    for _ in range(8):
        pauses.append(journey.failed(Unavailable("x"), answer, broken=True))
        targets.append(journey.target)
    assert targets == [1, 0] * 4 + [1]
    for pause, longest in zip(pauses, [0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.4, 0.4], strict=True):
        assert longest / 2 <= pause <= longest
    assert len(set(pauses)) == 8
    with pytest.raises(Unavailable):
        journey.failed(Unavailable("x"), answer, broken=True)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Reconnect(attempts=0), "reconnect.attempts"),
        (lambda: Reconnect(first_pause=0.0), "reconnect.first_pause"),
        (lambda: Reconnect(first_pause=2.0, longest_pause=1.0), "reconnect.first_pause"),
        (lambda: Client("127.0.0.1:1", stall_seconds=0.1), "stall_seconds"),
    ],
)
def test_wrong_values(make: Callable[[], object], field: str) -> None:
    """What cannot be is refused with its name."""
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize("target", ["", "a:1,", []])
def test_wrong_targets(target: str | list[str]) -> None:
    """A list of routers without a gap."""
    with pytest.raises(InvalidArgument, match="target"):
        Client(target)
