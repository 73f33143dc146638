"""Five times what can be served: does the work that is done stay worth something, and how soon is the rest refused?

    python -m bench.overload [--seconds 30] [--burst 3000] [--routers 1] [--json FILE] [--quick]

Requests of one length and one deadline arrive at random (Poisson) at rates from half of what a stand-in verifier can
serve in time up to five times that; nobody tries again. Goodput is tokens per second of answers that were complete
within their deadline. Then so many requests at once as --burst says, three times over.

Capacity follows from the stand-in: c sessions share a step of step_ms + (c - 1) * row_ms, and c is the largest number
with which an answer is still in time.

The load comes from --loaders processes. How soon a request is refused is what a probe in a process of its own sees,
which waits for one answer at a time; beside it an empty call to the router, and one to a server that does nothing
else, which tells what the machine adds. The router's own time is what its audit log says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2_grpc

from bench.overload_load import Answer, Demand, Seen, bursting, offering, probing
from bench.report import Report, parser
from bench.tables import Table
from bench.vitals import pid_of, resident, spent
from graftree.errors import ResourceExhausted
from graftree.local_stack import LocalStack

LEVELS = (0.5, 1.0, 1.5, 2.0, 5.0)  # of the capacity
BURSTS = 3
ROUTER = {"replay_seconds": 1.0, "max_requests": 64}  # what is kept for later is no leak
REFUSED = ResourceExhausted.__name__


@dataclass
class Level:
    """A stretch of load at one rate. `began`, `until`: the stretch that counts, by time.monotonic."""

    rate: float
    began: float
    until: float
    answers: list[Answer] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)
    cpu: float = 0.0  # share of a core that the routers took

    @property
    def goodput(self) -> float:
        """Tokens per second of answers that were complete in time."""
        tokens = sum(answer.tokens for answer in self.answers if self.began <= answer.at < self.until)
        return tokens / (self.until - self.began)

    @property
    def refusals(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.refused]

    @property
    def errors(self) -> Counter[str]:
        """By class; refusals among them."""
        return Counter(answer.error for answer in self.answers if answer.error)

    def row(self) -> list[float]:
        """Of the table."""
        done = [answer.seconds for answer in self.answers if answer.tokens]
        late = sum(self.errors.values()) - len(self.refusals)
        times = [1000 * quantile(self.seen.seconds[name], 99) for name in ("refused", "empty", "idle")]
        return [self.rate, self.goodput, len(done), late, len(self.refusals), quantile(done, 50), *times, self.cpu]


class Lab:
    """A stack, and the processes that put load on it.

    Args:
        idle: HOST:PORT of a server that does nothing else.
        loaders: processes that send requests; there is one more, for the probe.
    """

    def __init__(self, stack: LocalStack, idle: str, demand: Demand, loaders: int, rng: Random) -> None:
        self.targets = stack.targets
        self._pids = [pid_of(pod) for pod in stack.pods("router")]
        self._idle, self._demand, self._rng = idle, demand, rng
        self._loaders = loaders
        self._pool = ProcessPoolExecutor(loaders + 1, mp_context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> Lab:
        list(self._pool.map(_begin, range(self._loaders + 1)))  # started and imported before anything is timed
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    @property
    def resident(self) -> float:
        """MB of all routers."""
        return sum(map(resident, self._pids))

    def level(self, rate: float, seconds: float) -> Level:
        """Load at a rate, behind a deadline's worth that does not count."""
        now = time.monotonic()
        level = Level(rate, now + self._demand.deadline, now + self._demand.deadline + seconds)
        cpu = sum(map(spent, self._pids))
        parts = [
            self._pool.submit(
                offering, self.targets, self._demand, rate / self._loaders, level.until, self._rng.getrandbits(32)
            )
            for _ in range(self._loaders)
        ]
        time.sleep(self._demand.deadline)
        seen = self._pool.submit(probing, self.targets[0], self._idle, self._demand, level.until, 0)
        level.answers = [answer for part in parts for answer in part.result()]
        level.seen = seen.result()
        level.cpu = (sum(map(spent, self._pids)) - cpu) / (time.monotonic() - now)
        return level

    def burst(self, count: int) -> list[Answer]:
        """So many requests at once, of all loaders together."""
        shares = [count // self._loaders + (index < count % self._loaders) for index in range(self._loaders)]
        parts = [self._pool.submit(bursting, self.targets, share, self._rng.getrandbits(32)) for share in shares]
        return [answer for part in parts for answer in part.result()]


def _begin(number: int) -> int:
    time.sleep(0.5)  # the others are started meanwhile
    return number


@contextlib.contextmanager
def idle_server() -> Iterator[str]:
    """HOST:PORT of a gRPC server in a process of its own that has nothing to do."""
    context: Any = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    process = context.Process(target=_serve_idly, args=(addresses,), daemon=True)
    process.start()
    try:
        yield addresses.get(timeout=60)
    finally:
        process.kill()
        process.join()


def _serve_idly(addresses: Any) -> None:
    async def serve() -> None:
        server = grpc.aio.server()
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        addresses.put(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    asyncio.run(serve())


def run(options: argparse.Namespace, lab: Lab, demand: Demand, audit: Path, report: Report) -> None:
    """All levels, then the bursts."""
    levels = [lab.level(share * demand.capacity, options.seconds) for share in options.levels]
    own = refused_within(audit)
    columns = ("rate/s", "goodput", "in time", "late", "refused", "p50 s", "refusal", "empty", "idle", "router")
    names = {f"{share:g}x": level for share, level in zip(options.levels, levels, strict=True)}
    table = Table.of("load; refusal, empty call, idle server: ms p99", columns, list(names), lambda n: names[n].row())
    print(table)
    report.details["levels"] = table.details()
    peak, most = max(level.goodput for level in levels), levels[-1]
    report.add("capacity by the stand-in", demand.capacity, "requests/s")
    report.add("highest goodput", peak, "tokens/s")
    kept = most.goodput / peak if peak else math.nan
    report.add(f"goodput at {options.levels[-1]:g}x over the highest", kept, "", ">= 0.90", kept >= 0.9)
    _refusals(report, most, own)
    bare = sum(answer.retry_after <= 0 for level in levels for answer in level.refusals)
    bare += sum(level.seen.bare for level in levels)
    report.add("refusals without RetryInfo", bare, "", "0", bare == 0)
    _bursts(options, lab, report)


def _refusals(report: Report, level: Level, own: Sequence[float]) -> None:
    times = {name: [1000 * each for each in seconds] for name, seconds in level.seen.seconds.items()}
    p99 = quantile(times["refused"], 99)
    report.add("refusals seen by the probe", len(times["refused"]))
    report.add("refusals p50", quantile(times["refused"], 50), "ms")
    report.add("refusals p99", p99, "ms", "< 20", p99 < 20)
    for name, text in (("empty", "an empty call to the router"), ("idle", "an empty call to an idle server")):
        report.add(f"{text} p50", quantile(times[name], 50), "ms")  # type: ignore[index]
        report.add(f"{text} p99", quantile(times[name], 99), "ms")  # type: ignore[index]
    report.add("of a refusal, inside the router p50", 1000 * quantile(own, 50), "ms")
    report.add("of a refusal, inside the router p99", 1000 * quantile(own, 99), "ms")
    loaded = [1000 * answer.seconds for answer in level.refusals]
    report.add("refusals p99 at the loaders", quantile(loaded, 99), "ms")


def refused_within(audit: Path) -> list[float]:
    """Seconds from a call's arrival in Python to its refusal, as the routers' audit log has them."""
    lines = map(json.loads, audit.read_text().splitlines()) if audit.exists() else ()
    return [line["seconds"] for line in lines if line.get("code") == ResourceExhausted.reason]


def _bursts(options: argparse.Namespace, lab: Lab, report: Report) -> None:
    answers: list[Answer] = []
    held: list[float] = []
    for _ in range(BURSTS):
        answers += lab.burst(options.burst)
        time.sleep(1.0)  # what the connections left is gone
        held.append(lab.resident)
    errors = Counter(answer.error for answer in answers)
    others = {name: count for name, count in errors.items() if name not in ("", REFUSED)}
    report.add(f"bursts of {options.burst}: answered", errors[""])
    report.add(f"bursts of {options.burst}: refused", errors[REFUSED])
    report.add("anything else, CANCELLED for instance", sum(others.values()), "", "0", not others)
    bare = sum(answer.refused and answer.retry_after <= 0 for answer in answers)
    report.add("of them refused without RetryInfo", bare, "", "0", bare == 0)
    grown = held[-1] - held[0]
    report.add("routers' memory after the first burst", held[0], "MB")
    report.add("grown by the last one", grown, "MB", "< 8", grown < 8)
    report.details["burst"] = {"errors": others, "resident_mb": [round(each, 1) for each in held]}


def quantile(values: Sequence[float], percent: float) -> float:
    """NaN for none."""
    return float(np.percentile(values, percent)) if values else math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; 1 where a target was missed."""
    flags = parser(__doc__ or "")
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--seconds", type=float, help="of each level (default: 30; --quick: 3)")
    flags.add_argument("--levels", type=float, nargs="+", help="shares of the capacity")
    flags.add_argument("--burst", type=int, help="requests at once (default: 3000; --quick: 300)")
    flags.add_argument("--routers", type=int, default=1, help="how many share the load")
    flags.add_argument("--loaders", type=int, default=2, help="processes that send requests")
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
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "audit.jsonl"
        router: dict[str, Any] = {**ROUTER, "audit_log": str(audit)}
        with (
            idle_server() as idle,
            LocalStack(demand.model, [], routers=options.routers, threads=1, router_options=router) as stack,
            Lab(stack, idle, demand, options.loaders, Random(options.seed)) as lab,
        ):
            run(options, lab, demand, audit, report)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
