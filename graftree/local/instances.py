"""`InstancePod`: a pod inside this process, on an event loop of its own thread; real sockets, no child process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog

from graftree.errors import GraftreeError, Unavailable
from graftree.local.pod import MODULES, LocalPod, Tier
from graftree.observe import logs
from graftree.pod import Pod
from graftree.rpc.aio import keep_running

T = TypeVar("T")


class LoopThread:
    """One event loop on a background thread."""

    def __init__(self) -> None:
        if not structlog.is_configured():  # its default prints every event on stdout
            logs.configure("warning", "console", libraries=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="graftree-loop", daemon=True)
        self._thread.start()
        self.run(_keep_grpc_running())

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it; must not be called from the loop."""
        return self.submit(work).result()

    def close(self) -> None:
        """Cancel what is left, then end loop and thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _keep_grpc_running() -> None:
    keep_running()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


class InstancePod(LocalPod):
    """The tier's own `Pod` class on a `LoopThread`; its attributes are reachable at `instance`, for tests."""

    def __init__(
        self,
        tier: Tier,
        index: int,
        values: Mapping[str, Any],
        on_exit: Callable[[LocalPod, str], None],
        *,
        loop: LoopThread,
    ) -> None:
        super().__init__(tier, index, values, on_exit)
        self.instance: Pod[Any] | None = None
        self._loop = loop
        self._life: asyncio.Task[None] | None = None
        self._over = False

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self.instance is not None and not self._over

    def start(self) -> None:
        """Start the instance on the loop."""
        pod = _pod_class(self.tier)

        async def begin() -> None:
            self._life = asyncio.create_task(self._live(pod), name=self.name)

        self._loop.run(begin())

    async def _live(self, pod: type[Pod[Any]]) -> None:
        try:
            self.instance = pod(self.config)
            await self.instance.start()
            self._became_ready(self.instance.address)
            await asyncio.wait({self.instance.failed})
            raise self.instance.failed.result()
        except GraftreeError as error:
            await self._bury(error)
        except Exception as error:
            await self._bury(Unavailable(f"{self.name} failed: {type(error).__name__}: {error}"))

    async def _bury(self, error: GraftreeError) -> None:
        self._over = True
        if self.instance is not None:
            with contextlib.suppress(GraftreeError):
                await self.instance.stop(0)
        self._ended(error)

    def stop(self, drain_seconds: float | None = None) -> None:
        """As SIGTERM would."""
        self._end(lambda instance: instance.stop(drain_seconds))

    def kill(self) -> None:
        """As SIGKILL looks from outside."""
        self._end(lambda instance: instance.kill())

    def _end(self, how: Callable[[Pod[Any]], Coroutine[Any, Any, None]]) -> None:
        self._asked = True
        if self._life is None or self._over:
            return
        self._over = True

        async def end() -> None:
            assert self._life is not None
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
            if self.instance is not None:
                await how(self.instance)

        self._loop.run(end())
        self._ended(Unavailable(f"{self.name} was stopped"))


def _pod_class(tier: Tier) -> type[Pod[Any]]:
    """Imported only now: a client has no use for it, and torch may not be there."""
    found: type[Pod[Any]] = getattr(importlib.import_module(f"{MODULES[tier]}.pod"), f"{tier.capitalize()}Pod")
    return found
