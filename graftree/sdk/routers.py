"""`Routers`: what `Client` and `AsyncClient` share: where the routers are and how they are asked."""

from __future__ import annotations

import itertools
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from random import Random, SystemRandom
from typing import Any

import grpc

from graftree.errors import InvalidArgument
from graftree.rpc.options import CHANNEL_OPTIONS, channel_options
from graftree.sdk.journey import Journey
from graftree.sdk.metadata import metadata
from graftree.sdk.options import GenerateOptions, build_request
from graftree.sdk.reconnect import Reconnect
from graftree.v1.generation_pb2 import GetModelInfoRequest
from graftree.v1.generation_pb2_grpc import GenerationServiceStub

RECONNECT = Reconnect()


class Routers(ABC):
    """Connections to one router or several.

    Args:
        target: HOST:PORT or any other gRPC name (a DNS name may stand for many routers); several of them in a list or
            with commas between them. Generations begin at one after the other.
        credentials: for TLS; None = plaintext.
        api_key: shown with each call; without TLS everybody on the way can read it.
        reconnect: how a generation goes on whose router is lost; None = not at all, the error is the caller's.
        stall_seconds: a router that answers no ping for about so long is lost, 0.5 or more; None = 15.
        rng: of request ids, jitter and the router to begin with; None = the system's.
        clock: seconds, monotonic.

    Raises:
        InvalidArgument: names what is out of range.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        reconnect: Reconnect | None = RECONNECT,
        stall_seconds: float | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.targets = _targets(target)
        self._credentials, self._api_key = credentials, api_key
        self._reconnect, self._clock = reconnect, clock
        self._rng = rng or SystemRandom()
        self._channel_options = _channel_options(stall_seconds)
        self._turns: Iterator[int] = itertools.count(self._rng.randrange(len(self.targets)))
        self._channels: dict[int, Any] = {}
        self._lock = threading.Lock()

    @property
    def target(self) -> str:
        """The first of the targets."""
        return self.targets[0]

    @abstractmethod
    def _dial(self, target: str) -> Any:
        """A channel."""

    def _stub(self, index: int) -> GenerationServiceStub:
        with self._lock:  # made at first use: a channel of asyncio binds to the running loop
            if index not in self._channels:
                self._channels[index] = self._dial(self.targets[index])
            return GenerationServiceStub(self._channels[index])

    def _stubs_in_turn(self) -> list[GenerationServiceStub]:
        first, count = next(self._turns), len(self.targets)
        return [self._stub((first + index) % count) for index in range(count)]

    def _journey(self, prompt: str | None, options: GenerateOptions) -> Journey:
        return Journey(
            build_request(prompt, options),
            targets=len(self.targets),
            first=next(self._turns),
            policy=self._reconnect,
            rng=self._rng,
            clock=self._clock,
            timeout=options.get("timeout"),
        )

    def _open(self, journey: Journey) -> Any:
        stub = self._stub(journey.target)
        return stub.Generate(journey.request, timeout=journey.remaining, metadata=metadata(self._api_key))

    def _ask(self, stub: GenerationServiceStub, timeout: float | None) -> Any:
        return stub.GetModelInfo(GetModelInfoRequest(), timeout=timeout, metadata=metadata(self._api_key))


def _targets(target: str | Sequence[str]) -> tuple[str, ...]:
    parts = target.split(",") if isinstance(target, str) else target
    found = tuple(part.strip() for part in parts)
    if not found or not all(found):
        raise InvalidArgument("target", target, "HOST:PORT, or several of them")
    for part in found:
        if (port := _port(part)) is not None and not 1 <= port <= 65535:  # gRPC would take its last 16 bits
            raise InvalidArgument("target", part, "HOST:PORT with a port from 1 to 65535")
    return found


def _port(target: str) -> int | None:
    """The number behind a target's last colon; None where that is no port."""
    if target.startswith(("unix:", "unix-abstract:", "vsock:")):
        return None
    host, _, digits = target.rpartition("/")[2].rpartition(":")
    if ":" in host and not host.endswith("]") and not re.match(r"(dns|ipv4):", host):  # an IPv6 address alone
        return None
    return int(digits) if re.fullmatch(r"-?[0-9]{1,100}", digits) and host else None


def _channel_options(stall_seconds: float | None) -> list[tuple[str, int]]:
    if stall_seconds is None:
        return CHANNEL_OPTIONS
    if not 0.5 <= stall_seconds <= 3600:
        raise InvalidArgument("stall_seconds", stall_seconds, "0.5 to 3600 seconds")
    options = dict(channel_options(stall_seconds))
    # The first is also how long a connection may take to come about.
    options["grpc.min_reconnect_backoff_ms"] = options["grpc.max_reconnect_backoff_ms"] = round(stall_seconds * 1000)
    return list(options.items())
