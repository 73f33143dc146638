"""`main`: a pod as a process: configuration, logging, signals, exit codes."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from typing import Any, TypeVar

from graftree import config as configuration
from graftree.config import PodConfig
from graftree.errors import ConfigError, GraftreeError
from graftree.observe import logs
from graftree.pod import Pod, tier_of

C = TypeVar("C", bound=PodConfig)


def main(pod: type[Pod[C]], config: type[C]) -> None:
    """Entry point of a tier's process.

    Prints one JSON line on stdout once ready: {"ready": "HOST:PORT", "pod_id": ..., "metrics": ...}. Exit codes:
    0 after a drain, 2 for a configuration error, 1 for anything else.
    """
    try:
        loaded = configuration.load(config)
    except ConfigError as error:
        sys.exit(_complain(error, 2))
    logs.configure(loaded.log_level, loaded.log_format, context={"service": tier_of(pod), "pod_id": loaded.pod_id})
    try:
        asyncio.run(_serve(pod, loaded))
    except ConfigError as error:
        sys.exit(_complain(configuration.respell(config, error), 2))
    except GraftreeError as error:
        sys.exit(_complain(error, 1))


async def _serve(pod: type[Pod[C]], config: C) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    instance = pod(config)
    try:
        start = asyncio.create_task(instance.start())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            return
        start.result()
        settle()
        ready = {"ready": instance.address, "pod_id": config.pod_id, "metrics": instance.metrics_address}
        print(json.dumps(ready), flush=True)
        ends: set[asyncio.Future[Any]] = {stop, instance.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if instance.failed.done():
            raise instance.failed.result()
    finally:
        await instance.stop()


def settle() -> None:
    """What is loaded stays: the garbage collector need not look at it again.

    A full collection would, again and again, and nothing else goes on meanwhile: 50 ms in a router, several times as
    much where torch is loaded.
    """
    gc.collect()
    gc.freeze()


def _complain(error: GraftreeError, code: int) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return code
