"""`Side`: one way for a session to get its rows, on a real engine with its thread: computed, or from a KV Redis."""

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
from verifier_service.kv_exchange import Exchange
from verifier_service.session import Answer, Stream
from verifier_service.step_times import StepTimes
from verifier_service.worker import Worker

STEP_TOKENS = 512
MEASURED, ALWAYS, NEVER = 0, 1, 1 << 30  # tokens from which on blocks are loaded
SALT, TTL_SECONDS, WAIT_SECONDS = 1, 600.0, 60.0


@dataclass(frozen=True)
class Turn:
    """One session: seconds until its first token, and all its tokens."""

    seconds: float
    token_ids: tuple[int, ...]


class Side:
    """An engine on a thread, with the KV Redis in one packing, or without (None)."""

    def __init__(self, runner: TreeRunner, times: StepTimes, packing: Packing | None, url: str) -> None:
        self.runner, self.packing = runner, packing
        self.choices: dict[int, Choice] = {}
        self.cache: KvCache | None = None
        if packing is not None:
            observed = LoadTimes()
            for tokens in (MEASURED, ALWAYS, NEVER):
                self.choices[tokens] = Choice(
                    observed,
                    lambda: times.latest,
                    block_size=runner.kv.block_size,
                    step_tokens=STEP_TOKENS,
                    from_tokens=tokens,
                    wait_seconds=WAIT_SECONDS,
                )
            store = BlockStore(connect(url, key="kv_redis"), space=packing, ttl_seconds=TTL_SECONDS)
            self.cache = KvCache(
                store,
                BlockFormat.of(runner.kv, packing),
                self.choices[ALWAYS],
                queue_blocks=1 << 16,
                ttl_seconds=TTL_SECONDS,
            )
        self._engine = Engine(
            runner, max_sessions=2, step_tokens=STEP_TOKENS, remote=self.cache, step_times=StepTimes(times.latest)
        )
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._worker = Worker(self._engine, changed=lambda: None, died=self._died)
        self._sessions = 0

    async def start(self) -> None:
        self._worker.start()
        if self.cache is not None:
            await self.cache.start(self._exchange)

    async def stop(self) -> None:
        if self.cache is not None:
            await self.cache.close()
        await asyncio.to_thread(self._worker.stop)

    async def turn(self, text: Sequence[int], count: int, *, written: int = 0) -> Turn:
        """`count` tokens of a new session, whose text the pool does not know and is made to forget.

        Args:
            written: before that, wait until the KV Redis has so many more blocks.
        """
        before = self.cache.counters.blocks_written if self.cache is not None else 0
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
        if written:
            await self._written(before + written)
        forgotten = asyncio.Event()
        self._worker.submit(lambda engine: _forget(self.runner, self._loop, forgotten))
        await forgotten.wait()
        return Turn(first, tuple(tokens[len(text) :]))

    async def _written(self, blocks: int) -> None:
        assert self.cache is not None
        counters = self.cache.counters
        while counters.blocks_written < blocks:
            if counters.dropped.total():
                raise SystemExit(f"blocks were not written: {dict(counters.dropped)}")
            await asyncio.sleep(0.002)

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


def _forget(runner: TreeRunner, loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    """Have the pool give every idle block's content up."""
    runner.pool.free(runner.pool.allocate(runner.pool.free_blocks))
    loop.call_soon_threadsafe(done.set)
