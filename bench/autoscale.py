"""Do speculators follow demand? A day of load on the real router and registry, with the autoscaler's arithmetic.

    python -m bench.autoscale [--day 120] [--json FILE]

Router, registry (a real server), verifier and speculators are the real ones; only the models are stand-ins of fixed
step time, so that a small machine can carry many. The ScaledObject is the one of deploy/kustomize/overlays/keda, its
times divided by --faster. Its threshold is measured first: the demand, in draft tokens per second, up to which one
pod keeps the mean acceptance length within a tenth of what a single session gets.

The day runs three times with the same requests: autoscaled; with as many pods as the busiest moment had; and with a
fixed pool of the autoscaled day's cost. The load changes much faster against the loop than on a real day, which makes
it harder to follow.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.day import NODE_LOSS, Arrival, arrivals
from bench.report import Report, parser
from bench.scaling import Scaler, ScalerConfig
from graftree.client import AsyncClient
from graftree.errors import GraftreeError
from graftree.local_stack import LocalStack

MANIFEST = Path(__file__).resolve().parents[1] / "deploy" / "kustomize" / "overlays" / "keda" / "speculator.yaml"
CAPACITY = {"batch_leaves": 2, "max_nodes": 12, "max_depth": 12}  # leaves per step: all that a pod can do
CALIBRATION_STEPS = 60
MAX_NEW_TOKENS = 48
START_SECONDS = 15.0  # image there, model loaded, registered
NOTICE_SECONDS = 40.0  # until a cluster believes that a node is gone
RATE_SECONDS = 60.0  # window of rate() in the ScaledObject's query


@dataclass
class Pool:
    """A Deployment of speculators: starts, stops and replaces pods, with the delays that a cluster has.

    Attributes:
        wanted: replicas it was told.
        alive: indices of the pods that serve.
        starting: pods on their way.
        lost: pods that are gone, which nobody has noticed so far.
    """

    stack: LocalStack
    drafter: str
    faster: float
    wanted: int = 0
    alive: list[int] = field(default_factory=list)
    starting: int = 0
    lost: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def scale(self, wanted: int) -> None:
        """Start or stop pods until there are `wanted`; the youngest go first."""
        self.wanted = wanted
        while len(self.alive) + self.starting + self.lost < wanted:
            self.starting += 1
            self._spawn(self._start())
        while len(self.alive) + self.starting + self.lost > wanted and self.alive:
            self._spawn(asyncio.to_thread(self.stack.stop, "speculator", self.alive.pop()))

    def lose(self, count: int) -> None:
        """A node dies with some of them."""
        for index in [self.alive.pop() for _ in range(count)]:
            self.lost += 1
            self._spawn(asyncio.to_thread(self.stack.kill, "speculator", index))
            self._spawn(self._notice())

    async def settle(self) -> None:
        """Wait for whatever starts or stops."""
        while self.tasks:
            await asyncio.gather(*self.tasks)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _start(self) -> None:
        await asyncio.sleep(START_SECONDS / self.faster)
        index = await asyncio.to_thread(self.stack.add, "speculator", {"drafter": self.drafter})
        self.starting -= 1
        self.alive.append(index)
        self.scale(self.wanted)

    async def _notice(self) -> None:
        await asyncio.sleep(NOTICE_SECONDS / self.faster)
        self.lost -= 1
        self.scale(self.wanted)


@dataclass
class Course:
    """What a day brought.

    Attributes:
        samples: (seconds, draft tokens demanded per second, pods wanted, pods alive).
        latencies: seconds of each answered request.
        tokens: of each answered request, by its place in the day.
        pod_seconds: cost.
        rounds, delivered: verify steps, and tokens they gave.
    """

    samples: list[tuple[float, float, int, int]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    pod_seconds: float = 0.0
    rounds: int = 0
    delivered: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step."""
        return self.delivered / max(1, self.rounds)

    def quantile(self, share: float) -> float:
        """Of the latencies, seconds."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan

    def turns(self) -> int:
        """How often the number of wanted pods turned from rising to falling or back."""
        steps = [b[2] - a[2] for a, b in pairwise(self.samples) if b[2] != a[2]]
        return sum(before * after < 0 for before, after in pairwise(steps))


class Rate:
    """rate(counter[window]), as Prometheus takes it from samples.

    Args:
        window: seconds.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> float:
        """Note the counter; returns its increase per second over the window, 0 at first."""
        while self._samples and self._samples[0][0] < now - self._window:
            self._samples.popleft()
        self._samples.append((now, count))
        since, first = self._samples[0]
        return (count - first) / (now - since) if now > since else 0.0


