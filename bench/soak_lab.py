"""What `bench.soak` looks at: the processes of a stack and its two Redis servers, under load and at rest."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from bench.vitals import descriptors, pid_of, resident, scrape, slope
from graftree.errors import GraftreeError
from graftree.local_stack import LocalStack

LOOK_SECONDS = 1.0
SERVERS = ("redis", "KV redis")
SPARE_DESCRIPTORS = 2
POOLED = 8  # connections more or less that clients of a Redis keep, by how much they have had to do at once
# What a key begins with -> what it belongs to.
FAMILIES = {
    "graftree:v1:{s:": "sessions in Redis",
    "graftree:v1:{registry}": "registry in Redis",
    "graftree:kv:": "KV blocks in Redis",
}
OTHERS = "other keys in Redis"


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
        """Of memory (MB) and descriptors, a minute, in the second half.

        The first half is for what grows once and then stays: KV pools whose pages have not all been written to, and
        oneDNN's code for every number of rows that a step has had.
        """
        begin = len(self.times) // 2
        return slope(self.times[begin:], self.memory[begin:]), slope(self.times[begin:], self.files[begin:])

    @property
    def row(self) -> list[float]:
        """Memory at the beginning, halfway and at the end with its slope; descriptors at both ends with theirs."""
        memory, files = self.slopes()
        halfway = self.memory[len(self.memory) // 2]
        return [self.memory[0], halfway, self.memory[-1], memory, self.files[0], self.files[-1], files]


COLUMNS = ("MB first", "half", "last", "MB/min", "files", "last", "/min")


@dataclass(frozen=True)
class Rest:
    """What there is at rest.

    Attributes:
        keys: in Redis, by what they belong to.
        running: requests under way.
        pools: share of KV blocks in use, by pod.
        files: descriptors, by process.
    """

    keys: dict[str, int]
    running: float
    pools: dict[str, float]
    files: dict[str, int]

    def left_behind(self, before: Rest) -> dict[str, float]:
        """What is not as it was before, by name."""
        found = {family: float(count - before.keys.get(family, 0)) for family, count in self.keys.items()}
        found["requests under way"] = self.running - before.running
        found |= {f"KV blocks of {pod}": used - before.pools[pod] for pod, used in self.pools.items()}
        more = {pod: count - before.files[pod] - _spare(pod) for pod, count in self.files.items()}
        found |= {f"descriptors of {pod}": float(count) for pod, count in more.items()}
        return {name: value for name, value in found.items() if value > 1e-9}


def _scraped(address: str) -> dict[str, float]:
    """As `bench.vitals.scrape`; a machine with too much to do is asked more than once."""
    for _ in range(5):
        with suppress(OSError):
            return scrape(address)
    return scrape(address)


def _spare(process: str) -> int:
    """Descriptors that a process may have more than before."""
    return SPARE_DESCRIPTORS + (POOLED if process.startswith(("router", "verifier", *SERVERS)) else 0)


def by_family(keys: Iterable[bytes]) -> dict[str, int]:
    """How many keys belong to what."""
    found = Counter(dict.fromkeys([*FAMILIES.values(), OTHERS], 0))
    for key in keys:
        text = key.decode(errors="replace")
        found[next((family for start, family in FAMILIES.items() if text.startswith(start)), OTHERS)] += 1
    return dict(found)


class Lab:
    """A stack of processes and its Redis servers.

    Args:
        stack: started, its pods with `metrics_listen`.
        servers: name -> client of a Redis.

    Attributes:
        pids: of every process that lives through it all, by name.
        courses: of these.
        most_keys: seen in all Redis servers together, at one look.
        say: takes a line a minute on how it goes.
        slow_starts: why a speculator that was started was not linked in time.
    """

    def __init__(self, stack: LocalStack, servers: dict[str, Redis]) -> None:
        self._stack, self._servers = stack, servers
        self.say: Callable[[str], None] = print
        pods: list[Any] = [pod for tier in ("router", "verifier", "speculator") for pod in stack.pods(tier)]
        self._lasting = {pod.name: pod for pod in pods}
        self._addresses = {name: pod.values["metrics_listen"] for name, pod in self._lasting.items()}
        self.pids = {name: pid_of(pod) for name, pod in self._lasting.items()}
        for name, server in servers.items():
            about: Any = server.info("server")
            self.pids[name] = int(about["process_id"])
        self.courses = {name: Course() for name in self.pids}
        self.most_keys = 0
        self.slow_starts: list[str] = []
        self._last = len(stack.pods("speculator")) - 1

    def metrics(self) -> dict[str, dict[str, float]]:
        """Of every pod that lives through it all."""
        return {name: _scraped(address) for name, address in self._addresses.items()}

    def rest(self) -> Rest:
        """How it is now."""
        metrics = self.metrics()
        usage = {"verifier": "graftree_kv_cache_usage_perc", "speculator": "graftree_speculator_kv_cache_usage_perc"}
        pools = {name: metrics[name][usage[pod.tier]] for name, pod in self._lasting.items() if pod.tier in usage}
        running = sum(values.get("graftree_num_requests_running", 0.0) for values in metrics.values())
        keys = by_family(key for server in self._servers.values() for key in server.scan_iter(count=1000))
        return Rest(keys, running, pools, {name: descriptors(pid) for name, pid in self.pids.items()})

    def _keys(self) -> int:
        """In all servers; 0 where one has no time to answer."""
        found: list[Any] = []
        with suppress(RedisError):
            found = [server.dbsize() for server in self._servers.values()]
        return sum(found)

    def replace_one(self, turn: int) -> None:
        """A speculator goes, by turns killed and stopped, and another one of its kind comes."""
        end = self._stack.kill if turn % 2 else self._stack.stop
        if turn:
            end("speculator", self._last)
        try:
            self._stack.add("speculator", "ngram")
        except GraftreeError as error:  # a machine with too much to do: it may still come, and goes the next time
            self.slow_starts.append(f"{type(error).__name__}: {error}")
        self._last = len(self._stack.pods("speculator")) - 1

    async def watch(self, seconds: float) -> None:
        """Look at every process until the time is over."""
        began, minute = time.monotonic(), 0
        while (now := time.monotonic() - began) < seconds:
            keys = await asyncio.to_thread(self._keys)
            self.most_keys = max(self.most_keys, keys)
            for name, course in self.courses.items():
                course.times.append(now)
                course.memory.append(resident(self.pids[name]))
                course.files.append(descriptors(self.pids[name]))
            if now >= 60 * minute:
                sizes = ", ".join(f"{name} {course.memory[-1]:.0f}" for name, course in self.courses.items())
                self.say(f"{minute:3d} min, MB: {sizes}; keys {keys}")
                minute += 1
            await asyncio.sleep(LOOK_SECONDS)

    async def churn(self, every: float, seconds: float) -> int:
        """Replace a speculator again and again; returns how often."""
        began, turn = time.monotonic(), 0
        while time.monotonic() - began + every < seconds:
            await asyncio.sleep(every)
            await asyncio.to_thread(self.replace_one, turn)
            turn += 1
        return turn

    async def back(self, before: Rest, longest: float) -> tuple[dict[str, float], float]:
        """Wait until everything is as before; returns what is not after `longest` seconds, and how long it took."""
        began = time.monotonic()
        while True:
            left = (await asyncio.to_thread(self.rest)).left_behind(before)
            took = time.monotonic() - began
            if not left or took > longest:
                return left, took
            await asyncio.sleep(LOOK_SECONDS)
