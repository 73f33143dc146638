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
from dataclasses import dataclass, field
from random import Random
from typing import Any

from redis import Redis

from bench.report import Report, parser
from bench.soak_load import Mix
from bench.tables import Table
from bench.vitals import descriptors, free_port, pid_of, resident, scrape, slope
from graftree.errors import GraftreeError
from graftree.local_stack import LocalStack
from graftree.store.embedded import EmbeddedRedis

MODEL = "random:llama?layers=1&seed=3&scale=3&context=2048"
LOOK_SECONDS = 1.0
KEEP_SECONDS = 10.0  # records in Redis, of requests that have ended or were left
REST_SECONDS = 30.0  # beyond that, until all is as before
STEEPEST = 1.0  # MB a minute
SPARE_DESCRIPTORS = 2
KV_TOKENS = 1 << 15  # of each pool: all of it has been in use soon, and it takes no more memory from then on
LEAST_MINUTES = 2.5  # a shorter run says nothing about a slope


@dataclass
class Course:
    """Of one process, look by look.

    Attributes:
        times: seconds since the load began.
        memory: MB.
        files: descriptors.
    """

    times: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def slopes(self) -> tuple[float, float]:
        """Of memory (MB) and descriptors, a minute, in the second half."""
        begin = len(self.times) // 2
        return slope(self.times[begin:], self.memory[begin:]), slope(self.times[begin:], self.files[begin:])


@dataclass(frozen=True)
class Rest:
    """What there is at rest. `pools`: share of KV blocks in use, by pod; `files`: descriptors, by process."""

    keys: int
    running: float
    pools: dict[str, float]
    files: dict[str, int]

    def left_behind(self, before: Rest) -> dict[str, float]:
        """What is not as it was before, by name."""
        found = {
            "sessions in Redis": float(self.keys - before.keys),
            "requests under way": self.running - before.running,
        }
        found |= {f"KV blocks of {pod}": used - before.pools[pod] for pod, used in self.pools.items()}
        more = {pod: count - before.files[pod] - SPARE_DESCRIPTORS for pod, count in self.files.items()}
        found |= {f"descriptors of {pod}": float(count) for pod, count in more.items()}
        return {name: value for name, value in found.items() if value > 1e-9}


class Lab:
    """A stack of processes and its Redis."""

    def __init__(self, stack: LocalStack, redis: EmbeddedRedis) -> None:
        self._stack = stack
        self._redis = Redis.from_url(redis.url)
        pods: list[Any] = [pod for tier in ("router", "verifier", "speculator") for pod in stack.pods(tier)]
        self._lasting = {pod.name: pod for pod in pods}
        self._addresses = {name: pod.values["metrics_listen"] for name, pod in self._lasting.items()}
        server: Any = self._redis.info("server")
        self.pids = {name: pid_of(pod) for name, pod in self._lasting.items()} | {"redis": int(server["process_id"])}
        self._last = len(stack.pods("speculator")) - 1

    def rest(self) -> Rest:
        """How it is now."""
        metrics = {name: scrape(address) for name, address in self._addresses.items()}
        usage = {"verifier": "graftree_kv_cache_usage_perc", "speculator": "graftree_speculator_kv_cache_usage_perc"}
        pools = {name: metrics[name][usage[pod.tier]] for name, pod in self._lasting.items() if pod.tier in usage}
        running = sum(values.get("graftree_num_requests_running", 0.0) for values in metrics.values())
        keys = sum(1 for _ in self._redis.scan_iter("graftree:v1:{s:*", count=1000))
        return Rest(keys, running, pools, {name: descriptors(pid) for name, pid in self.pids.items()})

    def replace_one(self, turn: int) -> None:
        """A speculator goes, by turns killed and stopped, and another one of its kind comes."""
        end = self._stack.kill if turn % 2 else self._stack.stop
        if turn:
            end("speculator", self._last)
        self._last = self._stack.add("speculator", "ngram")

    async def watch(self, courses: dict[str, Course], seconds: float) -> None:
        """Look at every process until the time is over."""
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            for name, course in courses.items():
                course.times.append(now)
                course.memory.append(resident(self.pids[name]))
                course.files.append(descriptors(self.pids[name]))
            await asyncio.sleep(LOOK_SECONDS)

    async def churn(self, every: float, seconds: float) -> int:
        """Replace a speculator again and again; returns how often."""
        began, turn = time.monotonic(), 0
        while time.monotonic() - began + every < seconds:
            await asyncio.sleep(every)
            await asyncio.to_thread(self.replace_one, turn)
            turn += 1
        return turn

    async def back(self, before: Rest) -> tuple[dict[str, float], float]:
        """Wait until everything is as before; returns what is not, and how long it took."""
        began = time.monotonic()
        while True:
            left = (await asyncio.to_thread(self.rest)).left_behind(before)
            took = time.monotonic() - began
            if not left or took > KEEP_SECONDS + REST_SECONDS:
                return left, took
            await asyncio.sleep(LOOK_SECONDS)


