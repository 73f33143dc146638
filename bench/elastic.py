"""None, eight, none: are speculators used when they come, missed when they go, and does any token change?

    python -m bench.elastic [--pods 8] [--streams 8] [--seconds 5] [--json FILE] [--quick]

Streams run on a real router all the time. Speculators are added one by one and taken away again, by turns drained and
killed. Models are stand-ins: a verify step takes --step-ms whatever is in it, a drafter's a quarter of that for two
nodes, which are right four times out of five. So one pod cannot fill the trees of all streams, and eight can.

A pod counts as used once tokens were committed that it had drafted before (its metric foreseen_tokens). Every answer
is compared with what the stand-in says by its formula.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.autoscale import CAPACITY
from bench.report import Report, parser
from bench.tables import Table
from graftree.client import AsyncClient
from graftree.errors import GraftreeError
from graftree.local_stack import LocalStack
from graftree.models.standin import next_token

VOCAB = 512
POLL_SECONDS = 0.02
USED_SECONDS = 10.0  # the longest from a pod's start to its first use
WARM_TOKENS = 20  # delivered before the first stage begins
GAIN = 1.5  # tokens/s of all pods over none, at least


@dataclass
class Stage:
    """A stretch with so many pods.

    Attributes:
        name: "+3" after a third one has come, "-2" after one has gone and two are left.
        rate: tokens per second.
        length: tokens per verify step.
        used: seconds from the start of the pod that came to its first use; 0 = none came.
        sessions: fewest and most of a pod.
    """

    name: str
    rate: float
    length: float
    used: float = 0.0
    sessions: tuple[int, int] = (0, 0)

    def row(self) -> list[float]:
        """Of the table."""
        return [self.rate, self.length, self.used, *self.sessions]


@dataclass
class Streams:
    """So many at once, each answer followed by the next request.

    Attributes:
        answers: checked, to the last token.
        changed: answers with another token than the formula's.
        errors: of requests.
    """

    target: str
    count: int
    tokens: int
    answers: int = 0
    changed: int = 0
    errors: list[str] = field(default_factory=list)
    over: bool = False

    async def run(self) -> None:
        """Until `over`, and until the last one has ended."""
        async with AsyncClient(self.target) as client:
            await asyncio.gather(*(self._serve(client, number) for number in range(self.count)))

    async def _serve(self, client: AsyncClient, number: int) -> None:
        turn = 0
        while not self.over:
            prompt = [5 + number, 7 + turn % VOCAB // 2]
            try:
                result = await client.generate(token_ids=prompt, max_new_tokens=self.tokens, ignore_eos=True)
            except GraftreeError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            else:
                self.answers += 1
                self.changed += list(result.token_ids) != spoken(prompt, self.tokens)
            turn += 1


def spoken(prompt: Sequence[int], count: int) -> list[int]:
    """What the stand-in says, one token after the other."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text[-1], len(text), VOCAB))
    return text[len(prompt) :]


