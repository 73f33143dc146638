"""Calls for `bench.fuzz`: gRPC as it should be, with messages, metadata and ends as they should not."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random

import grpc

from bench.fuzz_messages import Method, dialogue, greeting, hostile, many, spoilt
from bench.fuzz_record import Recordings
from graftree.rpc.options import MAX_MESSAGE_BYTES

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_metadata_size", 1 << 20),
]
PATIENCE_SECONDS = (0.02, 0.3, 1.0)
ENTRIES = (1000, 100_000, 1_000_000)
BOMB_BYTES = 64 << 20  # of zeros; 64 KB as they travel
METADATA: tuple[list[tuple[str, str | bytes]], ...] = (
    [],
    [],
    [("authorization", "Bearer nobody"), ("traceparent", "00-" + "f" * 52)],
    [("authorization", "x" * 4000)],
    [("traceparent", "~" * 300)],
    [("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-00")] * 2,
    [("a-bin", bytes(range(256)))],
    [(f"k{index}", "v" * 100) for index in range(60)],
    [("grpc-timeout", "1n")],
    [("k", "v" * 20_000)],
)
Bodies = Callable[[Method, Random], list[bytes]]


class Caller:
    """Makes bad calls of the methods that a port has.

    Args:
        methods: of the port; others are tried now and then all the same.
        recordings: what was once said to each service.

    Attributes:
        codes: of the answers, by name.
        odd: answers that only an exception nobody expected gives, with the method: once each.
    """

    def __init__(self, methods: Sequence[Method], recordings: Recordings) -> None:
        self.codes: Counter[str] = Counter()
        self.odd: set[str] = set()
        self._methods, self._recordings = list(methods), recordings
        self._kinds: dict[str, tuple[int, Bodies]] = {
            "hostile messages": (40, dialogue),
            "real messages, spoilt": (40, self._recorded),
            "bytes": (10, lambda method, rng: [rng.randbytes(rng.choice((0, 3, 100, 5000)))]),
            "too long": (1, _long),
            "very many entries": (1, _entries),
        }

    async def call(self, channel: grpc.aio.Channel, rng: Random) -> str:
        """One bad call; returns its kind."""
        if rng.random() < 0.01:
            await self._carry(channel, rng.choice(self._methods), [bytes(BOMB_BYTES)], rng, compressed=True)
            return "compressed zeros"
        weights = [weight for weight, _ in self._kinds.values()]
        kind = rng.choices(list(self._kinds), weights)[0]
        method = rng.choice(self._methods)
        bodies = self._kinds[kind][1](method, rng)
        if rng.random() < 0.03:
            method = Method("/graftree.v1.Nobody/Nothing", method.request, method.streams)
        await self._carry(channel, method, bodies, rng)
        return kind

    def _recorded(self, method: Method, rng: Random) -> list[bytes]:
        calls = self._recordings.get(method.service)
        if not calls or rng.random() < 0.05:
            return [greeting(hostile(method.request, rng)).SerializeToString()]
        call = rng.choice(calls)
        return spoilt(call[: rng.randrange(1, len(call) + 1)], method.request, rng)

    async def _carry(
        self,
        channel: grpc.aio.Channel,
        method: Method,
        bodies: Sequence[bytes],
        rng: Random,
        *,
        compressed: bool = False,
    ) -> None:
        """Send all that there is, read what comes, and leave in the middle of it as often as not."""
        pauses = rng.choice((0.0, 0.0, 0.01))

        async def send() -> AsyncIterator[bytes]:
            for body in bodies:
                yield body
                await asyncio.sleep(pauses * rng.random())
            await asyncio.sleep(rng.choice((0.0, 0.2)))

        compression = grpc.Compression.Gzip if compressed else None
        metadata = grpc.aio.Metadata(*rng.choice(METADATA))
        patience = 10.0 if compressed else rng.choice(PATIENCE_SECONDS)
        call = channel.stream_stream(method.path)(
            send(), metadata=metadata, compression=compression, timeout=rng.choice((None, 0.001, patience))
        )
        try:
            async with asyncio.timeout(patience):
                async for _ in call:
                    pass
            self._note(method, await call.code(), await call.details())
        except grpc.RpcError as error:
            self._note(method, error.code(), error.details())
        except (TimeoutError, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self.codes["left"] += 1
        finally:
            call.cancel()

    def _note(self, method: Method, code: grpc.StatusCode, details: str | None) -> None:
        self.codes[code.name] += 1
        if code is grpc.StatusCode.UNKNOWN or (
            code is grpc.StatusCode.INTERNAL and "unexpected" in (details or "").lower()
        ):
            self.odd.add(f"{method.path}: {code.name}: {(details or '')[:200]}")


def _long(method: Method, rng: Random) -> list[bytes]:
    """A message at the limit of its size, or beyond it."""
    start = greeting(hostile(method.request, rng)).SerializeToString()
    size = rng.choice((MAX_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES // 2)) - len(start)
    return [start + rng.randbytes(1024) * (size // 1024 + 1)]


def _entries(method: Method, rng: Random) -> list[bytes]:
    """Messages that are small for what they make of themselves."""
    with contextlib.suppress(ValueError):
        return [many(method.request, rng.choice(ENTRIES))]
    return []
