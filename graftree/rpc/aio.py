"""Keeps gRPC's asyncio engine running across event loops.

The engine shuts down with its last channel or server and starts again with the next one. The shutdown joins a thread
under a lock and is called by the garbage collector, from whichever thread it happens to run on; when that meets the
start of the next loop's engine, both wait for ever. One reference that is never given back avoids it.
"""

from __future__ import annotations

import functools

import grpc


@functools.cache
def keep_running() -> None:
    """Take that reference, once per process. Must be called on an event loop."""
    grpc.aio.init_grpc_aio()
