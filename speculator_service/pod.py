"""`SpeculatorPod`: one drafter behind `SpeculationService`."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from graftree.config import SpeculatorConfig
from graftree.observe.exports import Export
from graftree.pod import Adder, Pod
from graftree.store.registry import PodRecord
from graftree.v1 import common_pb2, speculation_pb2, speculation_pb2_grpc
from speculator_service import shapes
from speculator_service.counters import Counters
from speculator_service.drafters import loader
from speculator_service.drafters.base import Drafter
from speculator_service.engine import Engine
from speculator_service.exports import EXPORTS
from speculator_service.limits import Limits
from speculator_service.service import REVISION, SpeculationService

_NAME = speculation_pb2.DESCRIPTOR.services_by_name["SpeculationService"].full_name


class SpeculatorPod(Pod[SpeculatorConfig]):
    """Loads the drafter, grows trees for whoever opens sessions.

    Attributes:
        drafter, engine, counters: there once `load` is through.
    """

    drafter: Drafter
    engine: Engine
    counters: Counters
    _service: SpeculationService | None = None

    async def load(self) -> None:
        config = self.config
        shape = shapes.parse(config.tree)
        self.drafter = drafter = await asyncio.to_thread(loader.load, config)
        limits = Limits(
            max_sessions=config.max_sessions,
            max_nodes=config.max_nodes,
            max_depth=config.max_depth,
            branching=config.branching,
            vocab_size=drafter.vocab_size,
            max_context=drafter.max_context,
            shape=shape,
        )
        hello = common_pb2.StreamHello(
            revision=REVISION,
            pod_id=config.pod_id,
            model_fingerprint=drafter.model_fingerprint,
            vocab_fingerprint=drafter.vocab_fingerprint,
            vocab_size=drafter.vocab_size,
            max_context=drafter.max_context,
        )
        self._service = SpeculationService(hello, limits, self._load_now, self.tracer)
        self.counters = self._service.counters
        self.engine = Engine(drafter, batch_leaves=config.batch_leaves, deliver=self._service.deliver)
        self._service.attach(self.engine)
        self.engine.start()

    def services(self) -> list[tuple[str, Adder]]:
        service = self._service
        assert service is not None

        def add(server: grpc.aio.Server) -> None:
            speculation_pb2_grpc.add_SpeculationServiceServicer_to_server(service, server)

        return [(_NAME, add)]

    def record(self) -> PodRecord:
        return PodRecord(
            pod_id=self.config.pod_id,
            tier="speculator",
            kind=self.config.drafter,
            address=self.address,
            model_fingerprint=self.drafter.model_fingerprint,
            vocab_fingerprint=self.drafter.vocab_fingerprint,
            llm_identity=self.drafter.llm_identity,
            vocab_size=self.drafter.vocab_size,
            max_context=self.drafter.max_context,
            max_sessions=self.config.max_sessions,
            sessions=self._service.sessions if self._service is not None else 0,
            draining=self.draining,
        )

    def exports(self) -> list[Export[Any]]:
        return [*super().exports(), *EXPORTS]

    async def drain(self) -> None:
        """Wait until the routers have closed their sessions; they go on without this pod."""
        if self._service is not None:
            await self._service.drain()

    async def close(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None
            await self.engine.stop()

    def _load_now(self) -> common_pb2.PodLoad:
        free, total = self.drafter.blocks()
        return common_pb2.PodLoad(
            sessions=self._service.sessions if self._service is not None else 0,
            max_sessions=self.config.max_sessions,
            free_blocks=free,
            total_blocks=total,
            queued=self.engine.queued,
            draining=self.draining,
        )