class Lab:
    """One stack, and what is asked of it."""

    def __init__(self, stack: LocalStack, drafter: str, faster: float) -> None:
        self.stack, self.faster = stack, faster
        self.pool = Pool(stack, drafter, faster)
        self.router: Any = stack.pods("router")[0]
        self.metrics = self.router.instance.metrics

    async def ask(self, client: AsyncClient, course: Course, place: int, prompt: str) -> None:
        """One request."""
        began = time.monotonic()
        try:
            result = await client.generate(
                prompt, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True, stop_token_ids=[], timeout=60.0
            )
        except GraftreeError as error:
            course.errors.append(f"{type(error).__name__}: {error}")
            return
        course.latencies.append(time.monotonic() - began)
        course.tokens[place] = result.token_ids

    async def capacity(self, seconds: float) -> float:
        """Demand up to which one pod keeps the acceptance length within a tenth of its best, in draft tokens/s."""
        self.pool.scale(1)
        await self.pool.settle()
        best, last = 0.0, 0.0
        for sessions in range(1, 9):
            course, metrics = Course(), self.metrics
            before = metrics.rounds, metrics.delivered_tokens, metrics.draft_tokens_demanded
            async with AsyncClient(self.stack.target) as client:
                end = time.monotonic() + seconds
                await asyncio.gather(*(self._keep_asking(client, course, end, n) for n in range(sessions)))
            length = (metrics.delivered_tokens - before[1]) / (metrics.rounds - before[0])
            took = time.monotonic() - end + seconds
            best = max(best, length)
            if length < 0.9 * best:
                break
            last = (metrics.draft_tokens_demanded - before[2]) / took
        return last

    async def _keep_asking(self, client: AsyncClient, course: Course, end: float, number: int) -> None:
        count = 0
        while time.monotonic() < end:
            await self.ask(client, course, 0, f"session {number} asks {count}")
            count += 1

    async def day(self, seconds: float, requests: list[Arrival], scaler: Scaler | None, pods: int) -> Course:
        """One day from `pods` pods on; without a scaler their number stays."""
        self.pool.scale(pods)
        await self.pool.settle()
        course, began = Course(), time.monotonic()
        before = self.metrics.rounds, self.metrics.delivered_tokens
        watching = asyncio.create_task(self._watch(course, began, seconds, scaler))
        async with AsyncClient(self.stack.target) as client:
            asked = []
            for place, request in enumerate(requests):
                await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
                asked.append(asyncio.create_task(self.ask(client, course, place, request.prompt)))
            await asyncio.gather(*asked, watching)
        course.rounds = self.metrics.rounds - before[0]
        course.delivered = self.metrics.delivered_tokens - before[1]
        return course

    async def _watch(self, course: Course, began: float, seconds: float, scaler: Scaler | None) -> None:
        poll = scaler.config.poll if scaler else 1.0
        rate, broken, last, looked = Rate(RATE_SECONDS / self.faster), False, 0.0, -poll
        while (now := time.monotonic() - began) < seconds:
            demand = rate.add(now, self.metrics.draft_tokens_demanded)
            # What runs and what is about to is paid for.
            course.pod_seconds += (now - last) * (len(self.pool.alive) + self.pool.starting)
            last = now
            if now >= NODE_LOSS * seconds and not broken:
                broken = True
                self.pool.lose(len(self.pool.alive) // 2)
            if now >= looked + poll:
                looked = now
                if scaler is not None:
                    self.pool.scale(scaler.decide(now, demand))
                course.samples.append((now, demand, self.pool.wanted, len(self.pool.alive)))
            await asyncio.sleep(poll / 10)


def judge(report: Report, threshold: float, days: dict[str, Course]) -> None:
    """Figures and targets."""
    auto, peak, same = days["autoscaled"], days["fixed at the peak"], days["fixed at the same cost"]
    report.add("what one pod serves", threshold, "drafts/s")
    for name, day in days.items():
        report.add(f"{name}: pods", max(s[2] for s in day.samples), "most")
        report.add(f"{name}: cost", day.pod_seconds, "pod-s")
        report.add(f"{name}: tokens per step", day.acceptance_length)
        report.add(f"{name}: latency p50", day.quantile(0.5), "s")
        report.add(f"{name}: latency p99", day.quantile(0.99), "s")
    failed = sum(len(day.errors) for day in days.values())
    report.add("requests failed", failed, "", "0", failed == 0)
    changed = sum(auto.tokens[place] != day.tokens.get(place) for day in (peak, same) for place in auto.tokens)
    report.add("answers that differ", changed, "", "0", changed == 0)
    cost = auto.pod_seconds / peak.pod_seconds
    report.add("cost against the peak's pool", cost, "", "<= 0.60", cost <= 0.60)
    kept = auto.acceptance_length / peak.acceptance_length
    report.add("tokens per step against it", kept, "", ">= 0.90", kept >= 0.90)
    gained = auto.acceptance_length / same.acceptance_length
    report.add("tokens per step against the same cost", gained, "", ">= 1.00", gained >= 1.0)
    wanted = [sample[2] for sample in auto.samples]
    report.add("pods at the day's end", wanted[-1], "", "1", wanted[-1] == 1)
    turns = auto.turns()
    report.add("turns of the number of pods", turns, "", "<= 5", turns <= 5)


async def run(options: argparse.Namespace, stack: LocalStack, report: Report) -> None:
    """Calibrate, then the three days."""
    drafter = f"standin?step_ms={options.step_ms / 4:g}&hit_rate=0.8"
    lab = Lab(stack, drafter, options.faster)
    threshold = await lab.capacity(options.step_ms / 1000 * CALIBRATION_STEPS / (3 if options.quick else 1))
    config = replace(ScalerConfig.read(MANIFEST), threshold=threshold).faster(options.faster)
    requests = arrivals(options.day, options.peak, options.seed)
    days = {"autoscaled": await lab.day(options.day, requests, Scaler(config, 1), 1)}
    most = max(sample[2] for sample in days["autoscaled"].samples)
    mean = max(1, round(days["autoscaled"].pod_seconds / options.day))
    days["fixed at the peak"] = await lab.day(options.day, requests, None, most)
    days["fixed at the same cost"] = await lab.day(options.day, requests, None, mean)
    judge(report, threshold, days)
    for name, day in days.items():
        report.details[name] = [[round(value, 2) for value in sample] for sample in day.samples]
    report.details["errors"] = [error for day in days.values() for error in day.errors][:10]
    lab.pool.scale(0)
    await lab.pool.settle()


def main() -> int:
    """Measure and report."""
    flags = parser("a day of load on the real router, with the autoscaler's arithmetic")
    flags.add_argument("--day", type=float, default=120.0, help="seconds that the day lasts")
    flags.add_argument("--faster", type=float, default=15.0, help="what the autoscaler's times are divided by")
    flags.add_argument("--peak", type=float, default=5.0, help="requests per second at the busiest")
    flags.add_argument("--step-ms", type=float, default=100.0, help="a verify step's time; a drafter's is a quarter")
    flags.add_argument("--seed", type=int, default=0)
    options = flags.parse_args()
    if options.quick:
        options.day = min(options.day, 20.0)
    report = Report("autoscale: speculators follow demand")
    lease = {"lease_seconds": 7.5 / options.faster}
    with LocalStack(
        f"standin:?step_ms={options.step_ms:g}&vocab=512&context=4096",
        [],
        in_process=True,
        threads=1,
        router_options=lease | {"tree_depth": 6, "max_requests": 4096},
        verifier_options=lease,
        speculator_options=lease | CAPACITY | {"drain_seconds": 0.5},
    ) as stack:
        asyncio.run(run(options, stack, report))
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
