"""What all tests share."""

from __future__ import annotations

import asyncio

import pytest

from graftree.rpc.aio import keep_running


@pytest.fixture(scope="session", autouse=True)
def _grpc_stays_up() -> None:
    """Each test has an event loop of its own; gRPC's engine must not stop and start between them."""

    async def begin() -> None:
        keep_running()

    asyncio.run(begin())
