"""The whole loop on this machine: tokens per second with speculation over plain decoding, one request at a time.

    python -m bench.loop [--model M] [--speculator SPEC ...] [--per-category 5] [--max-new-tokens 96]

One stack of real pods serves both: each prompt is answered twice in a row, with and without speculation, the two in
turn first, so that whatever else the machine does meets both alike. Rates are of decoding, from the first token to
the last; the ratio of whole requests, prompt included, is beside. docs/benchmarks.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import report
from bench.recording import Prompt, prompts
from bench.tables import ALL, Table
from graftree import Client, LocalStack
from graftree.cli.stack import tell
from graftree.config import DEFAULT_MODEL, DEFAULT_SPECULATORS
from graftree.local.processes import ProcessPod
from graftree.sdk.options import SpeculationOptions
from graftree.sdk.results import Result
from graftree.text.tokenizer import Tokenizer

WARM_UP = "Name three rivers, and say of each where it begins and where it ends."
GOAL = 1.8
BUCKETS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # least numbers of draft tokens of the histogram's columns


@dataclass(frozen=True)
class Pair:
    """One prompt, answered with speculation and without.

    Attributes:
        fast, plain: both answers.
        cpu: tier -> CPU seconds its pods took for the answer with speculation.
    """

    category: str
    fast: Result
    plain: Result
    cpu: dict[str, float]

    @property
    def ratio(self) -> float:
        """Of the decoding rates: the tokens are the same."""
        return self.plain.timings.decode_ns / max(1, self.fast.timings.decode_ns)


def rate(results: Iterable[Result]) -> float:
    """Tokens per second of decoding; the first token of an answer is the prompt's."""
    results = list(results)
    tokens = sum(result.usage.completion_tokens - 1 for result in results)
    return tokens / (sum(result.timings.decode_ns for result in results) / 1e9)


COLUMNS = ("plain/s", "spec/s", "ratio", "median", "whole", "tau", "nodes", "hits")


def rates(pairs: Sequence[Pair]) -> tuple[float, ...]:
    """The numbers under `COLUMNS`: tokens per second without and with speculation, their ratio, the median ratio of a
    prompt, the ratio of whole requests, tokens and draft tokens per step, share of steps with a surviving branch."""
    fast, plain = [pair.fast for pair in pairs], [pair.plain for pair in pairs]
    steps = sum(result.speculation.num_spec_steps for result in fast)
    return (
        rate(plain),
        rate(fast),
        rate(fast) / rate(plain),
        statistics.median(pair.ratio for pair in pairs),
        sum(result.timings.total_ns for result in plain) / sum(result.timings.total_ns for result in fast),
        sum(result.usage.completion_tokens for result in fast) / steps,
        sum(result.speculation.num_draft_tokens for result in fast) / steps,
        sum(result.speculation.num_branch_hits for result in fast) / steps,
    )


PARTS = ("round", "forward", "sample", "queue", "verifier", "wait", "rest", "commit")


def parts(results: Sequence[Result]) -> tuple[float, ...]:
    """Milliseconds of a round of decoding, and where they go.

    A request's times are sums over its steps, the prompt's among them; TTFT is nearly all that one's and is taken off
    the forward time. "verifier" is the rest of the verifier's, "wait" is for a first draft, "rest" the router, the
    streams between the pods and the client's, "commit" the wait for Redis, which runs beside the next step.
    """
    steps = sum(result.speculation.num_spec_steps - 1 for result in results)

    def per_round(of: Callable[[Result], int]) -> float:
        return sum(map(of, results)) / max(1, steps) / 1e6

    whole = per_round(lambda r: r.timings.decode_ns)
    forward = per_round(lambda r: max(0, r.timings.verify_forward_ns - r.timings.ttft_ns))
    sample, queue = per_round(lambda r: r.timings.verify_sample_ns), per_round(lambda r: r.timings.verify_queue_ns)
    verifier = per_round(lambda r: max(0, r.timings.verify_total_ns - r.timings.ttft_ns)) - forward - sample - queue
    wait = per_round(lambda r: r.timings.draft_wait_ns)
    rest = whole - forward - sample - queue - verifier - wait
    return whole, forward, sample, queue, verifier, wait, rest, per_round(lambda r: r.timings.commit_ns)


def histogram(results: Iterable[Result]) -> tuple[float, ...]:
    """Share of the rounds of decoding by draft tokens verified, under `BUCKETS`."""
    counts = [0] * len(BUCKETS)
    for result in results:
        for drafted, steps in enumerate(result.speculation.draft_histogram):
            # The prompt's own step never has a tree.
            counts[max(i for i, least in enumerate(BUCKETS) if least <= drafted)] += steps - (drafted == 0)
    return tuple(count / max(1, sum(counts)) for count in counts)


