"""Nonsense against every port of a stack: `python -m tests.fuzz --seconds 60`.

Raw bytes (as they come, and behind a proper HTTP/2 preface), messages that parse and mean nothing, and proper streams
that break off or repeat themselves. Afterwards the stack must answer as before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from graftree.v1 import common_pb2, generation_pb2, speculation_pb2, verification_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
METHODS: dict[str, type[Message]] = {
    "/graftree.v1.GenerationService/Generate": generation_pb2.GenerateRequest,
    "/graftree.v1.GenerationService/GetModelInfo": generation_pb2.GetModelInfoRequest,
    "/graftree.v1.SpeculationService/Speculate": speculation_pb2.SpeculateRequest,
    "/graftree.v1.VerificationService/Verify": verification_pb2.VerifyRequest,
    "/grpc.health.v1.Health/Check": generation_pb2.GetModelInfoRequest,
    "/graftree.v1.Nobody/Nothing": generation_pb2.GetModelInfoRequest,
}
STREAMS = {name for name in METHODS if name.endswith(("Speculate", "Verify"))}
NUMBERS = (0, 1, -1, 2, 7, 63, 64, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), (1 << 32) - 1, (1 << 63) - 1, 1 << 40)


@dataclass
class Tally:
    """What was tried, and how often."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1


def message(cls: type[Message], source: random.Random, depth: int = 0) -> Message:
    """A message of this type with random fields, most of them out of range."""
    built = cls()
    for each in cls.DESCRIPTOR.fields:
        if source.random() < 0.4 + 0.1 * depth:
            continue
        for _ in range(source.choice((0, 1, 2, 9)) if each.is_repeated else 1):
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                _set(built, each, source, depth)
    return built


def _set(built: Any, each: FieldDescriptor, source: random.Random, depth: int) -> None:
    if each.type == FieldDescriptor.TYPE_MESSAGE:
        if depth > 3 or each.message_type.GetOptions().map_entry:
            return
        child = message(each.message_type._concrete_class, source, depth + 1)
        target = getattr(built, each.name)
        target.append(child) if each.is_repeated else target.CopyFrom(child)
        return
    value: Any
    if each.type == FieldDescriptor.TYPE_STRING:
        value = source.choice(("", "x", "\0", "a" * 3000, "s.1", "\U0001f600" * 40, '{"type": "object"}', "("))
    elif each.type == FieldDescriptor.TYPE_BYTES:
        value = source.randbytes(40)
    elif each.type == FieldDescriptor.TYPE_BOOL:
        value = source.random() < 0.5
    elif each.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        value = source.choice((0.0, -1.0, 0.5, 1e30, float("inf"), float("nan")))
    else:
        value = source.choice(NUMBERS)
    if each.is_repeated:
        getattr(built, each.name).append(value)
    else:
        setattr(built, each.name, value)


async def raw_bytes(address: str, source: random.Random, tally: Tally) -> None:
    """A connection that is none."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                start = source.choice((b"", PREFACE, b"GET /metrics HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00"))
                writer.write(start + source.randbytes(source.choice((0, 1, 9, 300, 70_000))))
                await writer.drain()
                if source.random() < 0.5:
                    await reader.read(100)
            finally:
                writer.close()
                await writer.wait_closed()
    tally.add("raw bytes")


async def nonsense(channel: grpc.aio.Channel, source: random.Random, tally: Tally) -> None:
    """A call whose messages are random: bytes that do not parse, or fields that mean nothing."""
    name, cls = source.choice(list(METHODS.items()))
    bodies = []
    for index in range(source.choice((0, 1, 3)) if name in STREAMS else 1):
        body = source.randbytes(source.choice((0, 3, 100)))
        if source.random() < 0.8:
            built = message(cls, source)
            if name in STREAMS and index == 0 and source.random() < 0.8:
                hello = common_pb2.StreamHello(revision=1, pod_id="fuzz")
                built.hello.CopyFrom(hello)  # type: ignore[attr-defined]
                built.credits = 100  # type: ignore[attr-defined]
            body = built.SerializeToString()
        if source.random() < 0.2 and body:
            cut = source.randrange(len(body))
            body = body[:cut] + source.randbytes(4) + body[cut + 4 :]
        bodies.append(body)
    key = source.choice((None, None, "Bearer nobody", "x" * 4000))
    metadata = [] if key is None else [("authorization", key), ("traceparent", "00-" + "f" * 52)]

    async def send() -> AsyncIterator[bytes]:
        for body in bodies:
            yield body
            await asyncio.sleep(source.random() * 0.01)

    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError, DecodeError, TimeoutError):
        async with asyncio.timeout(source.choice((0.02, 0.3))):
            if name in STREAMS:
                async for _ in channel.stream_stream(name)(send(), metadata=metadata):
                    pass
            else:
                async for _ in channel.unary_stream(name)(bodies[0], metadata=metadata):
                    pass
    tally.add(name.rpartition("/")[2])


async def fuzz(addresses: list[str], others: list[str], *, seconds: float, seed: int, width: int = 4) -> Tally:
    """Keep `width` tasks at it.

    Args:
        addresses: HOST:PORT of gRPC servers.
        others: of servers of something else, which get raw bytes only.
    """
    tally, ends = Tally(), time.monotonic() + seconds

    async def worker(number: int) -> None:
        source = random.Random(seed * 1000 + number)
        while time.monotonic() < ends:
            if source.random() < 0.3:
                await raw_bytes(source.choice([*addresses, *others]), source, tally)
                continue
            async with grpc.aio.insecure_channel(source.choice(addresses)) as channel:
                for _ in range(source.randrange(1, 12)):
                    await nonsense(channel, source, tally)

    await asyncio.gather(*(worker(number) for number in range(width)))
    return tally


def main() -> None:
    """Start a stack of processes, fuzz all its ports, see that it answers as before and has lost nothing."""
    from tests.test_security_fuzz import run

    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print(run(seconds=chosen.seconds, seed=chosen.seed))


if __name__ == "__main__":
    main()
