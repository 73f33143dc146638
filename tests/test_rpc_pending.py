"""Calls that a busy server has no time for: how long gRPC lets them wait before it ends them with bare CANCELLED."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc

from graftree.rpc.options import SERVER_OPTIONS

WAIT = "grpc.server_max_unrequested_time_in_server"
CALLS = 8


async def codes(options: list[tuple[str, int]], busy_seconds: float) -> set[grpc.StatusCode]:
    """Statuses of calls that come while the server's event loop is busy, of a service that knows no method."""
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connected = threading.Event()

    def ask() -> set[grpc.StatusCode]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
            connected.set()
            time.sleep(0.2)
            calls: list[Any] = [channel.unary_unary("/none/None").future(b"") for _ in range(CALLS)]
            return {call.exception().code() for call in calls}

    asking = asyncio.create_task(asyncio.to_thread(ask))
    await asyncio.to_thread(connected.wait)
    asyncio.get_running_loop().call_soon(time.sleep, busy_seconds)  # nobody serves meanwhile
    await asyncio.sleep(0)
    try:
        return await asking
    finally:
        await server.stop(None)


async def test_calls_wait_for_a_busy_server() -> None:
    """A server that is busy for longer than calls may wait cancels them, which says nothing to anybody. Ours may wait
    longer than any deadline that makes sense."""
    assert dict(SERVER_OPTIONS)[WAIT] >= 600
    short = [(name, 1 if name == WAIT else value) for name, value in SERVER_OPTIONS]
    assert grpc.StatusCode.CANCELLED in await codes(short, 2.0)
    assert await codes(SERVER_OPTIONS, 2.0) == {grpc.StatusCode.UNIMPLEMENTED}
