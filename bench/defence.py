"""A speculator that hurts is found out: throughput over plain decoding while a drafter is wrong, good, wrong again.

    python -m bench.defence [--model M ...] [--nodes 16 64] [--repeats 3] [--json FILE] [--quick]

The drafter (`bench.turncoat`) knows the answer, which was decoded plainly before: it says what does not follow, from
one output position on what does, from another one on again what does not; equally sure throughout. The same prompt is
answered with and without it in turn, in one run, so that whatever else the machine does meets both. A round is a
chunk, so the ratio of any stretch of rounds is the time that plain decoding took for the same tokens over the time
that these rounds took.

The stand-in's step takes 20 ms, and 0.5 ms more for every row beyond the eighth. On the real model the drafter either
sleeps for its step, as on another machine, or is busy, as an SSM on this one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import report
from bench.tables import Table
from graftree import Client, LocalStack
from graftree.cli.stack import tell
from graftree.config import DEFAULT_MODEL
from graftree.sdk.options import SpeculationOptions

STANDIN = "standin:?step_ms=20&row_ms=0.5&free_rows=8&vocab=4096&context=65536"
PROMPT = "Describe a day at a harbour, from the first boat in the morning to the last one at night."
ROUNDS = 20  # in which the router may take to find a wrong speculator out
PAR, RECOVERED = 0.95, 1.3


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Attributes:
        nodes: of a step at most.
        draft_ms: what the drafter takes for a level.
        burn: whether it is busy meanwhile.
        turns: output positions at which it becomes good, becomes wrong again, and at which the answer ends.
    """

    model: str
    nodes: int
    draft_ms: float
    burn: bool
    turns: tuple[int, int, int]

    @property
    def name(self) -> str:
        kind = "stand-in" if self.model == STANDIN else "default model" if self.model == DEFAULT_MODEL else self.model
        return f"{kind}, {self.nodes} nodes, {'busy' if self.burn else 'asleep'} {self.draft_ms:g} ms"


@dataclass
class Answer:
    """When tokens came.

    Attributes:
        ends: output position behind each chunk.
        times: seconds at which each came.
    """

    ends: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def at(self, position: int) -> float:
        """When so many tokens were there, chunks taken as even streams of tokens."""
        index = next(index for index, end in enumerate(self.ends) if end >= position)
        if index == 0:
            return self.times[0]
        begun, end = self.ends[index - 1], self.ends[index]
        share = (position - begun) / (end - begun)
        return self.times[index - 1] + share * (self.times[index] - self.times[index - 1])

    def rounds(self, first: int, last: int) -> list[int]:
        """Output positions at the ends of the rounds that began at `first` or later and ended by `last`."""
        return [begun for begun in self.ends if first <= begun <= last]


@dataclass(frozen=True)
class Stretch:
    """Part of an answer: seconds it took with the speculator and by plain decoding."""

    fast: float
    plain: float


STRETCHES = ("wrong: first", "wrong: later", "good", "good: later", "again: first", "again: later")


def answer(client: Client, options: dict[str, Any], *, off: bool) -> tuple[Answer, list[int]]:
    """One request: when its tokens came, and which they were."""
    seen, tokens = Answer(), list[int]()
    speculation = SpeculationOptions(off=True) if off else None
    for chunk in client.stream(speculation=speculation, **options):
        if chunk.token_ids:
            tokens += chunk.token_ids
            seen.ends.append(len(tokens))
            seen.times.append(time.perf_counter())
    return seen, tokens


def stretches(fast: Answer, plain: Answer, turns: tuple[int, int, int]) -> dict[str, Stretch]:
    """The parts of one pair of answers by `STRETCHES`."""
    good, bad, end = turns

    def between(first: int, last: int) -> Stretch:
        if last <= first:
            return Stretch(0.0, 0.0)
        return Stretch(fast.at(last) - fast.at(first), plain.at(last) - plain.at(first))

    begun = 10  # the prompt, and the first rounds' setting up
    found, again = fast.rounds(begun, good), fast.rounds(bad, end)
    one, two = found[min(ROUNDS, len(found) - 1)], again[min(ROUNDS, len(again) - 1)]
    middle = (good + bad) // 2
    parts = [(begun, one), (one, good), (good, bad), (middle, bad), (again[0], two), (two, end)]
    return {name: between(*part) for name, part in zip(STRETCHES, parts, strict=True)}


