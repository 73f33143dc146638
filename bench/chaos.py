"""What is lost when anything may die? Load on a whole stack of processes while its pods and its Redis are killed.

    python -m bench.chaos [--seconds 600] [--clients 64] [--model URI] [--json FILE] [--quick]
    python -m bench.chaos --races 10000 [--json FILE]

Many clients keep streams of every kind running on two routers, two verifiers, speculators and one Redis, all child
processes of this one. First every request is answered undisturbed, without speculation. Then, for --seconds, a seeded
die picks what is next: SIGKILL to any pod or to Redis, which comes back empty; SIGSTOP; SIGTERM; a cut of the way
from the routers to a pod or from one router to Redis, in one direction or both, on all connections or on one, at
whose end the bytes go on or the connections break; sometimes two of them at once; whatever went is started again in
its place. Last, every pod in turn is drained and replaced (a rolling restart). Every answer must be the undisturbed
one: no token lost, repeated or changed, and no request failed.

A stall is the longest time without a chunk that one stream saw while a fault lasted: from its moment until all was
there again, replacements included. Now and then nothing happens for as long: what streams see then is the machine's.
Faults during which the machine gave none of the processes time (a thread that only sleeps was woken much too late)
are told apart.

With --races two routers race for the ownership of one session so many times, and nothing else is done.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from bench import chaos_races
from bench.chaos_faults import NOTHING, TIERS, Fault, How, Places, Troublemaker, Victim
from bench.chaos_history import History
from bench.chaos_load import Case, Load, Stream, requests, undisturbed
from bench.chaos_proxy import FaultProxy
from bench.chaos_stack import ChaosStack
from bench.chaos_watch import Watch
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
    ("verifier", "cut"),
    ("speculator", "cut"),
    ("redis", "cut"),
    ("router", "drain"),
    ("verifier", "drain"),
    NOTHING,
)
# A pod that stands still is given up within the time in which one that died is replaced.
ROUTER = {
    "step_timeout_seconds": 1.0,
    "lease_seconds": 1.5,
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

    @property
    def troubles(self) -> list[Fault]:
        """The faults that were more than time."""
        return [fault for fault in self.faults if (fault.victim, fault.how) != NOTHING]

    def stalls(self, faults: Sequence[Fault]) -> list[float]:
        """Seconds, of every stream that ran during each of these."""
        return [
            stall
            for fault in faults
            for stream in self.streams
            if (stall := stream.stall(fault.at, fault.over)) is not None
        ]


def stack_of(
    model: str, speculators: Sequence[str], redis: EmbeddedRedis, proxy: FaultProxy, *, pods: int = 2, **options: Any
) -> ChaosStack:
    """A stack of child processes with `pods` routers and as many verifiers, and `proxy` between them."""
    return ChaosStack(
        model,
        list(speculators),
        routers=pods,
        verifiers=pods,
        threads=1,
        start_seconds=600,
        redis=redis.url,
        redis_socket=redis.url.removeprefix("unix://"),
        proxy=proxy,
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
    if options.races:
        return chaos_races.run(options.races, rng, options.json)
    report = Report("chaos")
    with (
        EmbeddedRedis() as redis,
        FaultProxy() as proxy,
        stack_of(options.model, options.speculators, redis, proxy, log_directory=options.logs) as stack,
        Watch() as watch,
    ):
        greedy = options.model.startswith("standin:")
        cases = undisturbed(stack.target, requests(options.cases, options.tokens, rng, greedy=greedy))
        maker = Troublemaker(Places(stack, redis), KINDS, rng)
        chaos = asyncio.run(trouble(stack, maker, cases, options.clients, rng, options.seconds))
        _tell(report, "chaos", chaos)
        _tell_stalls(report, chaos, watch)
        restart = asyncio.run(rolling(stack, maker, cases, options.clients, rng))
        _tell(report, "rolling restart", restart)
    report.details["errors"] = sorted(set(chaos.failed + restart.failed))
    return report.finish(options.json)


def _tell_stalls(report: Report, course: Course, watch: Watch) -> None:
    """Stalls of the faults during which the machine ran, and of all."""
    ran = [fault for fault in course.faults if not watch.stood_still(fault.at, fault.over)]
    for name, faults in _groups(ran).items():
        if faults:
            table = _table(name, course, faults)
            print(table)
            report.details[name] = table.details()
    report.details["faults"] = _faults(course, watch)
    troubles = [fault for fault in ran if fault in course.troubles]
    stalls, calm = course.stalls(troubles), course.stalls([fault for fault in ran if fault not in course.troubles])
    every = course.stalls(course.troubles)
    p99 = _quantile(stalls, 99)
    report.add("the machine itself stood still", watch.seconds, "s")
    report.add("faults while it ran", len(troubles))
    report.add("stall p50", _quantile(stalls, 50), "s")
    report.add("stall p99", p99, "s", "< 2 with two of each", p99 < 2.0)
    report.add("longest gap while nothing happens, p50", _quantile(calm, 50), "s")
    report.add("longest gap while nothing happens, p99", _quantile(calm, 99), "s")
    report.add("stall p50, standstills of the machine included", _quantile(every, 50), "s")
    report.add("stall p99, standstills of the machine included", _quantile(every, 99), "s")


def _tell(report: Report, name: str, course: Course) -> None:
    tokens = sum(stream.tokens for stream in course.streams)
    report.add(f"{name}: faults", len(course.troubles))
    report.add(f"{name}: answers", len(course.streams))
    report.add(f"{name}: tokens", tokens)
    report.add(f"{name}: reconnects", sum(stream.reconnects for stream in course.streams))
    report.add(f"{name}: answers lost, repeated or changed", course.changed, "", "0", course.changed == 0)
    wrong = len(course.history.wrong)
    report.add(f"{name}: commits seen in Redis", course.history.commits)
    report.add(f"{name}: of these, not by the epoch's owner", wrong, "", "0", wrong == 0)
    report.add(f"{name}: requests failed", len(course.failed), "", "0", not course.failed)


def _groups(faults: Sequence[Fault]) -> dict[str, dict[str, list[Fault]]]:
    """What the tables are about: title -> row -> its faults. Of two at once each has a row with the other's name."""
    alone: dict[str, list[Fault]] = {}
    pairs: dict[str, list[Fault]] = {}
    for fault in faults:
        if fault.with_:
            pairs.setdefault(" + ".join(sorted((fault.name, fault.with_))), []).append(fault)
        else:
            alone.setdefault(fault.name, []).append(fault)
    return {"stall, ms": dict(sorted(alone.items())), "stall, ms, two at once": dict(sorted(pairs.items()))}


