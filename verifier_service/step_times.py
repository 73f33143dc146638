"""What this verifier's steps take: measured before the first session, then followed as steps are run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import structlog

from graftree.models.rows import Rows, chain_rows
from graftree.models.runner import TreeRunner
from graftree.step_time import Sample, StepTime

log = structlog.get_logger(__name__)

CHANGE = 0.1  # routers are told when a step's time is off by more than this share

Shape: TypeAlias = tuple[int, int, int]

_ROUNDS = 3
# (rows of each sequence, sequences, cached tokens of each). Time may be short: the whole range comes first, then the
# other terms, then the curve's bends.
_SHAPES: tuple[Shape, ...] = (
    *((rows, 1, 64) for rows in (1, 16, 64, 4)),
    *((rows, 1, 1024) for rows in (1, 16)),
    *((1, sequences, 64) for sequences in (4, 16)),
    *((rows, 1, 64) for rows in (32, 8, 128, 12, 24, 2, 48)),
)

# The load of the machine changes within seconds; what a number of rows costs compared with others hardly does.
_SHARED_SPEED, _SHAPE_SPEED = 0.1, 0.03
_SURPRISE = 4.0  # a step that took longer or shorter than this many times its estimate counts as that many times
_TRUST = 8  # steps of one size that a measurement counts for


def measure(
    runner: TreeRunner, *, seconds: float, step_tokens: int, clock: Callable[[], float] = time.monotonic
) -> StepTime | None:
    """Run steps of several shapes, each a few times, and fit a model to the shortest times.

    Args:
        runner: with no block in use that matters; the blocks taken here are given back.
        seconds: no step is begun after this.
        step_tokens: most rows of a step.
        clock: seconds.

    Returns:
        None: there was no time.
    """
    best = dict[Shape, float]()
    shapes = [shape for shape in _SHAPES if shape[0] + shape[2] <= runner.spec.max_context]
    room = min(runner.pool.free_blocks, max((sum(_blocks(shape, runner)) for shape in shapes), default=0))
    blocks = runner.pool.allocate(room)
    runner.kv.clear(blocks)
    batches = {
        shape: _batch(shape, runner, blocks)
        for shape in shapes
        if shape[0] * shape[1] <= step_tokens and sum(_blocks(shape, runner)) <= room
    }
    try:
        for batch in batches.values():
            runner.prepare(batch)
        ends = clock() + seconds
        for shape, batch in list(batches.items()) * _ROUNDS:
            begun = clock()
            if begun >= ends:
                break
            outputs = runner.forward(batch)
            float(outputs[-1][-1, 0])  # a GPU has only begun when `forward` returns
            best[shape] = min(best.get(shape, math.inf), max(clock() - begun, 1e-9))
    finally:
        runner.pool.free(blocks)
    if not best:
        return None
    samples = [
        Sample(rows * sequences, sequences, context * sequences, least)
        for (rows, sequences, context), least in best.items()
    ]
    model = StepTime.fit(samples)
    log.info(
        "step times",
        milliseconds={rows: round(model.seconds(rows) * 1000, 2) for rows in (1, 8, 16, 32, 64)},
        shapes=len(samples),
    )
    return model


def _batch(shape: Shape, runner: TreeRunner, blocks: Sequence[int]) -> list[Rows]:
    """A step of a shape, in the first of these blocks."""
    rows, _, context = shape
    counts = _blocks(shape, runner)
    return [
        chain_rows(blocks[end - count : end], context, [0] * rows, logits=range(rows))
        for count, end in zip(counts, accumulate(counts), strict=True)
    ]


def _blocks(shape: Shape, runner: TreeRunner) -> list[int]:
    """How many blocks each sequence of a shape takes."""
    rows, sequences, context = shape
    return [-(-(rows + context) // runner.kv.block_size)] * sequences


class StepTimes:
    """Follows the steps that are run. One thread observes; any may read `latest`.

    An estimate is the base model's, times what the machine is slower by now, times what a step of this size (to the
    power of two) is slower by than steps of other sizes.

    Attributes:
        latest: what routers are told; None = nothing was measured and no step has run.
    """

    def __init__(self, base: StepTime | None) -> None:
        """Args: `base` is what was measured; None = learn everything from steps."""
        self.latest = base
        self._base = base
        self._trust = 0 if base is None else _TRUST
        self._shared = 1.0
        self._shapes: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def observe(self, sample: Sample) -> None:
        """Take a step into account; `latest` changes if it is off by more than `CHANGE` at this step's size."""
        if self._base is None:
            self._base = StepTime.flat(sample.seconds)
        size = round(math.log2(max(1, sample.rows)))
        ratio = sample.seconds / self._base.seconds(*sample[:3])
        count = self._counts.get(size, 0)
        if count or self._trust:
            expected = self._shared * self._shapes.get(size, 1.0)
            ratio = min(max(ratio, expected / _SURPRISE), expected * _SURPRISE)
            self._shared += _SHARED_SPEED * (ratio / self._shapes.get(size, 1.0) - self._shared)
        shape = self._shapes.get(size, 1.0)
        weight = max(_SHAPE_SPEED, 1 / (count + 1 + self._trust))
        self._shapes[size] = shape + weight * (ratio / self._shared - shape)
        self._counts[size] = count + 1
        self._tell(sample, self._base, size)

    def _tell(self, sample: Sample, base: StepTime, size: int) -> None:
        told = 0.0 if self.latest is None else self.latest.seconds(*sample[:3])
        estimate = base.seconds(*sample[:3]) * self._shared * self._shapes[size]
        if not _differ(estimate, told):
            return
        model = base.scaled([(1 << size, self._shared * shape) for size, shape in sorted(self._shapes.items())])
        if _differ(model.seconds(*sample[:3]), told):  # it may not: a curve that would fall is raised
            self.latest = model


def _differ(value: float, told: float) -> bool:
    return abs(value - told) > CHANGE * told
