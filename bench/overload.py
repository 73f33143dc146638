"""Five times what can be served: does the work that is done stay worth something, and how soon is the rest refused?

    python -m bench.overload [--seconds 30] [--burst 3000] [--json FILE] [--quick]

Requests of one length and one deadline arrive at random (Poisson) at rates from half of what a stand-in verifier can
serve in time up to five times that; nobody tries again. Goodput is tokens per second of answers that were complete
within their deadline. Then so many requests at once as --burst says, three times over.

Capacity follows from the stand-in: c sessions share a step of step_ms + (c - 1) * row_ms, and c is the largest number
with which an answer is still in time.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from bench.report import Report, parser
from bench.tables import Table
from bench.vitals import pid_of, resident
from graftree.client import AsyncClient
from graftree.errors import GraftreeError, ResourceExhausted
from graftree.local_stack import LocalStack

LEVELS = (0.5, 1.0, 1.5, 2.0, 5.0)  # of the capacity
PROMPT_TOKENS = 4
BURSTS = 3
BURST_TOKENS, BURST_SECONDS = 4, 120.0
CONNECTIONS = 4
ROUTER = {"replay_seconds": 1.0, "max_requests": 64}  # what is kept for later is no leak


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


@dataclass
class Level:
    """A stretch of load at one rate. `began`, `until`: the stretch that counts, by time.monotonic."""

    rate: float
    began: float
    until: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Tokens per second of answers that were complete in time."""
        tokens = sum(answer.tokens for answer in self.answers if self.began <= answer.at < self.until)
        return tokens / (self.until - self.began)

    @property
    def refusals(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error == ResourceExhausted.__name__]

    @property
    def errors(self) -> Counter[str]:
        """By class; refusals among them."""
        return Counter(answer.error for answer in self.answers if answer.error)

    def row(self) -> list[float]:
        """Of the table."""
        done = [answer.seconds for answer in self.answers if answer.tokens]
        late = sum(self.errors.values()) - len(self.refusals)
        refused = [1000 * answer.seconds for answer in self.refusals]
        return [self.rate, self.goodput, len(done), late, len(refused), quantile(done, 50), quantile(refused, 99)]


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


async def offer(target: str, demand: Demand, rate: float, seconds: float, rng: Random) -> Level:
    """Requests at a rate for so many seconds, behind a deadline's worth that does not count."""
    now = time.monotonic()
    level = Level(rate, now + demand.deadline, now + demand.deadline + seconds)
    asked: list[asyncio.Task[Answer]] = []
    async with AsyncClient(target, reconnect=None) as client:
        while now < level.until:
            asked.append(asyncio.create_task(ask(client, demand.options(rng))))
            now += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, now - time.monotonic()))
        level.answers = await asyncio.gather(*asked)
    return level


async def burst(target: str, count: int, rng: Random) -> list[Answer]:
    """So many requests at once."""
    demand = Demand(tokens=BURST_TOKENS, deadline=BURST_SECONDS)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(target, reconnect=None)) for _ in range(CONNECTIONS)]
        return await asyncio.gather(
            *(ask(clients[index % CONNECTIONS], demand.options(rng)) for index in range(count))
        )


async def run(options: argparse.Namespace, demand: Demand, stack: LocalStack, report: Report) -> None:
    """All levels, then the bursts."""
    rng = Random(options.seed)
    levels = [
        await offer(stack.target, demand, share * demand.capacity, options.seconds, rng) for share in options.levels
    ]
    columns = ("rate/s", "goodput", "in time", "late", "refused", "p50 s", "ms p99")
    names = {f"{share:g}x": level for share, level in zip(options.levels, levels, strict=True)}
    table = Table.of("load", columns, list(names), lambda name: names[name].row())
    print(table)
    report.details["levels"] = table.details()
    peak, most = max(level.goodput for level in levels), levels[-1]
    report.add("capacity by the stand-in", demand.capacity, "requests/s")
    report.add("highest goodput", peak, "tokens/s")
    kept = most.goodput / peak if peak else math.nan
    report.add(f"goodput at {options.levels[-1]:g}x over the highest", kept, "", ">= 0.90", kept >= 0.9)
    times = [1000 * answer.seconds for answer in most.refusals]
    p99 = quantile(times, 99)
    report.add("refusals p50", quantile(times, 50), "ms")
    report.add("refusals p99", p99, "ms", "< 20", p99 < 20)
    bare = sum(answer.retry_after <= 0 for level in levels for answer in level.refusals)
    report.add("refusals without RetryInfo", bare, "", "0", bare == 0)
    await _bursts(options, stack, report, rng)


async def _bursts(options: argparse.Namespace, stack: LocalStack, report: Report, rng: Random) -> None:
    router = pid_of(next(pod for pod in stack.pods("router") if pod.alive))
    answers: list[Answer] = []
    held: list[float] = []
    for _ in range(BURSTS):
        answers += await burst(stack.target, options.burst, rng)
        await asyncio.sleep(1.0)  # what the connections left is gone
        held.append(resident(router))
    errors = Counter(answer.error for answer in answers)
    refused = ResourceExhausted.__name__
    others = {name: count for name, count in errors.items() if name not in ("", refused)}
    report.add(f"bursts of {options.burst}: answered", errors[""])
    report.add(f"bursts of {options.burst}: refused", errors[refused])
    report.add("anything else, CANCELLED for instance", sum(others.values()), "", "0", not others)
    bare = sum(answer.error == refused and answer.retry_after <= 0 for answer in answers)
    report.add("of them refused without RetryInfo", bare, "", "0", bare == 0)
    grown = held[-1] - held[0]
    report.add("router's memory after the first burst", held[0], "MB")
    report.add("grown by the last one", grown, "MB", "< 8", grown < 8)
    report.details["burst"] = {"errors": others, "resident_mb": [round(each, 1) for each in held]}


def quantile(values: Sequence[float], percent: float) -> float:
    """NaN for none."""
    return float(np.percentile(values, percent)) if values else math.nan


def main(arguments: Sequence[str] | None = None, *, in_process: bool = False) -> int:
    """Measure and report; 1 where a target was missed."""
    flags = parser(__doc__ or "")
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--seconds", type=float, help="of each level (default: 30; --quick: 3)")
    flags.add_argument("--levels", type=float, nargs="+", help="shares of the capacity")
    flags.add_argument("--burst", type=int, help="requests at once (default: 3000; --quick: 300)")
    flags.add_argument("--tokens", type=int, default=Demand.tokens, help="of an answer")
    flags.add_argument("--deadline", type=float, default=Demand.deadline, help="seconds")
    flags.add_argument("--step-ms", type=float, default=Demand.step_ms, help="a step of one session")
    flags.add_argument("--row-ms", type=float, default=Demand.row_ms, help="what each further session adds")
    flags.add_argument("--seed", type=int, default=0)
    options = flags.parse_args(arguments)
    options.seconds = options.seconds or (3.0 if options.quick else 30.0)
    options.levels = options.levels or ((1.0, 5.0) if options.quick else LEVELS)
    options.burst = options.burst or (300 if options.quick else 3000)
    demand = Demand(options.tokens, options.deadline, options.step_ms, options.row_ms)
    report = Report("overload: goodput, refusals, bursts")
    with LocalStack(demand.model, [], in_process=in_process, threads=1, router_options=ROUTER) as stack:
        asyncio.run(run(options, demand, stack, report))
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