def _table(title: str, course: Course, groups: Mapping[str, Sequence[Fault]]) -> Table:
    def row(name: str) -> list[float]:
        faults = groups[name]
        stalls = course.stalls(faults)
        lasted = [fault.over - fault.at for fault in faults]
        ms = [1000 * _quantile(stalls, q) for q in (50, 99, 100)]
        return [len(faults), len(stalls), *ms, 1000 * _quantile(lasted, 50)]

    columns = ("faults", "streams", "p50", "p99", "worst", "lasted")
    return Table.of(title, columns, list(groups), row)


def _faults(course: Course, watch: Watch) -> list[dict[str, Any]]:
    """Each fault, with the stalls that streams saw while it lasted, in seconds."""
    begun = min((fault.at for fault in course.faults), default=0.0)
    found = []
    for fault in sorted(course.faults, key=lambda each: each.at):
        stalls = course.stalls([fault])
        cut = {"ways": fault.ways, "oldest": fault.oldest, "broken": fault.broken} if fault.ways else {}
        numbers = {
            "at": fault.at - begun,
            "lasted": fault.over - fault.at,
            **{f"p{q}": _quantile(stalls, q) for q in (50, 99, 100)},
        }
        rounded = {name: round(value, 2) for name, value in numbers.items() if not math.isnan(value)}
        still = {"machine_stood_still": True} if watch.stood_still(fault.at, fault.over) else {}
        found.append({"fault": fault.name, "place": fault.place, "with": fault.with_, **cut, **rounded, **still})
    return found


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
    flags.add_argument("--logs", help="folder for the logs of all processes (default: none)")
    flags.add_argument("--races", type=int, default=0, help="races for one session, and nothing else")
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
