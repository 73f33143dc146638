"""What is lost when anything may die? Load on a whole stack of processes while its pods and its Redis are killed.

    python -m bench.chaos [--seconds 600] [--clients 64] [--model URI] [--json FILE] [--quick]

Many clients keep streams of every kind running on two routers, two verifiers, speculators and one Redis, all child
processes of this one. First every request is answered undisturbed, without speculation. Then, for --seconds, a seeded
die picks what is next: SIGKILL to any pod or to Redis, which comes back empty; SIGSTOP; SIGTERM; sometimes two of
them at once; whatever went is started again in its place. Last, every pod in turn is drained and replaced (a rolling
restart). Every answer must be the undisturbed one: no token lost, repeated or changed, and no request failed.

A stall is the time between the chunks of one stream around the moment of a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from bench.chaos_faults import TIERS, Fault, How, Places, Troublemaker, Victim
from bench.chaos_history import History
from bench.chaos_load import Case, Load, Stream, requests, undisturbed
from bench.report import Report, parser
from bench.tables import Table
from graftree.config import DEFAULT_MODEL
from graftree.local.pod import Tier
from graftree.local_stack import LocalStack
from graftree.store.embedded import EmbeddedRedis

TINY = "random:llama?layers=1&seed=3&scale=3&context=2048"
KINDS: tuple[tuple[Victim, How], ...] = (
    ("router", "kill"),
    ("verifier", "kill"),
    ("speculator", "kill"),
    ("redis", "kill"),
    ("router", "pause"),
    ("verifier", "pause"),
    ("speculator", "pause"),
    ("redis", "pause"),
    ("router", "drain"),
    ("verifier", "drain"),
)
# A pod that stands still is given up within the time in which one that died is replaced.
ROUTER = {
    "step_timeout_seconds": 1.5,
    "connect_timeout_seconds": 2.0,
    "drain_seconds": 3.0,
    "quarantine_seconds": 0.5,
}


@dataclass
class Course:
    """What one stretch of load brought."""

    streams: list[Stream]
    faults: list[Fault]
    history: History

    @property
    def failed(self) -> list[str]:
        """Errors that reached a client."""
        return [stream.error for stream in self.streams if stream.error]

    @property
    def changed(self) -> int:
        """Answers that are not the undisturbed ones."""
        return sum(not stream.exact and not stream.error for stream in self.streams)

    def stalls(self, victim: str = "", how: str = "") -> list[float]:
        """Seconds, of every stream that ran at the time of a fault of this kind; "" = of any."""
        return [
            stall
            for fault in self.faults
            if victim in ("", fault.victim) and how in ("", fault.how)
            for stream in self.streams
            if (stall := stream.stall(fault.at)) is not None
        ]


def stack_of(
    model: str, speculators: Sequence[str], redis: EmbeddedRedis, *, pods: int = 2, **options: Any
) -> LocalStack:
    """A stack of child processes with `pods` routers and as many verifiers."""
    return LocalStack(
        model,
        list(speculators),
        routers=pods,
        verifiers=pods,
        threads=1,
        redis=redis.url,
        router_options=ROUTER,
        verifier_options={"step_time_seconds": 0, "drain_seconds": 3.0},
        **options,
    )


async def trouble(
    stack: LocalStack,
    maker: Troublemaker,
    cases: Sequence[Case],
    clients: int,
    rng: Random,
    seconds: float,
    *,
    until: Callable[[], bool] = lambda: False,
) -> Course:
    """Load, and one fault after the other meanwhile, for so many seconds or `until`."""
    stop = threading.Event()
    timer = asyncio.get_running_loop().call_later(seconds, stop.set)
    try:
        return await _course(stack, maker, cases, clients, rng, lambda: maker.run(stop, until))
    finally:
        timer.cancel()


async def rolling(
    stack: LocalStack,
    maker: Troublemaker,
    cases: Sequence[Case],
    clients: int,
    rng: Random,
    *,
    tiers: Sequence[Tier] = TIERS,
) -> Course:
    """Load, and every pod replaced in turn meanwhile."""
    return await _course(stack, maker, cases, clients, rng, lambda: maker.rolling_restart(tiers))


async def _course(
    stack: LocalStack, maker: Troublemaker, cases: Sequence[Case], clients: int, rng: Random, work: Any
) -> Course:
    maker.faults.clear()
    load, history = Load(stack.targets, cases, clients, rng), History(stack.redis)
    running, following = asyncio.create_task(load.run()), asyncio.create_task(history.follow())
    try:
        await asyncio.to_thread(work)
    finally:
        load.stop()
        await running
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return Course(load.streams, list(maker.faults), history)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; 1 where an answer is not what it must be."""
    options = _options(arguments)
    rng = Random(options.seed)
    report = Report("chaos")
    with EmbeddedRedis() as redis, stack_of(options.model, options.speculators, redis) as stack:
        greedy = options.model.startswith("standin:")
        cases = undisturbed(stack.target, requests(options.cases, options.tokens, rng, greedy=greedy))
        maker = Troublemaker(Places(stack, redis), KINDS, rng)
        chaos = asyncio.run(trouble(stack, maker, cases, options.clients, rng, options.seconds))
        _tell(report, "chaos", chaos)
        table = _table(chaos)
        print(table)
        report.details["stalls_ms"] = table.details()
        restart = asyncio.run(rolling(stack, maker, cases, options.clients, rng))
        _tell(report, "rolling restart", restart)
    stalls = chaos.stalls()
    p50, p99 = _quantile(stalls, 50), _quantile(stalls, 99)
    report.add("stall p50", p50, "s")
    report.add("stall p99", p99, "s", "< 2 with two of each", p99 < 2.0)
    report.details["errors"] = sorted(set(chaos.failed + restart.failed))
    return report.finish(options.json)