async def run(options: argparse.Namespace, lab: Lab, targets: Sequence[str], report: Report) -> None:
    """Warm up, note how it is at rest, load, rest again."""
    rng, seconds = Random(options.seed), 60.0 * options.minutes
    greedy = options.model.startswith("standin:")
    await _loaded(Mix(targets, options.clients, rng, greedy=greedy), asyncio.sleep(min(10.0, seconds / 4)))
    await asyncio.sleep(KEEP_SECONDS + 2.0)
    before = lab.rest()
    mix = Mix(targets, options.clients, rng, greedy=greedy)
    courses = {name: Course() for name in lab.pids}
    began = time.monotonic()
    _, turns = await _loaded(mix, lab.watch(courses, seconds), lab.churn(options.churn, seconds))
    took = time.monotonic() - began
    left, quiet = await lab.back(before)
    names = list(courses)
    columns = ("MB first", "MB last", "MB/min", "files", "last", "/min")
    table = Table.of("process", columns, names, lambda name: _row(courses[name]))
    print(table)
    report.details["processes"] = table.details()
    report.details["memory_mb"] = {name: [round(each, 1) for each in courses[name].memory[::10]] for name in names}
    report.details["requests"] = dict(mix.counts)
    report.details["unexpected"], report.details["left_behind"] = mix.unexpected[:20], left
    report.add("minutes", took / 60)
    report.add("requests", mix.counts.total())
    report.add("requests per second", mix.counts.total() / took)
    report.add("speculators replaced", turns)
    report.add("unexpected outcomes", len(mix.unexpected), "", "0", not mix.unexpected)
    for name in names:
        memory, files = courses[name].slopes()
        for what, value, unit, most in (("memory", memory, "MB/min", STEEPEST), ("descriptors", files, "/min", 1.0)):
            if options.minutes >= LEAST_MINUTES:
                report.add(f"{name}: {what}", value, unit, f"< {most:g}", value < most)
            else:
                report.add(f"{name}: {what}", value, unit)
    report.add("back as before within", quiet, "s")
    report.add("left behind", ", ".join(left) or "nothing", "", "nothing", not left)


async def _loaded(mix: Mix, *work: Any) -> list[Any]:
    """What the work returns that is done under load."""
    running = asyncio.create_task(mix.run())
    try:
        return await asyncio.gather(*work)
    finally:
        mix.stop()
        await running


def _row(course: Course) -> list[float]:
    memory, files = course.slopes()
    return [course.memory[0], course.memory[-1], memory, course.files[0], course.files[-1], files]


def metrics() -> dict[str, Any]:
    """Where one pod serves its metrics."""
    return {"metrics_listen": f"127.0.0.1:{free_port()}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; 1 where something grows or is left."""
    flags = parser(__doc__ or "")
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--minutes", type=float, help="of load (default: 30; --quick: a quarter)")
    flags.add_argument("--clients", type=int, default=16, help="requests at once")
    flags.add_argument("--model", default=MODEL, help="the LLM")
    flags.add_argument("--churn", type=float, help="seconds between speculators that go (default: 20; --quick: 6)")
    flags.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    options = flags.parse_args(arguments)
    options.minutes = options.minutes or (0.25 if options.quick else 30.0)
    options.churn = options.churn or (6.0 if options.quick else 20.0)
    alike = "standin" if options.model.startswith("standin:") else f"model:{options.model}"
    report = Report("soak: what load leaves behind")
    with (
        EmbeddedRedis() as redis,
        LocalStack(
            options.model,
            [{"drafter": drafter} | metrics() for drafter in ("ngram", alike)],
            redis=redis.url,
            threads=1,
            router_options=metrics() | {"replay_seconds": KEEP_SECONDS / 2, "resume_seconds": KEEP_SECONDS},
            verifier_options=metrics() | {"step_time_seconds": 0, "kv_tokens": KV_TOKENS},
            speculator_options={"kv_tokens": KV_TOKENS},
        ) as stack,
    ):
        try:
            asyncio.run(run(options, Lab(stack, redis), stack.targets, report))
        except GraftreeError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
