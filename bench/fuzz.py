"""Malformed bytes and random messages against every port: does anything crash, leak, or harm anybody else?

    python -m bench.fuzz [--seconds 60] [--seed 0] [--ports NAME ...] [--json FILE] [--quick]

Child processes of every tier serve streams whose undisturbed answers are known, while one port after the other is
attacked for --seconds from another process: bytes that are no protocol or only begin like one, HTTP/2 frames of any
kind, floods, lengths that are lies, connections that fall silent, random messages of every type of every service,
real messages with something spoilt, messages that are too long, compressed zeros, very many empty entries.

All ports have half of their time, then the other half: memory at rest is compared between the two, since the largest
messages at once have to be held once. Sessions, requests, KV blocks and descriptors must be back where they were when
an attack is over.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from bench.chaos import TINY
from bench.chaos_load import requests, undisturbed
from bench.fuzz_attack import HALVES_EACH, Port, Tally, attack
from bench.fuzz_record import Recordings, record
from bench.fuzz_watch import Control, Phase, Watch, complaints
from bench.report import Report, parser
from bench.tables import Table
from bench.vitals import free_port
from graftree.local.pod import Tier
from graftree.local_stack import LocalStack
from graftree.store.embedded import EmbeddedRedis

SERVICES: dict[Tier, str] = {
    "router": "graftree.v1.GenerationService",
    "verifier": "graftree.v1.VerificationService",
    "speculator": "graftree.v1.SpeculationService",
}
KEEP_SECONDS = 5.0  # of records in Redis
GRACE_SECONDS = 20.0  # in which a port must have closed a connection that fell silent
MOST_MB = 24.0  # that a process may hold more after as much again
CASES, CLIENTS, TOKENS = 12, 3, 40


def stack_of(redis: EmbeddedRedis, logs: Path) -> LocalStack:
    """One pod a tier, two speculators, every kind of port."""

    def ports() -> dict[str, Any]:
        return {name: f"127.0.0.1:{free_port()}" for name in ("metrics_listen", "health_listen")}

    return LocalStack(
        TINY,
        [{"drafter": drafter} | ports() for drafter in ("ngram", f"model:{TINY}")],
        redis=redis.url,
        threads=1,
        router_options=ports() | {"replay_seconds": KEEP_SECONDS / 2, "resume_seconds": KEEP_SECONDS},
        verifier_options=ports() | {"step_time_seconds": 0, "kv_tokens": 1 << 15},
        speculator_options={"kv_tokens": 1 << 15},
        log_directory=logs,
    )


def ports_of(stack: LocalStack) -> list[Port]:
    """All of them."""
    found = []
    for tier, service in SERVICES.items():
        for pod in stack.pods(tier):
            found += [
                Port(pod.name, pod.address, "grpc", (service,), pod.name),
                Port(f"{pod.name} health", pod.values["health_listen"], "grpc", (), pod.name),
                Port(f"{pod.name} metrics", pod.values["metrics_listen"], "http", (), pod.name),
            ]
    return found


async def phase(
    port: Port, watch: Watch, control: Control, pool: ProcessPoolExecutor, seconds: float, seed: int, said: Recordings
) -> Phase:
    """One port's attack, and the rest behind it."""
    loop, before = asyncio.get_running_loop(), control.count()
    begun, control.stall = time.monotonic(), 0.0
    async with control:
        work = loop.run_in_executor(pool, attack, port, seconds, seed, said, HALVES_EACH)
        while not work.done():
            watch.look()
            await asyncio.wait({work}, timeout=0.25)
        tally: Tally = await work
    grown = watch.grown(port.pod, begun, time.monotonic())
    left, quiet = await watch.back()
    return Phase(port, tally, control.count() - before, control.stall, grown, left, quiet)


async def run(options: argparse.Namespace, stack: LocalStack, watch: Watch, said: Recordings, report: Report) -> None:
    """Attack port by port, note how much is held at rest, attack all once more."""
    rng = Random(options.seed)
    cases = await asyncio.to_thread(undisturbed, stack.target, requests(CASES, TOKENS, rng))
    chosen = [port for port in ports_of(stack) if not options.ports or port.name in options.ports]
    control = Control(stack.target, cases, CLIENTS)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        phases = []
        for half in range(2):
            for port in chosen:
                seed = options.seed + half
                phases.append(await phase(port, watch, control, pool, options.seconds / 2, seed, said))
                print(phases[-1].line(), flush=True)
            if half == 0:
                watch.settle()
    judge(options, report, phases, control, watch)


def judge(
    options: argparse.Namespace, report: Report, phases: Sequence[Phase], control: Control, watch: Watch
) -> None:
    """Figures and targets."""
    by_name = {
        f"{phase.port.name}{', again' * (index >= len(phases) // 2)}": phase for index, phase in enumerate(phases)
    }
    columns = ("attacks", "not there", "hanging", "others", "stall s", "MB grown", "s to rest")
    table = Table.of("port", columns, list(by_name), lambda name: by_name[name].row())
    print(table)
    total = sum((phase.tally for phase in phases), Tally())
    report.details["ports"] = table.details()
    report.details["attacks"], report.details["codes"] = dict(total.attacks), dict(total.codes)
    report.details["kept"], report.details["odd"] = dict(total.kept), total.odd
    report.details["left"] = {name: phase.left for name, phase in by_name.items() if phase.left}
    report.details["control errors"] = control.errors[:10]
    report.details["resident_mb"] = {
        name: [round(each, 1) for each in pair] for name, pair in watch.rest_mb().items()
    }
    report.add("ports", len(phases) // 2)
    report.add("seconds of each", options.seconds)
    report.add("attacks", total.attacks.total())
    dead = watch.dead()
    report.add("processes that ended", ", ".join(dead) or "none", "", "none", not dead)
    report.add("connections nobody took", total.refused, "", "0", not total.refused)
    report.add("answers of others meanwhile", control.answers, "", "> 0", control.answers > 0)
    report.add("of these with another token", control.changed, "", "0", not control.changed)
    report.add("requests of others that failed", len(control.errors), "", "0", not control.errors)
    report.add("longest wait of others for a chunk", max(phase.stall for phase in phases), "s")
    report.add("answers by an unexpected exception", len(total.odd), "kinds", "0", not total.odd)
    kept = [name for name, phase in by_name.items() if phase.left]
    report.add("ports that left something behind", ", ".join(kept) or "none", "", "none", not kept)
    if options.seconds / 2 >= GRACE_SECONDS:
        report.add("silent connections still open", total.hanging, "", "0", not total.hanging)
        rest = max(last - first for first, last in watch.rest_mb().values())
        report.add(
            "most that a process holds more after the second half", rest, "MB", f"< {MOST_MB:g}", rest < MOST_MB
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack and report; 1 where anything was harmed."""
    flags = parser(__doc__ or "")
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--seconds", type=float, help="of each port (default: 60; --quick: 3)")
    flags.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    flags.add_argument("--ports", nargs="+", metavar="NAME", help="only these, e.g. 'verifier 0' (default: all)")
    options = flags.parse_args(arguments)
    options.seconds = options.seconds or (3.0 if options.quick else 60.0)
    report = Report("fuzz: malformed bytes and random messages against every port")
    said = record()
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedRedis() as redis,
        stack_of(redis, Path(folder)) as stack,
        Watch(stack, redis, keep_seconds=KEEP_SECONDS) as watch,
    ):
        asyncio.run(run(options, stack, watch, said, report))
        logged = complaints(Path(folder))
    report.details["logged"] = logged[:10]
    report.add("exceptions logged", len(logged), "", "0", not logged)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
