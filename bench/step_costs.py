"""Times of one step on several runners, in turn, as ratios to the first one's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench import report
from bench.engine import Turns
from graftree.models.rows import Rows
from graftree.models.runner import TreeRunner
from kernels import chain_masks

SHAPES = ((1, 1), (8, 1), (16, 1), (32, 1), (1, 16), (16, 16))  # rows of each sequence, sequences
PREFILLS = (64, 512)


def costs(runners: Mapping[str, TreeRunner], context: int, rounds: int, out: report.Report) -> None:
    """Roots with nodes below them behind `context` cached tokens, and prompts.

    Args:
        runners: of one model, by name.
        rounds: turns; the fastest of each counts.
    """
    for rows, sequences in SHAPES:
        depths = [min(row, 1) for row in range(rows)]
        masks = [1 | 1 << row for row in range(rows)]
        name = f"{rows} row{'s' * (rows > 1)} of {sequences} session{'s' * (sequences > 1)}"
        _compare(name, runners, rounds, out, sequences, context, depths, masks)
    for rows in PREFILLS:
        _compare(f"prefill of {rows}", runners, rounds, out, 1, 0, range(rows), chain_masks(rows))


def _compare(
    name: str,
    runners: Mapping[str, TreeRunner],
    rounds: int,
    out: report.Report,
    sequences: int,
    context: int,
    depths: Sequence[int],
    masks: Sequence[int],
) -> None:
    rows = len(masks)
    turns, things, taken = Turns(), dict[Any, Callable[[], float]](), dict[str, list[list[int]]]()
    for key, runner in runners.items():
        count = -(-(context + rows) // runner.kv.block_size)
        taken[key] = [runner.pool.allocate(count) for _ in range(sequences)]
        runner.kv.clear([block for blocks in taken[key] for block in blocks])
        positions = [context + depth for depth in depths]
        batch = [Rows(blocks, context, 0, [5] * rows, positions, masks, range(rows)) for blocks in taken[key]]
        things[key] = partial(_seconds, runner, batch)
    turns.run(rounds, things)
    for key, runner in runners.items():
        for blocks in taken[key]:
            runner.pool.free(blocks)
    first, *others = runners
    out.add(f"{name}: {first}", turns.best[first] * 1e3, "ms")
    for key in others:
        out.add(f"{name}: {key} over {first}", turns.best[key] / turns.best[first], "x")


def _seconds(runner: TreeRunner, batch: Sequence[Rows]) -> float:
    begun = time.perf_counter()
    outputs = runner.forward(batch)
    float(outputs[-1][-1, 0])  # a GPU has only begun when `forward` returns
    return time.perf_counter() - begun