def cpu_seconds(stack: LocalStack) -> dict[str, float]:
    """CPU seconds of each tier's processes so far; nothing where the system does not tell."""
    seconds: dict[str, float] = {}
    for tier in ("router", "speculator", "verifier"):
        for pod in stack.pods(tier):
            path = Path(f"/proc/{pod.pid}/stat") if isinstance(pod, ProcessPod) else Path()
            if path.is_file():
                user, system = path.read_text().rpartition(")")[2].split()[11:13]
                seconds[tier] = seconds.get(tier, 0.0) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds


def run(stack: LocalStack, chosen: Sequence[Prompt], options: argparse.Namespace) -> list[Pair]:
    """Answer every prompt both ways."""
    pairs: list[Pair] = []
    with Client(stack.target) as client:

        def answer(prompt: Prompt, *, off: bool) -> tuple[Result, dict[str, float]]:
            before = cpu_seconds(stack)
            result = client.generate(
                token_ids=list(prompt.token_ids),
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                seed=prompt.question_id,
                speculation=SpeculationOptions(off=off),
            )
            return result, {tier: spent - before[tier] for tier, spent in cpu_seconds(stack).items()}

        for off in (True, False):
            client.generate(
                chat=[{"role": "user", "content": WARM_UP}],
                max_new_tokens=32,
                speculation=SpeculationOptions(off=off),
            )
        for index, prompt in enumerate(chosen):
            order = (False, True) if index % 2 else (True, False)
            answers = {off: answer(prompt, off=off) for off in order}
            (fast, cpu), (plain, _) = answers[False], answers[True]
            pairs.append(Pair(prompt.category, fast, plain, cpu))
            print(f"\r{index + 1}/{len(chosen)} prompts", end="", file=sys.stderr, flush=True)
    return pairs


def summary(pairs: Sequence[Pair]) -> report.Report:
    """Tables and targets."""
    out = report.Report("loop")
    by_category: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.fast.usage.completion_tokens > 1:
            by_category.setdefault(pair.category, []).append(pair)
    counted = [pair for own in by_category.values() for pair in own]
    rows = {category: rates(own) for category, own in by_category.items()} | {ALL: rates(counted)}
    every = {"with speculation": [p.fast for p in counted], "plain": [p.plain for p in counted]}
    tables = [
        Table.of("tokens per second of decoding", COLUMNS, rows, rows.__getitem__),
        Table.of("milliseconds of a round", PARTS, every, lambda name: parts(every[name])),
        Table.of(
            "share of rounds by draft tokens",
            [f"{least}+" if least else "0" for least in BUCKETS],
            [*by_category, ALL],
            lambda name: histogram(pair.fast for pair in by_category.get(name, counted)),
        ),
    ]
    for table in tables:
        print(f"\n{table}")
    ratios = {category: rows[category][COLUMNS.index("ratio")] for category in by_category}
    for category, ratio in ratios.items():
        out.add(f"{category}: with speculation over plain", ratio, "x", "> 1", ratio > 1)
    mean = statistics.mean(ratios.values())
    out.add("mean of the categories", mean, "x", f">= {GOAL}", mean >= GOAL)
    out.add("median of the prompts", statistics.median(pair.ratio for pair in counted), "x")
    same = sum(pair.fast.token_ids == pair.plain.token_ids for pair in pairs)
    out.add("same tokens both ways", same, f"of {len(pairs)}", "all but near-ties")
    tokens = sum(pair.fast.usage.completion_tokens for pair in counted)
    for tier in counted[0].cpu:
        spent = sum(pair.cpu[tier] for pair in counted)
        out.add(f"CPU of the {tier} tier", 1000 * spent / tokens, "ms/token")
    out.details = {
        "tables": [table.details() for table in tables],
        "ratios": {category: [round(pair.ratio, 3) for pair in own] for category, own in by_category.items()},
    }
    return out


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument(
        "--speculator", action="append", metavar="SPEC", help=f"default: {', '.join(DEFAULT_SPECULATORS)}"
    )
    arguments.add_argument("--per-category", type=int, default=5, help="prompts")
    arguments.add_argument("--max-new-tokens", type=int, default=96)
    arguments.add_argument("--temperature", type=float, default=0.0)
    arguments.add_argument("--threads", type=int, help="CPU threads of each pod with a model")
    arguments.add_argument("--prompts", type=Path, default=report.PROMPTS)
    options = arguments.parse_args()
    if options.quick:
        options.per_category, options.max_new_tokens = 1, min(options.max_new_tokens, 24)
    lines = report.prompts(options.prompts, sys.maxsize)
    chosen = prompts(lines, Tokenizer.load(options.model), options.per_category)
    speculators = options.speculator or list(DEFAULT_SPECULATORS)
    with LocalStack(options.model, speculators, threads=options.threads, notify=tell) as stack:
        pairs = run(stack, chosen, options)
    out = summary(pairs)
    out.details["speculators"] = speculators
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
