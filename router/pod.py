"""`RouterPod`: the public tier's process: tokenizer, links to the other tiers, sessions, service."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import Any

import structlog

from graftree.config import RouterConfig
from graftree.grammar import Grammars
from graftree.observe.exports import Export
from graftree.pod import Adder, Pod
from graftree.security.tls import ClientTls, ServerTls, TlsFiles
from graftree.store.committer import Committer
from graftree.store.registry import PodRecord
from graftree.store.sessions import SessionStore
from graftree.text.detokenize import Detokenizer
from graftree.text.tokenizer import Tokenizer
from graftree.v1 import generation_pb2, generation_pb2_grpc
from router.edge import Edge
from router.exports import EXPORTS
from router.generations import Generations
from router.metrics import Metrics
from router.pods import Pods
from router.service import GenerationServicer
from router.signals import Signals
from router.tools import Tools

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
SHORTEST_REPLAY_SECONDS = 1.0  # of a finished record: its client may be about to ask for the end

log = structlog.get_logger(__name__)


class RouterPod(Pod[RouterConfig]):
    """`GenerationService` over the verifiers and speculators that the registry knows.

    Args:
        random_source: for seeds, salts, request ids and jitter; by default the system's.
    """

    tokenizer: Tokenizer
    pods: Pods
    edge: Edge
    generations: Generations
    metrics: Metrics
    signals: Signals

    def __init__(self, config: RouterConfig, *, random_source: random.Random | None = None) -> None:
        super().__init__(config)
        self.metrics = Metrics()
        self._random = random_source or random.SystemRandom()
        self._committer: Committer | None = None
        self._peer_tls: ClientTls | None = None

    async def load(self) -> None:
        """Load the tokenizer.

        Raises:
            InvalidArgument: `model` names none.
            ConfigError: a key of TLS, API keys or audit does not fit.
        """
        config = self.config
        if config.peer_ca or config.peer_certificate or config.peer_key or config.peer_name:
            names = ("peer_certificate", "peer_key", "peer_ca")
            files = TlsFiles(config.peer_certificate, config.peer_key, config.peer_ca, names)
            self._peer_tls = ClientTls(files, config.peer_name)
        self.edge = Edge(config)
        self.tokenizer = await asyncio.to_thread(Tokenizer.load, config.model)
        store = SessionStore(
            self.redis,
            ttl_seconds=config.resume_seconds,
            finished_seconds=max(config.replay_seconds, SHORTEST_REPLAY_SECONDS),
        )
        self._committer = Committer(store, time.monotonic, lease_seconds=config.lease_seconds)
        self.pods = Pods(
            self.registry,
            config,
            vocab_fingerprint=self.tokenizer.vocab_fingerprint,
            metrics=self.metrics,
            random=self._random,
            tls=self._peer_tls,
        )
        self.signals = Signals(self.metrics, lambda: self.pods.speculator_count)
        tools = Tools(
            config=config,
            pods=self.pods,
            committer=self._committer,
            metrics=self.metrics,
            detokenizer=partial(Detokenizer, self.tokenizer),
            random=self._random,
            tracer=self.tracer,
        )
        self.generations = Generations(
            config,
            tokenizer=self.tokenizer,
            grammars=Grammars(lambda: self.tokenizer),
            store=store,
            tools=tools,
            identifiers=self._random,
        )

    def services(self) -> list[tuple[str, Adder]]:
        servicer = GenerationServicer(
            self.config.model,
            edge=self.edge,
            generations=self.generations,
            pods=self.pods,
            tokenizer=self.tokenizer,
            metrics=self.metrics,
        )
        return [(SERVICE, partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer))]

    def exports(self) -> list[Export[Any]]:
        return [*super().exports(), *EXPORTS]

    @property
    def tls_sides(self) -> dict[str, ServerTls | ClientTls | None]:
        return super().tls_sides | {"peer": self._peer_tls}

    @property
    def committer(self) -> Committer:
        """Where the sessions' commits go; there once `load` is through."""
        assert self._committer is not None, "load() comes first"
        return self._committer

    def record(self) -> PodRecord:
        return PodRecord(
            pod_id=self.config.pod_id,
            tier="router",
            kind=self.config.model,
            address=self.address,
            vocab_fingerprint=self.tokenizer.vocab_fingerprint,
            max_sessions=self.config.max_requests,
            sessions=len(self.generations),
            draining=self.draining,
        )

    async def start(self) -> None:
        """As `Pod.start`; returns once a verifier is linked."""
        await super().start()
        verifier = asyncio.create_task(self._first_verifier())
        waits: list[asyncio.Future[Any]] = [verifier, self.failed]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            verifier.cancel()
        if self.failed.done():
            raise self.failed.result()

    async def set_ready(self, ready: bool) -> None:
        """Ready means that there is a verifier to generate with, too."""
        await super().set_ready(ready and self.pods.has_verifier)

    async def run(self) -> None:
        await asyncio.gather(
            self.pods.watch(), self._follow_verifiers(), self.signals.follow(), self.generations.admission.follow()
        )

    async def drain(self) -> None:
        if self._committer is not None:
            await self.generations.drain()

    async def close(self) -> None:
        if self._committer is None:
            return  # load() failed
        await self.generations.close()
        await self.pods.close()
        await self._committer.close()
        self.edge.close()
        log.debug("router closed", **self.metrics.as_dict())

    async def _follow_verifiers(self) -> None:
        while True:
            version = self.pods.version
            if self.pods.has_verifier != self.ready and not self.draining:
                await self.set_ready(self.pods.has_verifier)
            await self.pods.changed(version)

    async def _first_verifier(self) -> None:
        while not self.pods.has_verifier:
            await self.pods.changed(self.pods.version)
