"""Serving under load: throughput by requests at once, memory of a session, and what 500 requests leave behind.

    python -m bench.serve_load [--concurrency 1 4 16 64] [--requests 500] [--json FILE]

Real pods with the default speculators, prompts of all categories. The batches of all numbers of requests at once take
turns. The KV pool is read from the verifier's metrics, memory from the system's word on the pods' processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench import report
from bench.recording import Prompt, prompts
from bench.serve_turns import Service, Turn, flags, serving
from bench.tables import Table
from bench.vitals import free_port
from graftree import AsyncClient, LocalStack
from graftree.config import VerifierConfig
from graftree.errors import Cancelled
from graftree.local.processes import ProcessPod
from graftree.models.pull import pull
from graftree.text.tokenizer import Tokenizer
from verifier_service.capacity import bytes_per_token

TIERS = ("router", "speculator", "verifier")
SAMPLE_SECONDS = 0.2
SETTLE_SECONDS = 5.0
LEAST_BATCH = 6  # requests
SHORT_PROMPT, SHORT_ANSWER = 24, 8  # tokens
CANCEL_SECONDS = 0.5  # a cancelled request is given up within this


@dataclass(frozen=True)
class Usage:
    """One look.

    Attributes:
        free_blocks: of the verifier's KV pool, cached prefixes that nobody uses included.
        resident: tier -> bytes of memory its processes hold.
    """

    free_blocks: int
    resident: dict[str, int]


class Monitor:
    """Looks at pool and processes; as a context, also all the time, keeping the extremes.

    Args:
        address: of the verifier's metrics.

    Attributes:
        fewest, most: least free blocks, and most memory by tier, since the context was entered.
    """

    def __init__(self, stack: LocalStack, address: str) -> None:
        self._stack, self._address = stack, address
        self._stop = threading.Event()
        self._begin()

    def _begin(self) -> None:
        first = self.look()
        self.fewest, self.most = first.free_blocks, dict(first.resident)

    def look(self) -> Usage:
        with urllib.request.urlopen(f"http://{self._address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        blocks = float(values["graftree_verifier_kv_blocks"])
        free = round(blocks * (1 - float(values["graftree_kv_cache_usage_perc"])))
        return Usage(free, {tier: sum(map(_resident, self._pids(tier))) for tier in TIERS})

    def _pids(self, tier: str) -> list[int]:
        pods = [pod for pod in self._stack.pods(tier) if pod.alive]  # type: ignore[arg-type]
        return [pod.pid for pod in pods if isinstance(pod, ProcessPod)] or [os.getpid()]

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            usage = self.look()
            self.fewest = min(self.fewest, usage.free_blocks)
            self.most = {tier: max(held, usage.resident[tier]) for tier, held in self.most.items()}

    def __enter__(self) -> Self:
        self._begin()
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _resident(pid: int) -> int:
    path = Path(f"/proc/{pid}/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.is_file() else 0


def block_bytes(model: str) -> int:
    """Bytes of a KV block."""
    config = AutoConfig.from_pretrained(pull(model, progress=False), trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    size: int = VerifierConfig.model_fields["block_size"].default
    return size * bytes_per_token(empty)


@dataclass
class Level:
    """What was seen with so many requests at once.

    Attributes:
        turns: batches.
        blocks: most KV blocks in use.
        grown: tier -> most bytes beyond what it held before.
    """

    turns: list[Turn] = field(default_factory=list)
    blocks: int = 0
    grown: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(turn.tokens for turn in self.turns) / sum(turn.seconds for turn in self.turns)


def levels(
    service: Service, monitor: Monitor, chosen: Sequence[Prompt], concurrency: Sequence[int], turns: int
) -> dict[int, Level]:
    """Throughput and memory by requests at once; the numbers take turns, the most first so that memory is at its full
    height before the others are compared with it."""
    found = {count: Level() for count in concurrency}
    base = monitor.look()
    for turn in range(turns):
        for count in sorted(concurrency, reverse=bool(turn % 2)):
            size = max(count, LEAST_BATCH)
            batch = [chosen[(turn * size + index) % len(chosen)] for index in range(size)]
            with monitor:
                found[count].turns.append(service.batch(batch, count, off=False))
            level = found[count]
            level.blocks = max(level.blocks, base.free_blocks - monitor.fewest)
            for tier, held in monitor.most.items():
                level.grown[tier] = max(level.grown.get(tier, 0), held - base.resident[tier])
            print(f"\r{count} at once, turn {turn + 1}/{turns}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


async def churn(client: AsyncClient, chosen: Sequence[Prompt], requests: int, at_once: int) -> tuple[int, int]:
    """Many short requests, every third of which is given up at some moment.

    Returns:
        How many were answered, and how many were cancelled before their end.
    """
    draw, waiting = random.Random(0), iter(range(requests))
    answered = cancelled = 0

    async def one(index: int, patience: float | None) -> bool:
        token_ids = list(chosen[index % len(chosen)].token_ids[-SHORT_PROMPT:])
        async with client.stream(token_ids=token_ids, max_new_tokens=SHORT_ANSWER, ignore_eos=True) as stream:
            timer = asyncio.get_running_loop().call_later(patience, stream.cancel) if patience is not None else None
            try:
                async for _ in stream:
                    pass
            except Cancelled:
                return False
            finally:
                if timer is not None:
                    timer.cancel()
        return True

    async def work() -> None:
        nonlocal answered, cancelled
        for index in waiting:
            whole = await one(index, draw.uniform(0, CANCEL_SECONDS) if index % 3 == 0 else None)
            answered, cancelled = answered + whole, cancelled + (not whole)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return answered, cancelled


def settled(service: Service, monitor: Monitor, free_blocks: int) -> tuple[Usage, int]:
    """Pool and memory when all is over, and sessions that pods still have; waits a little for the last ones to go."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        usage, left = monitor.look(), sum(pod.sessions for pod in service.info().pods)
        if (usage.free_blocks == free_blocks and not left) or time.monotonic() > end:
            return usage, left
        time.sleep(SAMPLE_SECONDS)


