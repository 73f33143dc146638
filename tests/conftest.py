"""What all tests share."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from hypothesis import settings

from graftree.rpc.aio import keep_running
from tests.store_redis import empty_servers

# Triton reads it once, when it is imported: no test module has been by now, and torch does not by itself. Triton's
# kernels then run on the CPU in these tests; nothing else here uses Triton. With 0 they need a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


# A shell starts what runs in the background with SIGINT ignored, and child processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The same examples in every run; whoever looks for new ones: --hypothesis-profile default.
settings.register_profile("exact", derandomize=True)
settings.load_profile("exact")


@pytest.fixture(scope="session", autouse=True)
def _grpc_stays_up() -> None:
    """Each test has an event loop of its own; gRPC's engine must not stop and start between them."""

    async def begin() -> None:
        keep_running()

    asyncio.run(begin())


@pytest.fixture(scope="module", autouse=True)
def _empty_servers() -> None:
    """What a module's pods left in the Redis that the modules share would be pods to the next one's."""
    empty_servers()
