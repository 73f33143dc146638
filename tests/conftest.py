"""What all tests share."""

from __future__ import annotations

import asyncio
import os

import pytest

from graftree.rpc.aio import keep_running

# Triton reads it once, when it is imported: no test module has been by now, and torch does not by itself. Triton's
# kernels then run on the CPU in these tests; nothing else here uses Triton. With 0 they need a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _grpc_stays_up() -> None:
    """Each test has an event loop of its own; gRPC's engine must not stop and start between them."""

    async def begin() -> None:
        keep_running()

    asyncio.run(begin())