class Lab:
    """One stack of pods in this process.

    Args:
        seconds: of a stage.
    """

    def __init__(self, stack: LocalStack, drafter: str, seconds: float) -> None:
        self._stack, self._drafter, self._seconds = stack, drafter, seconds
        router: Any = stack.pods("router")[0]
        self._router = router.instance
        self._alive: list[int] = []

    async def course(self, pods: int) -> list[Stage]:
        """From none to so many and back."""
        await _until(lambda: self._router.metrics.delivered_tokens >= WARM_TOKENS)
        stages = [await self._stage("0", 0.0)]
        for _ in range(pods):
            used = await self._add()
            stages.append(await self._stage(f"+{len(self._alive)}", used))
        while self._alive:
            # The oldest first: it has the longest sessions.
            index = self._alive.pop(0)
            end = self._stack.kill if len(self._alive) % 2 else self._stack.stop
            await asyncio.to_thread(end, "speculator", index)
            stages.append(await self._stage(f"-{len(self._alive)}", 0.0))
        return stages

    async def _add(self) -> float:
        began = time.monotonic()
        index = await asyncio.to_thread(self._stack.add, "speculator", self._drafter)
        self._alive.append(index)
        pod: Any = self._stack.pods("speculator")[index]
        await _until(lambda: pod.instance.engine.foreseen > 0)
        return time.monotonic() - began

    async def _stage(self, name: str, used: float) -> Stage:
        metrics, began = self._router.metrics, time.monotonic()
        before = metrics.delivered_tokens, metrics.rounds
        await asyncio.sleep(self._seconds)
        tokens, rounds = metrics.delivered_tokens - before[0], metrics.rounds - before[1]
        rate = tokens / (time.monotonic() - began)
        infos = [info.sessions for info in self._router.pods.infos() if info.tier == "speculator"]
        spread = (min(infos), max(infos)) if infos else (0, 0)
        return Stage(name, rate, tokens / max(1, rounds), used, spread)


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for it, three times as long as anything may take."""
    for _ in range(round(3 * USED_SECONDS / POLL_SECONDS)):
        if condition():
            return
        await asyncio.sleep(POLL_SECONDS)


async def run(options: argparse.Namespace, stack: LocalStack, report: Report) -> None:
    """The streams, and the pods meanwhile."""
    streams = Streams(stack.target, options.streams, options.tokens)
    running = asyncio.create_task(streams.run())
    lab = Lab(stack, f"standin?step_ms={options.step_ms / 4:g}&hit_rate=0.8", options.seconds)
    try:
        stages = await lab.course(options.pods)
    finally:
        streams.over = True
        await running
    judge(report, stages, streams)


def judge(report: Report, stages: Sequence[Stage], streams: Streams) -> None:
    """Figures and targets."""
    by_name = {stage.name: stage for stage in stages}
    columns = ("tokens/s", "per step", "used s", "fewest", "most")
    table = Table.of("pods", columns, list(by_name), lambda name: by_name[name].row())
    print(table)
    report.details["stages"] = table.details()
    none, last = stages[0], stages[-1]
    most = next(stage for stage in reversed(stages) if stage.used)
    longest = max(stage.used for stage in stages)
    report.add("longest from a pod's start to its use", longest, "s", f"<= {USED_SECONDS:g}", longest <= USED_SECONDS)
    gain = most.rate / none.rate
    report.add("tokens/s of all pods over none", gain, "", f">= {GAIN:g}", gain >= GAIN)
    back = last.rate / none.rate
    report.add("tokens/s behind over before", back, "", ">= 0.8", back >= 0.8)
    report.add("answers", streams.answers)
    report.add("requests failed", len(streams.errors), "", "0", not streams.errors)
    report.add("answers that differ", streams.changed, "", "0", not streams.changed)
    report.details["errors"] = streams.errors[:10]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; 1 where a target was missed."""
    flags = parser(__doc__ or "")
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--pods", type=int, help="speculators at most (default: 8; --quick: 3)")
    flags.add_argument("--streams", type=int, default=8, help="at once")
    flags.add_argument("--seconds", type=float, help="of each stage (default: 5; --quick: 2)")
    flags.add_argument("--tokens", type=int, default=400, help="of an answer")
    flags.add_argument("--step-ms", type=float, default=100.0, help="a verify step's time; a drafter's is a quarter")
    options = flags.parse_args(arguments)
    options.pods = options.pods or (3 if options.quick else 8)
    options.seconds = options.seconds or (2.0 if options.quick else 5.0)
    report = Report("elastic: speculators come and go")
    with LocalStack(
        f"standin:?step_ms={options.step_ms:g}&vocab={VOCAB}&context=4096",
        [],
        in_process=True,
        threads=1,
        router_options={"tree_depth": 6},
        speculator_options=CAPACITY | {"drain_seconds": 0.5},
    ) as stack:
        asyncio.run(run(options, stack, report))
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
