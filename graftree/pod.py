"""`Pod`: the life of one tier's process, or of one instance inside a `LocalStack`.

    load -> listen -> register (lease) -> ready ... SIGTERM -> not ready -> drain -> unregister -> close

Health: the empty service name is liveness; "readiness" and each service's full name say whether the pod takes work.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from graftree.config import PodConfig
from graftree.errors import ConfigError, GraftreeError, Incompatible
from graftree.observe import pod_exports
from graftree.observe.exports import Export
from graftree.observe.tracing import NO_TRACER, tracer
from graftree.rpc.guard import GuardedServer
from graftree.rpc.options import SERVER_OPTIONS
from graftree.security.secrets import RedisCredentials
from graftree.security.tls import ClientTls, ServerTls, TlsFiles
from graftree.store.connection import connect
from graftree.store.registry import PodRecord, Registry

if TYPE_CHECKING:
    from graftree.observe.endpoint import MetricsEndpoint

C = TypeVar("C", bound=PodConfig)

READINESS = "readiness"
Adder = Callable[[Any], None]

log = structlog.get_logger(__name__)


class Pod(ABC, Generic[C]):
    """Base of the three tiers. Subclasses fill in the hooks `load` to `close`."""

    def __init__(self, config: C) -> None:
        self.config = config
        self.address = ""
        credentials = RedisCredentials.given(config.redis_username, config.redis_password_file, keys="redis")
        self.redis = connect(config.redis, credentials=credentials)
        self.registry = Registry(self.redis, lease_seconds=config.lease_seconds)
        self.tls: ServerTls | None = None
        self.tracer = NO_TRACER
        self._server: grpc.aio.Server | None = None
        self._health_server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._health_changes: list[asyncio.Task[None]] = []
        self._names: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics: MetricsEndpoint | None = None
        self.metrics_address = ""  # of the metrics over HTTP, once they are served
        self.health_address = ""  # of the plaintext health service, once it is
        self.lease_renewals = self.lease_failures = 0
        self.ready = False
        self.draining = False
        # Set when the pod cannot go on, with the reason: the process then ends.
        self.failed: asyncio.Future[GraftreeError] = asyncio.get_running_loop().create_future()

    # What a tier fills in.

    async def load(self) -> None:
        """Load the model and whatever else must be there before the port opens."""

    @abstractmethod
    def services(self) -> list[tuple[str, Adder]]:
        """(full service name, function that adds its servicer to a server)."""

    @abstractmethod
    def record(self) -> PodRecord:
        """What the registry says of this pod now; read at each renewal."""

    def exports(self) -> list[Export[Any]]:
        """The pod's metrics; a tier adds its own."""
        return list(pod_exports.EXPORTS)

    @property
    def tls_sides(self) -> dict[str, ServerTls | ClientTls | None]:
        """Side -> its TLS, None = plaintext."""
        return {"server": self.tls}

    async def run(self) -> None:
        """Background work after the port is open; cancelled at `stop`."""

    async def drain(self) -> None:
        """Let running work finish or hand it over; the caller bounds the time."""

    async def close(self) -> None:
        """Release everything; called once, also after a failed start."""

    # The life itself.

    async def start(self) -> None:
        """Load, listen, register, become ready.

        Raises:
            ConfigError: the port is taken or a key does not fit.
            Incompatible: the registry refuses this pod's fingerprints, with the reason.
        """
        config = self.config
        if config.tls_certificate or config.tls_key or config.tls_client_ca:
            names = ("tls_certificate", "tls_key", "tls_client_ca")
            self.tls = ServerTls(TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca, names))
        self.tracer = tracer(config, tier=tier_of(type(self)), pod_id=config.pod_id)
        await self.load()
        self._serve_metrics()
        await self._listen()
        await self._listen_for_probes()
        first = asyncio.Event()
        self._tasks = [asyncio.create_task(self._keep_lease(first)), asyncio.create_task(self.run())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        waiter = asyncio.create_task(first.wait())
        first_of: set[asyncio.Future[Any]] = {waiter, self.failed}
        await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self.failed.done():
            raise self.failed.result()
        await self.set_ready(True)

    def _serve_metrics(self) -> None:
        if self.config.metrics_listen not in ("", "0"):
            from graftree.observe.endpoint import MetricsEndpoint

            self._metrics = MetricsEndpoint(self.config.metrics_listen, self.exports(), self)
            self.metrics_address = self._metrics.address

    async def _listen(self) -> None:
        await self._check_host()
        self._server = server = grpc.aio.server(options=SERVER_OPTIONS)
        guarded: Any = GuardedServer(server)
        for name, add in self.services():
            add(guarded)
            self._names.append(name)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, guarded)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), guarded)
        await self.set_ready(False)
        wanted = f"{self.config.host}:{self.config.port}"
        try:
            if self.tls is None:
                port = server.add_insecure_port(wanted)
            else:
                port = server.add_secure_port(wanted, self.tls.credentials())
        except RuntimeError as error:
            raise ConfigError("port", wanted, f"cannot listen there: {error}") from error
        await asyncio.shield(server.start())  # half a start cannot be stopped
        self.address = self.config.advertise or f"{_reachable(self.config.host)}:{port}"

    async def _listen_for_probes(self) -> None:
        # Kubernetes' gRPC probes know no TLS.
        wanted = self.config.health_listen
        if wanted in ("", "0"):
            return
        self._health_server = server = grpc.aio.server(options=SERVER_OPTIONS)
        guarded: Any = GuardedServer(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, guarded)
        try:
            port = server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise ConfigError("health_listen", wanted, f"cannot listen there: {error}") from error
        await asyncio.shield(server.start())
        self.health_address = f"{wanted.rpartition(':')[0]}:{port}"

    async def _check_host(self) -> None:
        """gRPC blames the port for a host that this machine does not have."""
        loop = asyncio.get_running_loop()
        try:
            for family, kind, protocol, _, address in await loop.getaddrinfo(
                self.config.host, 0, type=socket.SOCK_STREAM
            ):
                with socket.socket(family, kind, protocol) as probe:
                    probe.bind(address)
                return
        except OSError as error:
            limit = f"an address of this machine ({error.strerror or error})"
            raise ConfigError("host", self.config.host, limit) from error

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            log.error("background task failed", exc_info=error)
            self.failed.set_result(error if isinstance(error, GraftreeError) else GraftreeError(repr(error)))

    async def set_ready(self, ready: bool) -> None:
        """Publish readiness on the health service."""
        self.ready = ready
        serving = health_pb2.HealthCheckResponse.ServingStatus
        for name in (READINESS, *self._names):
            await self._health.set(name, serving.SERVING if ready else serving.NOT_SERVING)

    def set_health(self, name: str, serving: bool) -> None:
        """Publish something else than readiness on the health service."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        word = status.SERVING if serving else status.NOT_SERVING
        self._health_changes = [task for task in self._health_changes if not task.done()]
        self._health_changes.append(asyncio.create_task(self._health.set(name, word)))

    async def _keep_lease(self, registered: asyncio.Event) -> None:
        """Register, then renew three times per lease. Redis being away is no reason to stop serving."""
        registered_once = False
        while True:
            try:
                if registered_once:
                    await self.registry.renew(self.record())
                else:
                    await self.registry.register(self.record())
                    registered_once = True
                self.lease_renewals += 1
            except Incompatible as error:
                if not self.failed.done():
                    self.failed.set_result(error)
                return
            except GraftreeError as error:
                self.lease_failures += 1
                log.warning("not registered", reason=str(error))
            registered.set()
            await asyncio.sleep(self.config.lease_seconds / 3)

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Leave in good order: readiness off, lease says draining, drain, unregister, close."""
        seconds = self.config.drain_seconds if drain_seconds is None else drain_seconds
        self.draining = True
        await self.set_ready(False)
        if self._tasks:
            with contextlib.suppress(GraftreeError):
                await self.registry.renew(self.record())
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.drain(), seconds)
        await self._end(grace=0.2)
        with contextlib.suppress(GraftreeError):
            await self.registry.unregister(self.config.pod_id)
        await self.redis.aclose()

    async def kill(self) -> None:
        """Go away as a SIGKILL looks from outside: connections break, the lease runs out by itself."""
        await self._end(grace=None)
        await self.redis.aclose()

    async def _end(self, grace: float | None) -> None:
        self.ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None
        await self.close()
        if self._health_server is not None:
            server, self._health_server = self._health_server, None
            await server.stop(grace)
        if self._metrics is not None:
            endpoint, self._metrics = self._metrics, None
            await endpoint.close()
        if self.tracer is not NO_TRACER:
            spans, self.tracer = self.tracer, NO_TRACER
            await asyncio.to_thread(spans.close)


def _reachable(host: str) -> str:
    """Nobody can connect to "every address": a pod that listens there is found by its machine's name."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "[::]") else host


def tier_of(pod: type[Pod[Any]]) -> str:
    """router, verifier or speculator."""
    return pod.__name__.removesuffix("Pod").lower()