def _tell(report: Report, name: str, course: Course) -> None:
    tokens = sum(stream.tokens for stream in course.streams)
    report.add(f"{name}: faults", len(course.faults))
    report.add(f"{name}: answers", len(course.streams))
    report.add(f"{name}: tokens", tokens)
    report.add(f"{name}: reconnects", sum(stream.reconnects for stream in course.streams))
    report.add(f"{name}: answers lost, repeated or changed", course.changed, "", "0", course.changed == 0)
    wrong = len(course.history.wrong)
    report.add(f"{name}: commits seen in Redis", course.history.commits)
    report.add(f"{name}: of these, not by the epoch's owner", wrong, "", "0", wrong == 0)
    report.add(f"{name}: requests failed", len(course.failed), "", "0", not course.failed)


def _table(course: Course) -> Table:
    kinds = sorted({(fault.victim, fault.how) for fault in course.faults})

    def row(name: str) -> list[float]:
        victim, how = name.split()
        faults = [fault for fault in course.faults if (fault.victim, fault.how) == (victim, how)]
        stalls = course.stalls(victim, how)
        back = [fault.over - fault.at for fault in faults]
        ms = [1000 * _quantile(stalls, q) for q in (50, 99, 100)]
        return [len(faults), len(stalls), *ms, 1000 * _quantile(back, 50)]

    columns = ("faults", "streams", "p50", "p99", "worst", "back")
    return Table.of("stall, ms", columns, [f"{victim} {how}" for victim, how in kinds], row)


def _quantile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else math.nan


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = parser(__doc__ or "")
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--seconds", type=float, help="of trouble (default: 600; --quick: 20)")
    flags.add_argument("--clients", type=int, help="streams at once (default: 64; --quick: 8)")
    flags.add_argument("--model", default=TINY, help="the LLM")
    flags.add_argument("--real", action="store_true", help=f"{DEFAULT_MODEL}, and 3 clients")
    flags.add_argument("--speculators", nargs="*", help="drafters (default: ngram and the model itself)")
    flags.add_argument("--tokens", type=int, default=150, help="of an answer")
    flags.add_argument("--cases", type=int, default=24, help="different requests")
    flags.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    options = flags.parse_args(arguments)
    if options.real:
        options.model = DEFAULT_MODEL
    if options.speculators is None:
        alike = "standin" if options.model.startswith("standin:") else f"model:{options.model}"
        options.speculators = ["ngram"] if options.real else ["ngram", alike]
    options.seconds = options.seconds or (20.0 if options.quick else 600.0)
    options.clients = options.clients or (3 if options.real else 8 if options.quick else 64)
    return options


if __name__ == "__main__":
    sys.exit(main())