def figures(found: dict[int, Level], size: int, out: report.Report) -> None:
    """Tables and figures of `levels`."""
    least = min(found)
    megabytes = 1 / 2**20
    table = Table.of(
        "requests at once",
        ["tokens/s", f"over {least}", "KV MB", "a session", *(f"{tier} MB" for tier in TIERS)],
        map(str, found),
        lambda name: (
            (level := found[int(name)]).rate,
            level.rate / found[least].rate,
            level.blocks * size * megabytes,
            level.blocks * size * megabytes / int(name),
            *(level.grown[tier] * megabytes for tier in TIERS),
        ),
    )
    print(f"\n{table}")
    out.details["levels"] = table.details()
    for name, values in table.rows:
        out.add(f"{name} at once", values[0], "tokens/s")
        out.add(f"{name} at once over {least}", values[1], "x")
    most = max(found)
    out.add(f"KV of a session, {most} at once", table.rows[-1][1][3], "MB")
    for tier, grown in zip(TIERS, table.rows[-1][1][4:], strict=True):
        out.add(f"memory of a session in the {tier} tier, {most} at once", grown / most, "MB")


def parser() -> argparse.ArgumentParser:
    arguments = flags(__doc__.splitlines()[0], concurrency=[1, 4, 16, 64], max_new_tokens=64)
    arguments.add_argument("--requests", type=int, default=500, help="short ones, a third of them cancelled")
    return arguments


def measure(service: Service, monitor: Monitor, options: argparse.Namespace, out: report.Report) -> None:
    """All of it on a running stack."""
    lines = report.prompts(options.prompts, 2 * max(options.concurrency))
    chosen = prompts(lines, Tokenizer.load(options.model), len(lines))
    random.Random(0).shuffle(chosen)
    service.warm_up()
    before = monitor.look()
    found = levels(service, monitor, chosen, sorted(options.concurrency), options.turns)
    figures(found, block_bytes(options.model), out)
    begun, resting = time.monotonic(), monitor.look()
    answered, cancelled = service.call(lambda client: churn(client, chosen, options.requests, 16))
    seconds = time.monotonic() - begun
    usage, left = settled(service, monitor, before.free_blocks)
    out.add("short requests answered", answered, f"of {options.requests}")
    out.add("short requests cancelled", cancelled, f"of {options.requests}")
    out.add("short requests", options.requests / seconds, "1/s")
    same = usage.free_blocks == before.free_blocks
    out.add("free KV blocks after all", usage.free_blocks, "blocks", f"= {before.free_blocks}", same)
    out.add("sessions left on pods", left, "", "= 0", left == 0)
    for tier in TIERS:
        grown = (usage.resident[tier] - resting.resident[tier]) / 2**20
        out.add(f"memory gained by the {tier} tier over the short requests", grown, "MB")


def main(arguments: Sequence[str] | None = None, *, in_process: bool = False) -> int:
    """Args: `in_process` runs the stack in this process, for tests."""
    options = parser().parse_args(arguments)
    if options.quick:
        options.concurrency, options.turns, options.requests = [1, 4], 1, 30
        options.max_new_tokens = min(options.max_new_tokens, 8)
    address = f"127.0.0.1:{free_port()}"
    out = report.Report("serve_load")
    with serving(options, in_process=in_process, metrics_listen=address) as (stack, service):
        measure(service, Monitor(stack, address), options, out)
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
