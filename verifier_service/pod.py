"""`VerifierPod`: the tier's process: model, engine thread and service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from graftree.config import VerifierConfig
from graftree.errors import GraftreeError
from graftree.grammar import Grammars
from graftree.observe.exports import Export
from graftree.pod import Adder, Pod
from graftree.store.registry import PodRecord
from graftree.text.tokenizer import Tokenizer
from graftree.v1 import common_pb2, verification_pb2, verification_pb2_grpc
from verifier_service import kv_setup
from verifier_service.counters import Counters
from verifier_service.engine import Engine, Runner
from verifier_service.exports import EXPORTS
from verifier_service.kv_cache import KvCache
from verifier_service.kv_exchange import Exchange
from verifier_service.model import identity, load_runner, step_time
from verifier_service.scheduler import Scheduler
from verifier_service.service import REVISION, VerificationServicer
from verifier_service.step_times import StepTimes
from verifier_service.worker import Worker

log = structlog.get_logger(__name__)

KV_REDIS = "kv_redis"  # what the health service calls it
SERVICE = verification_pb2.DESCRIPTOR.services_by_name["VerificationService"].full_name


class VerifierPod(Pod[VerifierConfig]):
    """One LLM behind `VerificationService`."""

    _runner: Runner
    _step_times: StepTimes
    _engine: Engine
    _llm_identity = ""
    _worker: Worker | None = None
    _kv_cache: KvCache | None = None
    _servicer: VerificationServicer

    async def load(self) -> None:
        """Load the model, warm it up and start the engine's thread.

        Raises:
            InvalidArgument, Incompatible: the model or a key does not fit.
        """
        kv_redis = kv_setup.client(self.config)
        loop = asyncio.get_running_loop()
        self._loop, self._idle = loop, asyncio.Event()
        grammars = Grammars(partial(Tokenizer.load, self.config.model))
        self._runner, _ = await asyncio.gather(
            asyncio.to_thread(load_runner, self.config), asyncio.to_thread(_prepare, grammars)
        )
        spec = self._runner.spec
        self._llm_identity = await asyncio.to_thread(identity, self.config)
        self._step_times = StepTimes(await asyncio.to_thread(step_time, self._runner, self.config))
        self._kv_cache = kv_setup.kv_cache(
            kv_redis, self.config, self._runner, self._step_times, self._kv_redis_changed
        )
        self._engine = Engine(
            self._runner,
            prefix_cache=self.config.prefix_cache,
            kv_reserve=self.config.kv_reserve,
            step_times=self._step_times,
            remote=self._kv_cache,
            tracer=self.tracer,
            max_sessions=self.config.max_sessions,
            step_tokens=self.config.step_tokens,
            grammars=grammars,
        )
        self._worker = Worker(
            self._engine,
            changed=partial(self._call, self._load_changed),
            died=lambda e: self._call(partial(self._die, e)),
        )
        hello = common_pb2.StreamHello(
            revision=REVISION,
            pod_id=self.config.pod_id,
            model_fingerprint=spec.fingerprint,
            vocab_fingerprint=spec.vocab_fingerprint,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
        )
        self._servicer = VerificationServicer(hello, self._engine, self._worker, grammars)
        self._worker.start()
        if self._kv_cache is not None:
            self._kv_redis_changed(True)
            await self._kv_cache.start(partial(_exchange, self._worker))
        log.info("model loaded", model=spec.name, kv_blocks=self._runner.pool.num_blocks)

    def services(self) -> list[tuple[str, Adder]]:
        return [(SERVICE, partial(verification_pb2_grpc.add_VerificationServiceServicer_to_server, self._servicer))]

    def record(self) -> PodRecord:
        spec = self._runner.spec
        return PodRecord(
            pod_id=self.config.pod_id,
            tier="verifier",
            kind=spec.name,
            address=self.address,
            model_fingerprint=spec.fingerprint,
            vocab_fingerprint=spec.vocab_fingerprint,
            llm_identity=self._llm_identity,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            max_sessions=self.config.max_sessions,
            sessions=self._engine.sessions,
            draining=self.draining,
        )

    @property
    def counters(self) -> Counters:
        """What this pod has done since its start."""
        return self._engine.counters

    @property
    def scheduler(self) -> Scheduler:
        """The engine's; to be read only."""
        return self._engine.scheduler

    @property
    def step_times(self) -> StepTimes:
        """What steps take; to be read only."""
        return self._step_times

    @property
    def runner(self) -> Runner:
        """The LLM, its cache and pool; to be read only."""
        return self._runner

    def exports(self) -> list[Export[Any]]:
        return [*super().exports(), *EXPORTS]

    @property
    def kv_cache(self) -> KvCache | None:
        """The way to the KV Redis; to be read only."""
        return self._kv_cache

    async def drain(self) -> None:
        """Take no new sessions, wait until the open ones have ended."""
        if self._worker is None:
            return
        self._worker.submit(Engine.drain)
        while self._engine.sessions:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """End the engine's thread after the forward under way."""
        if self._kv_cache is not None:
            await self._kv_cache.close()
        if self._worker is not None:
            worker, self._worker = self._worker, None
            self._servicer.close()
            await asyncio.to_thread(worker.stop)

    def _call(self, function: Callable[[], None]) -> None:
        """Run on the event loop, from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the pod is gone
            self._loop.call_soon_threadsafe(function)

    def _load_changed(self) -> None:
        self._servicer.load_changed()
        if not self._engine.sessions:
            self._idle.set()

    def _kv_redis_changed(self, up: bool) -> None:
        self.set_health(KV_REDIS, up)

    def _die(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(GraftreeError(f"the engine thread died: {type(error).__name__}: {error}"))


def _exchange(worker: Worker, command: Callable[[Exchange], None]) -> None:
    """Have a function called between two forwards."""

    def run(engine: Engine) -> None:
        assert engine.exchange is not None, "there is a KV Redis"
        command(engine.exchange)

    worker.submit(run)


def _prepare(grammars: Grammars) -> None:
    """What cannot be prepared costs the sessions that ask for structured output, and no others."""
    try:
        grammars.prepare()
    except GraftreeError as error:
        log.warning("no structured output", reason=str(error))
