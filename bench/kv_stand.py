"""`Stand`: a real engine on its thread, whose sessions get their rows computed or from a KV Redis."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from graftree.models.kv_codec import BlockFormat, Packing
from graftree.models.runner import TreeRunner
from graftree.sampling import GREEDY
from graftree.store.connection import connect
from graftree.store.kv_blocks import BlockStore
from graftree.v1 import verification_pb2
from verifier_service.engine import Engine
from verifier_service.kv_cache import KvCache
from verifier_service.kv_choice import Choice, LoadTimes
from verifier_service.kv_exchange import Exchange, Load
from verifier_service.session import Answer, Stream
from verifier_service.step_times import StepTimes
from verifier_service.worker import Worker

STEP_TOKENS = 512
MEASURED, ALWAYS, NEVER = 0, 1, 1 << 30  # tokens from which on blocks are loaded
SALT, TTL_SECONDS, WAIT_SECONDS = 1, 600.0, 600.0


@dataclass(frozen=True)
class Turn:
    """One session: seconds until its first token, and all its tokens."""

    seconds: float
    token_ids: tuple[int, ...]


class Switch:
    """The engine's remote: the KV Redis that is in use now, or none."""

    def __init__(self) -> None:
        self.current: KvCache | None = None

    def wants(self, first: int, blocks: int, length: int) -> bool:
        return self.current is not None and self.current.wants(first, blocks, length)

    def begin(self, load: Load) -> None:
        assert self.current is not None
        self.current.begin(load)

    def offer(self, names: Sequence[bytes]) -> None:
        if self.current is not None:
            self.current.offer(names)


class Stand:
    """Args:
    times: of the runner; decides, and does not change.
    url: of the KV Redis.
    """

    def __init__(self, runner: TreeRunner, times: StepTimes, url: str) -> None:
        self.runner = runner
        self.caches: dict[Packing, KvCache] = {}
        self.choices: dict[tuple[Packing, int], Choice] = {}
        for packing in Packing:
            observed = LoadTimes()
            for tokens in (MEASURED, ALWAYS, NEVER):
                self.choices[packing, tokens] = Choice(
                    observed,
                    lambda: times.latest,
                    block_size=runner.kv.block_size,
                    step_tokens=STEP_TOKENS,
                    from_tokens=tokens,
                    wait_seconds=WAIT_SECONDS,
                )
            self.caches[packing] = KvCache(
                BlockStore(connect(url, key="kv_redis"), space=packing, ttl_seconds=TTL_SECONDS),
                BlockFormat.of(runner.kv, packing),
                self.choices[packing, ALWAYS],
                queue_blocks=1 << 16,
                ttl_seconds=TTL_SECONDS,
            )
        self._switch = Switch()
        self._engine = Engine(runner, max_sessions=2, step_tokens=STEP_TOKENS, remote=self._switch)
        self._worker = Worker(self._engine, changed=lambda: None, died=self._died)
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._sessions = 0

    async def start(self) -> None:
        self._worker.start()
        for cache in self.caches.values():
            await cache.start(self._exchange)

    async def stop(self) -> None:
        for cache in self.caches.values():
            await cache.close()
        await asyncio.to_thread(self._worker.stop)

    async def turn(
        self, text: Sequence[int], count: int, packing: Packing | None = None, load: int = NEVER, *, written: int = 0
    ) -> Turn:
        """`count` tokens of a new session, whose text the pool does not know and is made to forget.

        Args:
            packing: of the KV Redis; None = without one.
            load: tokens from which on blocks are loaded.
            written: before the text is forgotten, wait until the KV Redis has so many more blocks.
        """
        cache = self._switch.current = None if packing is None else self.caches[packing]
        before = 0
        if packing is not None and cache is not None:
            cache.loader.choice, before = self.choices[packing, load], cache.counters.blocks_written
        self._sessions += 1
        name, stream, tokens = str(self._sessions), Stream(self._take), list(text)
        message = verification_pb2.VerifyOpen(
            session_id=name,
            salt=SALT,
            token_ids=text,
            prompt_tokens=len(text),
            sampling=GREEDY.to_proto(),
            max_length=len(text) + count + 1,
        )
        begun, first = time.perf_counter(), 0.0
        self._worker.submit(partial(Engine.open, stream=stream, message=message))
        for number in range(1, count + 1):
            step = verification_pb2.VerifyStep(session_id=name, step=number, committed_length=len(tokens))
            self._worker.submit(partial(Engine.step, stream=stream, message=step, arrived_ns=time.monotonic_ns()))
            answer = await self._answers.get()
            if not isinstance(answer, verification_pb2.Verdict):
                raise SystemExit(f"a session failed: {answer}")
            tokens += answer.token_ids
            first = first or time.perf_counter() - begun
        self._worker.submit(partial(Engine.close, stream=stream, session_id=name))
        if written and cache is not None:
            await _written(cache, before + written)
        forgotten = asyncio.Event()
        self._worker.submit(lambda engine: self._forget(forgotten))
        await forgotten.wait()
        return Turn(first, tuple(tokens[len(text) :]))

    def _forget(self, done: asyncio.Event) -> None:
        """Have the pool give every idle block's content up."""
        pool = self.runner.pool
        pool.free(pool.allocate(pool.free_blocks))
        self._loop.call_soon_threadsafe(done.set)

    def _take(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)

    def _exchange(self, command: Callable[[Exchange], None]) -> None:
        def run(engine: Engine) -> None:
            assert engine.exchange is not None
            command(engine.exchange)

        self._worker.submit(run)

    def _died(self, error: BaseException) -> None:
        print(f"the engine's thread died: {error!r}", file=sys.stderr)


async def _written(cache: KvCache, blocks: int) -> None:
    while cache.counters.blocks_written < blocks:
        if cache.counters.dropped.total():
            raise SystemExit(f"blocks were not written: {dict(cache.counters.dropped)}")
        await asyncio.sleep(0.002)
