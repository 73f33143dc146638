"""Who is there: pods register under a lease and are gone when they stop renewing it.

    graftree:v1:{registry}:pods     hash        pod id -> record, as JSON
    graftree:v1:{registry}:leases   sorted set  pod id -> end of its lease, ms of Redis' own clock

A pod that does not fit the live verifiers is refused with the reason: a verifier with another model (sessions
could not move to it), a speculator with another vocabulary (its tokens would mean other text). Fingerprints of
vocabularies leave padding out, so a padded embedding fits; an empty one fits anything.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError
from redis.asyncio import Redis

from graftree.errors import Incompatible, InvalidArgument, ResourceExhausted
from graftree.store.connection import translated
from graftree.store.script import Script
from graftree.store.sessions import SCHEMA

KEYS = (f"{SCHEMA}:{{registry}}:pods", f"{SCHEMA}:{{registry}}:leases")
MAX_PODS = 4096
MAX_RECORD_BYTES = 16_384

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
Fingerprint = Annotated[str, Field(max_length=128)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class PodRecord:
    """What a pod says about itself.

    Attributes:
        pod_id: unique per process.
        tier: which service it is.
        kind: drafter spec of a speculator, model of a verifier or router.
        address: host:port that other tiers reach it at.
        model_fingerprint: empty for a router or a model-free drafter.
        vocab_fingerprint: of the token table without padding; empty = works with any.
        vocab_size: rows of its embedding, or tokens it can draft; 0 = any.
        max_context: longest sequence its model takes, in tokens; 0 = any.
        max_sessions: sessions it takes; 0 = not limited.
        sessions: sessions open on it.
        draining: takes no new sessions.
        llm_identity: of a verifier's LLM whatever its dtype, or of the LLM that a speculator's SSM was made for;
            empty = for any.
    """

    pod_id: Name
    tier: Literal["router", "verifier", "speculator"]
    kind: Annotated[str, Field(max_length=1024)]
    address: Annotated[str, Field(min_length=1, max_length=512)]
    model_fingerprint: Fingerprint = ""
    vocab_fingerprint: Fingerprint = ""
    vocab_size: Count = 0
    max_context: Count = 0
    max_sessions: Count = 0
    sessions: Count = 0
    draining: bool = False
    llm_identity: Fingerprint = ""


# Unknown fields are ignored: a newer pod may say more.
_RECORD: TypeAdapter[PodRecord] = TypeAdapter(PodRecord)


class Registry:
    """Every method raises Unavailable where Redis cannot be reached, and may then be repeated.

    Args:
        redis: from `graftree.store.connection.connect`.
        lease_seconds: a pod that has not renewed for this long is gone.

    Attributes:
        malformed: records of others that were skipped because they do not parse.
    """

    def __init__(self, redis: Redis, *, lease_seconds: float) -> None:
        if not (math.isfinite(lease_seconds) and 0.001 <= lease_seconds <= 86_400):
            raise InvalidArgument("lease_seconds", lease_seconds, "0.001 to 86400 seconds")
        self.redis = redis
        self.lease_seconds = lease_seconds
        self.malformed = 0
        self._renew = Script("registry_renew")
        self._pods = Script("registry_pods")
        self._unregister = Script("registry_unregister")

    async def register(self, record: PodRecord) -> None:
        """Enter a pod, or replace what an earlier life of the same pod id entered.

        Raises:
            Incompatible: does not fit the live verifiers; names what differs, both fingerprints and the verifier.
            InvalidArgument: a field of the record is outside its limit.
            ResourceExhausted: MAX_PODS are registered.
        """
        text = _encode(record)
        arguments = (
            record.pod_id,
            text,
            math.ceil(self.lease_seconds * 1000),
            record.tier,
            record.model_fingerprint,
            record.vocab_fingerprint,
            MAX_PODS,
            record.llm_identity,
        )
        with translated():
            reply = await self._renew.run(self.redis, KEYS, arguments)
        if reply[0] == b"UNFIT":
            raise Incompatible(_misfit(record, *(part.decode() for part in reply[1:4])))
        if reply[0] == b"FULL":
            raise ResourceExhausted(f"{MAX_PODS} pods are registered", self.lease_seconds)

    async def renew(self, record: PodRecord) -> None:
        """Extend the lease and update the record; enters it again after an empty restart. Raises as `register`."""
        await self.register(record)

    async def unregister(self, pod_id: str) -> None:
        """Forget a pod at once. Nothing happens if it is not there."""
        with translated():
            await self._unregister.run(self.redis, KEYS, (pod_id,))

    async def pods(self, tier: str | None = None) -> list[PodRecord]:
        """Live pods, of one tier or of all, by tier and pod id."""
        with translated():
            reply = await self._pods.run(self.redis, KEYS, ())
        found = [self._decode(key, text) for key, text in zip(reply[::2], reply[1::2], strict=True)]
        chosen = [pod for pod in found if pod is not None and tier in (None, pod.tier)]
        return sorted(chosen, key=lambda pod: (pod.tier, pod.pod_id))

    def _decode(self, key: bytes, text: bytes) -> PodRecord | None:
        try:
            if len(text) > MAX_RECORD_BYTES:
                raise ValueError("too long")
            record = _RECORD.validate_json(text, strict=True)
            if record.pod_id.encode() != key:
                raise ValueError("filed under another id")
        except ValueError:
            self.malformed += 1
            return None
        return record


def _encode(record: PodRecord) -> str:
    text = json.dumps(dataclasses.asdict(record), separators=(",", ":"), ensure_ascii=False)
    try:
        _RECORD.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument(f"pod.{field}", first["input"], first["msg"]) from None
    return text


def _misfit(record: PodRecord, verifier: str, theirs: str, what: str) -> str:
    if record.tier == "verifier":
        return (
            f"verifier {record.pod_id} has model {record.model_fingerprint}, but verifier {verifier} serves model "
            f"{theirs}: sessions could not move between them"
        )
    if what == "llm":
        return (
            f"speculator {record.pod_id} ({record.kind}) was made for the LLM {record.llm_identity}, but verifier "
            f"{verifier} serves {theirs}"
        )
    return (
        f"speculator {record.pod_id} ({record.kind}) has vocabulary {record.vocab_fingerprint}, but verifier "
        f"{verifier} has vocabulary {theirs}: its token ids would mean other text"
    )
