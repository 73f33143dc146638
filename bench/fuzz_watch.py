"""What `bench.fuzz` looks at: streams of others, and what every process holds."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis

from bench.chaos_load import Case
from bench.fuzz_attack import Port, Tally
from bench.soak_lab import Rest, by_family
from bench.vitals import descriptors, pid_of, resident, scrape
from graftree.client import AsyncClient
from graftree.errors import GraftreeError
from graftree.local_stack import LocalStack
from graftree.sdk.results import Result
from graftree.store.embedded import EmbeddedRedis

REST_SECONDS = 60.0
POLL_SECONDS = 0.5
POOLS = {"verifier": "graftree_kv_cache_usage_perc", "speculator": "graftree_speculator_kv_cache_usage_perc"}
_COMPLAINT = re.compile(r"Traceback \(most recent call last\)|was never retrieved|\"level\": \"(?:error|critical)\"")


class Control:
    """Streams that nobody attacks, one after the other, as long as an `async with` lasts, of which there may be many.

    Args:
        target: of the router.
        cases: requests and their undisturbed answers.
        clients: at once.

    Attributes:
        answers: that came to their end.
        changed: of these, the ones that are not the undisturbed ones.
        errors: of requests.
        stall: longest wait for a chunk, in seconds, since it was set to 0.
    """

    def __init__(self, target: str, cases: Sequence[Case], clients: int) -> None:
        self.answers, self.changed = 0, 0
        self.errors: list[str] = []
        self.stall = 0.0
        self._target, self._cases, self._clients = target, list(cases), clients
        self._over = False
        self._task: asyncio.Task[Any] | None = None

    def count(self) -> int:
        """Answers so far that are as they should be."""
        return self.answers - self.changed

    async def __aenter__(self) -> Self:
        self._over = False
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        async with AsyncClient(self._target, reconnect=None) as client:
            await asyncio.gather(*(self._serve(client, number) for number in range(self._clients)))

    async def _serve(self, client: AsyncClient, number: int) -> None:
        turn = number
        while not self._over:
            case = self._cases[turn % len(self._cases)]
            turn += self._clients + 1
            try:
                result = await self._answer(client, case)
            except GraftreeError as error:
                self.errors.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.1)
            else:
                self.answers += 1
                self.changed += not case.agrees(result)

    async def _answer(self, client: AsyncClient, case: Case) -> Result:
        last = time.monotonic()
        async with client.stream(**case.options) as stream:
            async for _ in stream:
                now = time.monotonic()
                self.stall, last = max(self.stall, now - last), now
            return stream.result


@dataclass(frozen=True)
class Phase:
    """What one port's attack did.

    Attributes:
        answered: answers of others that came meanwhile, as they should be.
        stall: longest wait for a chunk of theirs, in seconds.
        grown: MB that the process took more in the last third of the time than in the second.
        left: what was not as before, by name.
        quiet: seconds until it was.
    """

    port: Port
    tally: Tally
    answered: int
    stall: float
    grown: float
    left: dict[str, float]
    quiet: float

    def row(self) -> list[float]:
        """Of the table."""
        tally = self.tally
        return [
            tally.attacks.total(),
            tally.refused,
            tally.hanging,
            self.answered,
            self.stall,
            self.grown,
            self.quiet,
        ]

    def line(self) -> str:
        """For people who wait."""
        done, others = self.tally.attacks.total(), f"{self.answered} answers of others, waits to {self.stall:.1f} s"
        return f"{self.port.name}: {done} attacks, {others}" + (f", left: {self.left}" if self.left else "")


@dataclass
class Course:
    """Memory of one process, look by look. `times`: by time.monotonic; `memory`: MB."""

    times: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def grown(self, begin: float, end: float) -> float:
        """MB: the middle of the last third of a stretch over that of the second; 0 where nobody looked in one."""
        third = (end - begin) / 3
        middle, last = self._held(begin + third, end - third), self._held(end - third, end)
        return statistics.median(last) - statistics.median(middle) if middle and last else 0.0

    def _held(self, begin: float, end: float) -> list[float]:
        return [held for at, held in zip(self.times, self.memory, strict=True) if begin <= at < end]


def complaints(logs: Path) -> list[str]:
    """Lines of the logs in a folder that only an exception nobody expected leaves."""
    found = []
    for path in sorted(logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        found += [f"{path.stem}: {line[:500]}" for line in lines if _COMPLAINT.search(line)]
    return found


class Watch:
    """The processes of a stack.

    Args:
        keep_seconds: how long records stay in Redis that nobody needs.
    """

    def __init__(self, stack: LocalStack, redis: EmbeddedRedis, *, keep_seconds: float) -> None:
        self._redis, self._keep = Redis.from_url(redis.url), keep_seconds
        self._pods: dict[str, Any] = {
            pod.name: pod for tier in ("router", "verifier", "speculator") for pod in stack.pods(tier)
        }
        self._pids = {name: pid_of(pod) for name, pod in self._pods.items()}
        self._courses = {name: Course() for name in self._pods}
        self._first: dict[str, float] = {}
        self._before = self.rest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._redis.close()

    def look(self) -> None:
        """How much each process holds now."""
        now = time.monotonic()
        for name, course in self._courses.items():
            course.times.append(now)
            course.memory.append(resident(self._pids[name]))

    def settle(self) -> None:
        """From here on what is held at rest counts."""
        self._first = {name: resident(pid) for name, pid in self._pids.items()}

    def grown(self, name: str, begin: float, end: float) -> float:
        """MB of a process, as `Course.grown`."""
        return self._courses[name].grown(begin, end)

    def rest_mb(self) -> dict[str, tuple[float, float]]:
        """MB of each process at `settle` and now."""
        return {name: (first, resident(self._pids[name])) for name, first in self._first.items()}

    def dead(self) -> list[str]:
        """Processes that are not there any more."""
        return [name for name, pod in self._pods.items() if not pod.alive]

    def rest(self) -> Rest:
        """What there is now."""
        metrics = {name: scrape(pod.values["metrics_listen"]) for name, pod in self._pods.items()}
        pools = {name: metrics[name][POOLS[pod.tier]] for name, pod in self._pods.items() if pod.tier in POOLS}
        running = sum(values["graftree_pod_sessions"] for values in metrics.values())
        keys = by_family(self._redis.scan_iter("graftree:v1:{s:*", count=1000))
        return Rest(keys, running, pools, {name: descriptors(pid) for name, pid in self._pids.items()})

    async def back(self) -> tuple[dict[str, float], float]:
        """Wait until all is as it was at the beginning; returns what is not, and how long it took."""
        began = time.monotonic()
        while True:
            try:
                left = (await asyncio.to_thread(self.rest)).left_behind(self._before)
            except OSError as error:
                left = {f"no metrics: {error}": 1.0}
            took = time.monotonic() - began
            if not left or took > self._keep + REST_SECONDS:
                return left, took
            await asyncio.sleep(POLL_SECONDS)
