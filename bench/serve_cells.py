"""With speculation over without, by category and number of requests at once: the cells, their tables and targets."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.recording import Prompt
from bench.report import Report
from bench.serve_turns import Service, Turn
from bench.tables import ALL, Table

FLOOR = 0.95  # of plain decoding's rate, in any cell


class Pair(NamedTuple):
    """One batch, answered both ways."""

    fast: Turn
    plain: Turn


class Cell(NamedTuple):
    """What is measured together."""

    at_once: int
    category: str


@dataclass
class Cells:
    """Pairs by cell.

    Attributes:
        pairs: in the order in which they were measured.
    """

    pairs: dict[Cell, list[Pair]] = field(default_factory=dict)

    def of(self, at_once: int, category: str = ALL) -> list[Pair]:
        """One cell's, or those of all categories."""
        chosen = (cell for cell in self.pairs if cell.at_once == at_once and category in (ALL, cell.category))
        return [pair for cell in chosen for pair in self.pairs[cell]]


COLUMNS = ("plain/s", "spec/s", "ratio", "lowest", "decode", "tau", "nodes", "drafted")


def row(pairs: Sequence[Pair]) -> tuple[float, ...]:
    """The numbers under `COLUMNS`: tokens per second without and with speculation, their ratio, the lowest ratio of a
    batch, the ratio of the time from first to last token, tokens and draft tokens per step, share of steps with any.
    """
    fast = [result for pair in pairs for result in pair.fast.results]
    plain = [result for pair in pairs for result in pair.plain.results]
    rates = [_rate([pair.plain for pair in pairs]), _rate([pair.fast for pair in pairs])]
    steps = sum(result.speculation.num_spec_steps for result in fast)
    without = sum(result.speculation.draft_histogram[0] for result in fast if result.speculation.draft_histogram)
    decoding = sum(result.timings.decode_ns for result in fast)
    return (
        *rates,
        rates[1] / rates[0],
        min(pair.fast.rate / pair.plain.rate for pair in pairs),
        sum(result.timings.decode_ns for result in plain) / decoding if decoding else math.nan,
        sum(result.usage.completion_tokens for result in fast) / steps,
        sum(result.speculation.num_draft_tokens for result in fast) / steps,
        1 - without / steps,
    )


def _rate(turns: Sequence[Turn]) -> float:
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


def measure(
    service: Service, by_category: Mapping[str, Sequence[Prompt]], concurrency: Sequence[int], *, turns: int
) -> Cells:
    """Every cell, the categories and numbers in turn; each batch twice in a row, the two ways in turn first.

    Args:
        by_category: prompts, at least as many as are answered at once; where there are fewer, some come twice.
        turns: batches of a cell. A batch holds two prompts for each request at once (one, where that is one).
    """
    cells, count = Cells(), 0
    for turn in range(turns):
        for category, prompts in by_category.items():
            for at_once in concurrency:
                size = 2 * at_once if at_once > 1 else 1
                batch = [prompts[(turn * size + index) % len(prompts)] for index in range(size)]
                order = (False, True) if count % 2 else (True, False)
                answers = {off: service.batch(batch, at_once, off=off) for off in order}
                cells.pairs.setdefault(Cell(at_once, category), []).append(Pair(answers[False], answers[True]))
                count += 1
                total = turns * len(by_category) * len(concurrency)
                print(f"\r{count}/{total} batches", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return cells


def _table(cells: Cells, at_once: int) -> Table:
    categories = [cell.category for cell in cells.pairs if cell.at_once == at_once]
    return Table.of(f"{at_once} at once", COLUMNS, [*categories, ALL], lambda name: row(cells.of(at_once, name)))


def summary(cells: Cells, out: Report) -> None:
    """Tables and targets."""
    tables = [_table(cells, at_once) for at_once in dict.fromkeys(cell.at_once for cell in cells.pairs)]
    for table in tables:
        print(f"\n{table}")
        for category, values in table.rows:
            ratio = values[COLUMNS.index("ratio")]
            if category != ALL:
                name = f"{table.title}, {category}: speculation over plain"
                out.add(name, ratio, "x", f">= {FLOOR}", ratio >= FLOOR)
        ratios = [values[COLUMNS.index("ratio")] for category, values in table.rows if category != ALL]
        out.add(f"{table.title}: mean of the categories", statistics.mean(ratios), "x")
    pairs = [pair for own in cells.pairs.values() for pair in own]
    answers = [(a, b) for pair in pairs for a, b in zip(pair.fast.results, pair.plain.results, strict=True)]
    same = sum(fast.token_ids == plain.token_ids for fast, plain in answers)
    out.add("same tokens with speculation and without", same, f"of {len(answers)}", "all but near-ties")
    out.details["cells"] = [table.details() for table in tables]
    out.details["ratios of batches"] = {
        f"{cell.at_once} at once, {cell.category}": [round(p.fast.rate / p.plain.rate, 3) for p in own]
        for cell, own in cells.pairs.items()
    }
