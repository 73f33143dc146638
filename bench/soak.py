"""What half an hour at capacity leaves behind: memory, descriptors, keys in Redis, KV blocks.

    python -m bench.soak [--minutes 30] [--clients 16] [--model URI] [--json FILE] [--quick]

Child processes of every tier under mixed load (`bench.soak_load`): short and long answers, samples, structured ones,
streams that are left, deadlines that are too short, bad requests, answers told twice, clients that come and go;
meanwhile a speculator is killed or stopped every --churn seconds and another one started. Once a second every process
that lives through it all is looked at. The slope of its memory is by least squares over the second half. Then the
load ends, and when all that Redis keeps for a while has run out, everything must be as it was before.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from random import Random
from typing import Any

from redis import Redis

from bench.report import Report, parser
from bench.soak_lab import COLUMNS, SERVERS, Lab
from bench.soak_load import Mix
from bench.tables import Table
from bench.vitals import free_port
from graftree.config import DEFAULT_MODEL, default_speculators
from graftree.errors import GraftreeError
from graftree.local_stack import LocalStack
from graftree.store.embedded import EmbeddedRedis

MODEL = "random:llama?layers=1&seed=3&scale=3&context=2048"
KEEP_SECONDS = 10.0  # records in Redis of requests that have ended or were left, and KV blocks there
REST_SECONDS = 30.0  # beyond that, until all is as before
STEEPEST = 1.0  # MB a minute
KV_TOKENS = 1 << 14  # of each pool: all of it has been in use soon, and it takes no more memory from then on
KV_REDIS_BYTES = 1 << 30
LEAST_MINUTES = 2.5  # a shorter run says nothing about a slope


async def run(options: argparse.Namespace, lab: Lab, targets: Sequence[str], report: Report) -> None:
    """Warm up, note how it is at rest, load, rest again."""
    rng, seconds = Random(options.seed), 60.0 * options.minutes
    greedy = options.model.startswith("standin:")
    await _loaded(Mix(targets, options.clients, rng, greedy=greedy), asyncio.sleep(min(10.0, seconds / 4)))
    await asyncio.sleep(KEEP_SECONDS + 2.0)
    before, figures = lab.rest(), lab.metrics()
    mix = Mix(targets, options.clients, rng, greedy=greedy)
    began = time.monotonic()

    def say(line: str) -> None:
        print(line, flush=True)
        if options.json:  # half an hour is long: what there is so far
            so_far = Report(f"{report.benchmark} (under way)")
            with redirect_stdout(None):
                _growing(so_far, lab, mix, max(1.0, time.monotonic() - began) / 60)
                so_far.finish(options.json)

    lab.say = say
    _, turns = await _loaded(mix, lab.watch(seconds), lab.churn(options.churn, seconds))
    took = time.monotonic() - began
    busy, tokens = (
        _growth(figures, lab.metrics(), f"graftree_{name}_total")
        for name in ("verifier_forward_seconds", "generation_tokens")
    )
    left, quiet = await lab.back(before, KEEP_SECONDS + REST_SECONDS)
    _growing(report, lab, mix, took / 60)
    report.details["left_behind"] = left
    report.details["keys_before"], report.details["keys_after"] = before.keys, lab.rest().keys
    report.add("tokens delivered", round(tokens))
    report.add("verifier in forwards", busy / took, "of time")
    report.add("speculators replaced", turns)
    report.add("keys in Redis before", sum(before.keys.values()))
    report.add("most keys in Redis", lab.most_keys)
    report.add("keys in Redis after", sum(report.details["keys_after"].values()))
    report.add("back as before within", quiet, "s")
    report.add("left behind", ", ".join(left) or "nothing", "", "nothing", not left)


def _growing(report: Report, lab: Lab, mix: Mix, minutes: float) -> None:
    """Add what was asked in so many minutes, and how the processes have grown meanwhile."""
    courses = lab.courses
    table = Table.of("process", COLUMNS, courses, lambda name: courses[name].row)
    print(table)
    report.details["processes"] = table.details()
    report.details["memory_mb"] = {
        name: [round(each, 1) for each in course.memory[::10]] for name, course in courses.items()
    }
    report.details["requests"] = dict(mix.counts)
    report.details["slow_starts"], report.details["unexpected"] = lab.slow_starts[:20], mix.unexpected[:20]
    report.add("minutes", minutes)
    report.add("requests", mix.counts.total())
    report.add("requests per second", mix.counts.total() / (60 * minutes))
    report.add("speculators not linked in time", len(lab.slow_starts))
    report.add("unexpected outcomes", len(mix.unexpected), "", "0", not mix.unexpected)
    for name, course in courses.items():
        memory, files = course.slopes()
        for what, value, unit, most in (("memory", memory, "MB/min", STEEPEST), ("descriptors", files, "/min", 1.0)):
            if minutes >= LEAST_MINUTES:
                report.add(f"{name}: {what}", value, unit, f"< {most:g}", value < most)
            else:
                report.add(f"{name}: {what}", value, unit)


def _growth(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]], name: str) -> float:
    """By how much a counter has grown, over all pods."""
    return sum(values.get(name, 0.0) - before[pod].get(name, 0.0) for pod, values in after.items())


async def _loaded(mix: Mix, *work: Any) -> list[Any]:
    """What the work returns that is done under load."""
    running = asyncio.create_task(mix.run())
    try:
        return await asyncio.gather(*work)
    finally:
        mix.stop()
        await running


def metrics() -> dict[str, Any]:
    """Where one pod serves its metrics."""
    return {"metrics_listen": f"127.0.0.1:{free_port()}"}


def drafters(model: str) -> tuple[str, ...]:
    """What drafts for a model all the time: what comes with it, or an n-gram and the model itself."""
    if model == DEFAULT_MODEL:
        return default_speculators(model)
    return "ngram", "standin" if model.startswith("standin:") else f"model:{model}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; 1 where something grows or is left."""
    flags = parser(__doc__ or "")
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--minutes", type=float, help="of load (default: 30; --quick: a quarter)")
    flags.add_argument("--clients", type=int, default=16, help="requests at once")
    flags.add_argument("--model", default=MODEL, help="the LLM")
    flags.add_argument("--churn", type=float, help="seconds between speculators that go (default: 20; --quick: 6)")
    flags.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="of each pool")
    flags.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    options = flags.parse_args(arguments)
    options.minutes = options.minutes or (0.25 if options.quick else 30.0)
    options.churn = options.churn or (6.0 if options.quick else 20.0)
    report = Report("soak: what load leaves behind")
    with ExitStack() as open_:
        redis, kv = (open_.enter_context(EmbeddedRedis()) for _ in range(2))
        servers = {
            name: Redis.from_url(each.url, socket_timeout=60.0)
            for name, each in zip(SERVERS, (redis, kv), strict=True)
        }
        cache = servers[SERVERS[1]]
        cache.config_set("maxmemory", KV_REDIS_BYTES)
        cache.config_set("maxmemory-policy", "allkeys-lru")
        away = {"kv_redis": kv.url, "kv_ttl_seconds": KEEP_SECONDS}
        try:
            stack = open_.enter_context(
                LocalStack(
                    options.model,
                    [{"drafter": drafter} | metrics() for drafter in drafters(options.model)],
                    redis=redis.url,
                    threads=1,
                    start_seconds=600.0,
                    router_options=metrics() | {"replay_seconds": KEEP_SECONDS / 2, "resume_seconds": KEEP_SECONDS},
                    verifier_options=metrics() | away | {"step_time_seconds": 0, "kv_tokens": options.kv_tokens},
                    speculator_options={"kv_tokens": options.kv_tokens},
                )
            )
            asyncio.run(run(options, Lab(stack, servers), stack.targets, report))
        except GraftreeError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
