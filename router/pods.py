"""`Pods`: which verifiers and speculators there are, who is linked, and who serves a new session.

The registry is read every `POLL_SECONDS` and at once when a request finds no verifier. A link that works is kept
whatever the registry says (Redis may have lost it); a pod whose link broke is tried again while it is registered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from random import Random
from typing import Protocol

import structlog

from graftree.config import RouterConfig
from graftree.errors import GraftreeError, Incompatible, NoVerifier, ResourceExhausted, Unavailable
from graftree.rpc.options import channel_options
from graftree.security.tls import ClientTls
from graftree.store.registry import PodRecord
from graftree.v1.common_pb2 import StreamHello
from graftree.v1.generation_pb2 import GetModelInfoResponse
from router.links import REVISION, SpeculatorLink, VerifierLink
from router.metrics import Metrics
from router.request import ModelLimits

POLL_SECONDS = 0.2
FULL_POLL_SECONDS = 0.05
RETRY_SECONDS = (0.05, 0.5)  # first and longest pause before a lost pod is tried again
LONGEST_QUARANTINE = 64  # in units of quarantine_seconds

log = structlog.get_logger(__name__)

AnyLink = VerifierLink | SpeculatorLink


class PodSource(Protocol):
    """What `graftree.store.registry.Registry` does."""

    async def pods(self, tier: str | None = None) -> list[PodRecord]: ...


class Peer:
    """One pod as this router sees it."""

    def __init__(self, record: PodRecord) -> None:
        self.record = record
        self.registered = True
        self.state = "connecting"
        self.link: AnyLink | None = None
        self.task: asyncio.Task[None] | None = None
        self.offences = 0
        self.failures = 0
        self.said: set[str] = set()  # events that are logged once

    @property
    def usable(self) -> bool:
        return self.link is not None and not self.link.draining

    def info(self) -> GetModelInfoResponse.PodInfo:
        state = "draining" if self.link is not None and self.link.draining else self.state
        return GetModelInfoResponse.PodInfo(
            pod_id=self.record.pod_id,
            tier=self.record.tier,
            kind=self.record.kind,
            address=self.record.address,
            state=state,
            sessions=self.link.sessions if self.link is not None else 0,
        )


class Pods:
    """All verifiers and speculators.

    Args:
        source: the registry.
        vocab_fingerprint: of this router's tokenizer; pods with another are refused.
        random: for jitter only.
        tls: of the connections to pods; None = plaintext.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        source: PodSource,
        config: RouterConfig,
        *,
        vocab_fingerprint: str,
        metrics: Metrics,
        random: Random,
        tls: ClientTls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version = 0  # grows whenever the set of usable pods changes
        self._source = source
        self._config = config
        self._vocab_fingerprint = vocab_fingerprint
        self._metrics = metrics
        self._random = random
        self._tls = tls
        self._clock = clock
        self._hello = StreamHello(revision=REVISION, pod_id=config.pod_id, vocab_fingerprint=vocab_fingerprint)
        self._peers: dict[str, Peer] = {}
        self._poke = asyncio.Event()
        self._change = asyncio.Event()
        self._identity = StreamHello()  # of the LLM served, as the first verifier gave it

    # Discovery.

    async def watch(self) -> None:
        """Follow the registry until cancelled."""
        while True:
            try:
                self._reconcile(await self._source.pods())
            except Unavailable as error:
                log.debug("registry unreachable; the known pods stay", reason=str(error))
            self._poke.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._poke.wait()

    async def close(self) -> None:
        """End every link."""
        tasks = [peer.task for peer in self._peers.values() if peer.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._peers.clear()

    def _reconcile(self, records: Iterable[PodRecord]) -> None:
        live = {record.pod_id: record for record in records if record.tier in ("verifier", "speculator")}
        for pod_id, peer in list(self._peers.items()):
            peer.registered = pod_id in live
            if not peer.registered and peer.link is None:
                self._forget(peer)
        for pod_id, record in live.items():
            known = self._peers.get(pod_id)
            if known is None:
                peer = self._peers[pod_id] = Peer(record)
                peer.task = asyncio.create_task(self._keep(peer), name=f"link {pod_id}")
            elif record != known.record:
                known.record = record
                if known.link is not None:
                    known.link.take_record(record)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.record.pod_id]
        if peer.task is not None and peer.task is not asyncio.current_task():
            peer.task.cancel()

    # One pod's life.

    async def _keep(self, peer: Peer) -> None:
        while True:
            peer.state = "connecting"
            try:
                await self._serve(peer)
            except Incompatible as error:
                peer.state = f"refused: {error}"
                self._changed()
                self._say_once(peer, "pod refused", str(error))
                return  # for good: another process would have another pod id
            except Unavailable as error:
                self._metrics.unreachable += 1
                peer.failures += 1
                pause = min(RETRY_SECONDS[1], RETRY_SECONDS[0] * 2 ** min(peer.failures - 1, 10))
                log.info("pod unreachable", pod=peer.record.pod_id, tier=peer.record.tier, reason=str(error))
            except GraftreeError as error:
                pause = self._quarantine(peer, error)
            except Exception as error:
                log.exception("link failed", pod=peer.record.pod_id)
                pause = self._quarantine(peer, error)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return  # the call had just failed by itself, and its error came in the cancellation's place
            if not peer.registered:
                self._peers.pop(peer.record.pod_id, None)
                return
            await asyncio.sleep(pause * self._random.uniform(0.75, 1.25))

    async def _serve(self, peer: Peer) -> None:
        link_type = VerifierLink if peer.record.tier == "verifier" else SpeculatorLink
        link = link_type(peer.record, self._hello, self._config.connect_timeout_seconds, self._metrics)
        link.tls, link.on_change = self._tls, self._changed
        link.options = channel_options(self._config.lease_seconds)  # who is silent for a lease is gone
        try:
            await link.connect()
            self._check(peer, link)
            peer.link, peer.state, peer.failures = link, "ready", 0
            log.info("pod linked", pod=peer.record.pod_id, tier=peer.record.tier, kind=peer.record.kind)
            self._changed()
            await link.serve()
        finally:
            if peer.link is not None:
                peer.link = None
                self._changed()
            await link.close()

    def _quarantine(self, peer: Peer, error: Exception) -> float:
        peer.state = "quarantined"
        self._changed()
        peer.offences += 1
        self._metrics.quarantines += 1
        pause = self._config.quarantine_seconds * min(2 ** (peer.offences - 1), LONGEST_QUARANTINE)
        log.warning("pod quarantined", pod=peer.record.pod_id, seconds=pause, reason=str(error))
        return pause

    def _check(self, peer: Peer, link: AnyLink) -> None:
        """Raises Incompatible where the pod's vocabulary or model is not ours."""
        hello, name = link.hello, f"{peer.record.tier} {peer.record.pod_id}"
        theirs, ours = hello.vocab_fingerprint, self._vocab_fingerprint
        if theirs and ours and theirs != ours:
            raise Incompatible(f"{name} has vocabulary {theirs}, this router's tokenizer has {ours}")
        if peer.record.tier != "verifier":
            return
        if hello.vocab_size < 1:
            raise Incompatible(f"{name} names no vocabulary size")
        if self._verifiers() and hello.model_fingerprint != self._identity.model_fingerprint:
            served = self._identity.model_fingerprint
            raise Incompatible(f"{name} has model {hello.model_fingerprint}, this router serves {served}")
        self._identity = hello

    def _say_once(self, peer: Peer, event: str, reason: str) -> None:
        if event not in peer.said:
            peer.said.add(event)
            log.warning(event, pod=peer.record.pod_id, tier=peer.record.tier, reason=reason)

    def _changed(self) -> None:
        self.version += 1
        event, self._change = self._change, asyncio.Event()
        event.set()

    async def changed(self, since: int) -> None:
        """Wait until `version` is no longer `since`."""
        while self.version == since:
            await self._change.wait()

    # Choice.

    @property
    def identity(self) -> StreamHello:
        """Hello of the LLM that is, or was last, served; empty before the first verifier."""
        return self._identity

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self._identity.vocab_size, self._identity.max_context)

    @property
    def has_verifier(self) -> bool:
        return bool(self.verifiers())

    def verifiers(self) -> list[VerifierLink]:
        """Those that take sessions, full ones included."""
        links = [peer.link for peer in self._verifiers() if peer.usable]
        return [link for link in links if isinstance(link, VerifierLink)]

    @property
    def speculator_count(self) -> int:
        """Speculators that are linked."""
        return sum(isinstance(peer.link, SpeculatorLink) for peer in self._peers.values())

    def infos(self) -> list[GetModelInfoResponse.PodInfo]:
        return [peer.info() for _, peer in sorted(self._peers.items())]

    def _verifiers(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if isinstance(peer.link, VerifierLink)]

    def verifier(self, avoid: Collection[str] = ()) -> VerifierLink | None:
        """The least loaded verifier that takes a session; one that is silent or to avoid only without another."""
        ranked = [
            ((link.record.pod_id in avoid, link.silent, not peer.registered, link.sessions, link.record.pod_id), link)
            for peer in self._verifiers()
            if peer.usable and isinstance(link := peer.link, VerifierLink) and not link.full
        ]
        return min(ranked, key=lambda entry: entry[0])[1] if ranked else None

    async def some_verifier(self, avoid: Collection[str] = ()) -> VerifierLink:
        """As `verifier`, waiting for one up to connect_timeout_seconds.

        Raises:
            NoVerifier: none came.
            ResourceExhausted: all of them stayed full.
        """
        deadline = self._clock() + self._config.connect_timeout_seconds
        while (link := self.verifier(avoid)) is None:
            if (left := deadline - self._clock()) <= 0:
                if self.has_verifier:
                    raise ResourceExhausted("every verifier has all the sessions it takes")
                raise NoVerifier(f"no verifier takes sessions: {self._verifier_states()}")
            self._poke.set()
            with contextlib.suppress(TimeoutError):
                # A place that becomes free is no change of the set: look again now and then.
                async with asyncio.timeout(min(left, FULL_POLL_SECONDS)):
                    await self.changed(self.version)
        return link

    def _verifier_states(self) -> str:
        states = [f"{peer.record.pod_id} {peer.info().state}" for peer in self._peers.values()]
        return ", ".join(state for state in sorted(states)) or "none is registered"

    def speculators(self, length: int, avoid: Collection[str] = ()) -> dict[str, SpeculatorLink]:
        """The least loaded speculator of each kind, at most speculators_per_session kinds, in canonical order.

        Args:
            length: tokens of the session; speculators whose context it fills are left out.
            avoid: pod ids not to take.
        """
        chosen: dict[str, SpeculatorLink] = {}
        for peer in self._peers.values():
            link = peer.link
            if not isinstance(link, SpeculatorLink) or not peer.usable or link.full or link.record.pod_id in avoid:
                continue
            if 0 < link.hello.max_context <= length:
                self._say_once(peer, "speculator's context is too short for a session", f"{link.hello.max_context}")
                continue
            other = chosen.get(link.record.kind)
            if other is None or (link.sessions, link.record.pod_id) < (other.sessions, other.record.pod_id):
                chosen[link.record.kind] = link
        return {kind: chosen[kind] for kind in sorted(chosen)[: self._config.speculators_per_session]}
