"""Rich errors and batching with credits, over real sockets where it counts."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from graftree import errors
from graftree.errors import GraftreeError, InvalidArgument, LeaseLost, NoVerifier, ResourceExhausted
from graftree.rpc import status
from graftree.rpc.outbox import Outbox
from graftree.rpc.ticker import Ticker

EXAMPLES: list[GraftreeError] = [
    GraftreeError("boom"),
    InvalidArgument("sampling.temperature", -1.0, "0 <= temperature <= 100"),
    errors.InvalidTree("tree.parents[3]", 9, "-1 <= parent < 3"),
    errors.NotFound("no session x"),
    errors.AlreadyExists("in use"),
    errors.Incompatible("other vocabulary"),
    errors.Stale("moved on"),
    LeaseLost("epoch 3, not 2"),
    ResourceExhausted("no blocks", retry_after_s=0.25),
    errors.DeadlineExceeded("too late"),
    errors.Cancelled("gone"),
    errors.Unavailable("away"),
    NoVerifier("none"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
async def test_an_error_crosses_the_wire_whole(error: GraftreeError) -> None:
    """Class, text, field, limit and retry delay survive a real gRPC call."""

    async def handler(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await status.abort(context, error)

    server = grpc.aio.server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Call")(b"")
    await server.stop(None)
    back = status.from_rpc(caught.value)
    assert type(back) is type(error)
    assert str(back) == str(error)
    if isinstance(error, InvalidArgument):
        assert isinstance(back, InvalidArgument)
        assert (back.field, back.limit) == (error.field, error.limit)
    if isinstance(error, ResourceExhausted):
        assert isinstance(back, ResourceExhausted)
        assert back.retry_after_s == error.retry_after_s


def test_bad_request_and_retry_info_are_attached() -> None:
    """Clients that know only google.rpc see the standard details."""
    details = status.to_status(EXAMPLES[1]).details
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in details)
    assert bad.field_violations[0].field == "sampling.temperature"
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.to_status(EXAMPLES[8]).details)
    assert retry.retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_a_session_failure_keeps_its_class(error: GraftreeError) -> None:
    """One session's failure on a pod stream is the same exception on the other side."""
    back = status.from_failure(status.to_failure("s", error))
    assert type(back) is type(error)
    assert str(back) == str(error)


async def test_what_waits_together_travels_together() -> None:
    """Without a credit items wait, and leave in one message with the next credit."""
    outbox: Outbox[int] = Outbox(credits=1)
    outbox.put(1, 2)
    assert await outbox.take() == [1, 2]
    outbox.put(3)
    taker = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put(4)
    await asyncio.sleep(0.01)
    assert not taker.done()
    outbox.grant(1)
    assert await taker == [3, 4]


async def test_close_lets_the_last_items_out() -> None:
    """After close `take` gives what is left, then an empty list."""
    outbox: Outbox[int] = Outbox()
    outbox.put(1)
    outbox.close()
    assert await outbox.take() == [1]
    assert await outbox.take() == []


@given(st.lists(st.one_of(st.none(), st.integers(1, 3)), max_size=30))
def test_never_more_messages_than_credits(events: list[int | None]) -> None:
    """Whatever the order of puts (None) and grants: order kept, nothing lost, messages <= credits."""

    async def run() -> None:
        outbox: Outbox[int] = Outbox(credits=0)
        messages: list[list[int]] = []

        async def sender() -> None:
            while message := await outbox.take():
                messages.append(message)

        task = asyncio.create_task(sender())
        put = granted = 0
        for event in events:
            if event is None:
                outbox.put(put)
                put += 1
            else:
                outbox.grant(event)
                granted += event
            for _ in range(4):
                await asyncio.sleep(0)
            assert len(messages) <= granted
        outbox.close()
        await task
        assert [item for message in messages for item in message] == list(range(put))

    asyncio.run(run())


async def test_a_ticker_tells_the_last_change() -> None:
    """The first change is told at once, a burst behind it once, and nothing after close."""
    told: list[int] = []
    state = 0
    ticker = Ticker(lambda: told.append(state), 0.02)
    for state in range(1, 6):  # noqa: B007
        ticker.changed()
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    assert told[0] == 1
    assert told[-1] == 5
    assert len(told) < 5
    ticker.close()
    ticker.changed()
    await asyncio.sleep(0.05)
    assert told[-1] == 5