def recovery(fast: Answer, turns: tuple[int, int, int]) -> int:
    """Rounds from the turn to the better until drafts were accepted again."""
    found = fast.rounds(turns[0], turns[1])
    return next((number for number, (a, b) in enumerate(pairwise(found)) if b - a > 2), len(found))


def measure(setting: Setting, repeats: int) -> tuple[dict[str, float], int]:
    """Ratio of throughput to plain decoding by stretch, and rounds to recovery in the median."""
    options: dict[str, Any] = {"max_new_tokens": setting.turns[-1], "ignore_eos": True}
    options |= {"prompt": PROMPT} if setting.model != STANDIN else {"token_ids": list(range(1, 33))}
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.json"
        router = {"tree_budget": setting.nodes, "tree_depth": 8}
        with (
            LocalStack(setting.model, [], router_options=router, start_seconds=600) as stack,
            Client(stack.target) as client,
        ):
            result = client.generate(speculation=SpeculationOptions(off=True), echo_prompt_token_ids=True, **options)
            whole = [*result.prompt_token_ids, *result.token_ids]
            texts.write_text(json.dumps([whole]))
            turns = ",".join(map(str, setting.turns[:2]))
            spec = f"bench.turncoat:Turncoat?texts={texts}&turns={turns}&step_ms={setting.draft_ms:g}&width=2"
            stack.add("speculator", f"{spec}&burn={int(setting.burn)}")
            sums = {name: [0.0, 0.0] for name in STRETCHES}
            recoveries: list[int] = []
            for repeat in range(repeats):
                pair: dict[bool, Answer] = {}
                for off in (repeat % 2 == 0, repeat % 2 == 1):
                    pair[off], tokens = answer(client, options, off=off)
                    assert tokens == list(result.token_ids), "speculation changed a token"
                for name, stretch in stretches(pair[False], pair[True], setting.turns).items():
                    sums[name][0] += stretch.fast
                    sums[name][1] += stretch.plain
                recoveries.append(recovery(pair[False], setting.turns))
                tell(f"{setting.name}: {repeat + 1} of {repeats}")
    ratios = {name: plain / fast if fast else float("nan") for name, (fast, plain) in sums.items()}
    return ratios, sorted(recoveries)[len(recoveries) // 2]


def settings(options: argparse.Namespace) -> list[Setting]:
    """What is compared."""
    found = []
    for model in options.model:
        real = model != STANDIN
        turns = (100, 300, 420) if real else (150, 750, 1050)
        if options.quick:
            turns = (60, 160, 220) if real else (80, 320, 480)
        for nodes in options.nodes:
            found += [
                Setting(model, nodes, 5.0 if real else 2.0, burn, turns)
                for burn in ((False, True) if real else (False,))
            ]
    return found


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", nargs="+", default=[STANDIN, DEFAULT_MODEL])
    arguments.add_argument("--nodes", type=int, nargs="+", default=[16, 64], help="of a step at most")
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    if options.quick:
        options.model, options.repeats = options.model[:1], 1
    out = report.Report("defence")
    rows: dict[str, tuple[float, ...]] = {}
    for setting in settings(options):
        ratios, rounds = measure(setting, options.repeats)
        rows[setting.name] = (*ratios.values(), float(rounds))
        for name in ("wrong: later", "again: later"):
            out.add(f"{setting.name}: {name}", ratios[name], "of plain", f">= {PAR}", ratios[name] >= PAR)
        good = ratios["good: later"]
        out.add(f"{setting.name}: good: later", good, "of plain", f">= {RECOVERED}", good >= RECOVERED)
    table = Table.of("throughput over plain", (*STRETCHES, "rounds"), rows, rows.__getitem__)
    print(f"\n{table}")
    out.details = {"table": table.details()}
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
