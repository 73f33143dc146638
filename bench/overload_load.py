"""Load for `bench.overload`, from processes of its own: requests at a rate, many at once, and a light probe.

An event loop that sends hundreds of requests sees its own delays in every answer. So the rates come from several
processes, and how soon a request is refused is seen by one that waits for a single answer at a time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from graftree.client import AsyncClient
from graftree.errors import GraftreeError, ResourceExhausted

PROMPT_TOKENS = 4
BURST_TOKENS, BURST_SECONDS = 4, 120.0
CONNECTIONS = 4
PROBE_PAUSE_SECONDS = 0.04
PROBE_TOKENS = 100_000  # nobody could have them in time: the probe is refused and takes no place from the others

What = Literal["refused", "empty", "idle"]


@dataclass(frozen=True)
class Demand:
    """What every request asks for, and what a step of the stand-in takes.

    Attributes:
        tokens: of an answer.
        deadline: seconds.
        step_ms, row_ms: of a verify step, and of each session beyond the first.
    """

    tokens: int = 24
    deadline: float = 8.0
    step_ms: float = 80.0
    row_ms: float = 16.0

    @property
    def model(self) -> str:
        """URI of the stand-in."""
        return f"standin:?step_ms={self.step_ms:g}&row_ms={self.row_ms:g}&free_rows=1&vocab=512&context=4096"

    @property
    def capacity(self) -> float:
        """Answers per second that can be in time."""
        step = self.deadline / (self.tokens + 1)
        sessions = max(1, math.floor(1 + (1000 * step - self.step_ms) / self.row_ms))
        return sessions / self.deadline

    def options(self, rng: Random) -> dict[str, Any]:
        """Keywords of a request."""
        prompt = [rng.randrange(5, 250) for _ in range(PROMPT_TOKENS)]
        return {"token_ids": prompt, "max_new_tokens": self.tokens, "ignore_eos": True, "timeout": self.deadline}


@dataclass(frozen=True)
class Answer:
    """What became of a request.

    Attributes:
        at: when it was over, by time.monotonic.
        seconds: that it took.
        tokens: of a complete answer; 0 = there is none.
        error: the class of what came instead.
        retry_after: seconds, of a refusal.
    """

    at: float
    seconds: float
    tokens: int = 0
    error: str = ""
    retry_after: float = 0.0

    @property
    def refused(self) -> bool:
        return self.error == ResourceExhausted.__name__


@dataclass
class Seen:
    """What the probe saw.

    Attributes:
        seconds: of each call, by what was called: a request that is refused, an empty call to the router, and one to
            a server that does nothing else.
        let_in: requests that were not refused: nothing ran beside them.
        bare: refusals without a time to come again.
    """

    seconds: dict[What, list[float]] = field(default_factory=lambda: {"refused": [], "empty": [], "idle": []})
    let_in: int = 0
    bare: int = 0


async def ask(client: AsyncClient, options: dict[str, Any]) -> Answer:
    """One request, once."""
    began = time.monotonic()
    tokens, error, retry = 0, "", 0.0
    try:
        tokens = len((await client.generate(**options)).token_ids)
    except GraftreeError as refusal:
        error = type(refusal).__name__
        if isinstance(refusal, ResourceExhausted):
            retry = refusal.retry_after_s
    at = time.monotonic()
    return Answer(at, at - began, tokens, error, retry)


async def offer(targets: Sequence[str], demand: Demand, rate: float, until: float, rng: Random) -> list[Answer]:
    """Requests at random times, so many a second, until then (by time.monotonic)."""
    now = time.monotonic()
    asked: list[asyncio.Task[Answer]] = []
    async with AsyncClient(targets, reconnect=None) as client:
        while now < until:
            asked.append(asyncio.create_task(ask(client, demand.options(rng))))
            now += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, now - time.monotonic()))
        return await asyncio.gather(*asked)


async def burst(targets: Sequence[str], count: int, rng: Random) -> list[Answer]:
    """So many requests at once."""
    demand = Demand(tokens=BURST_TOKENS, deadline=BURST_SECONDS)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(targets, reconnect=None)) for _ in range(CONNECTIONS)]
        return await asyncio.gather(
            *(ask(clients[index % CONNECTIONS], demand.options(rng)) for index in range(count))
        )


async def probe(router: str, idle: str, demand: Demand, until: float, rng: Random) -> Seen:
    """One call at a time, of each kind in turn, with a pause between them."""
    seen = Seen()
    options = {**demand.options(rng), "max_new_tokens": PROBE_TOKENS}
    async with (
        AsyncClient(router, reconnect=None) as client,
        grpc.aio.insecure_channel(router) as near,
        grpc.aio.insecure_channel(idle) as far,
    ):
        empty = {"empty": health_pb2_grpc.HealthStub(near), "idle": health_pb2_grpc.HealthStub(far)}
        names: tuple[What, ...] = ("refused", "empty", "idle")
        while time.monotonic() < until:
            for name in names:
                if name == "refused":
                    answer = await ask(client, options)
                    seen.let_in += not answer.refused
                    seen.bare += answer.refused and answer.retry_after <= 0
                    if answer.refused:
                        seen.seconds[name].append(answer.seconds)
                else:
                    began = time.monotonic()
                    await empty[name].Check(health_pb2.HealthCheckRequest())
                    seen.seconds[name].append(time.monotonic() - began)
                await asyncio.sleep(PROBE_PAUSE_SECONDS)
    return seen


# What a child process is given to do.


def offering(targets: Sequence[str], demand: Demand, rate: float, until: float, seed: int) -> list[Answer]:
    """`offer`, on an event loop of its own."""
    return asyncio.run(offer(targets, demand, rate, until, Random(seed)))


def bursting(targets: Sequence[str], count: int, seed: int) -> list[Answer]:
    """`burst`, likewise."""
    return asyncio.run(burst(targets, count, Random(seed)))


def probing(router: str, idle: str, demand: Demand, until: float, seed: int) -> Seen:
    """`probe`, likewise."""
    return asyncio.run(probe(router, idle, demand, until, Random(seed)))
