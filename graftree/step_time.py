"""`StepTime`: what a verify step takes, as a function of its rows, sequences and cached context.

    seconds = curve(rows) + per_sequence * (sequences - 1) + per_context_token * context
              + per_row_context * rows * context / sequences

Reading a cached token costs its step the same however many rows look at it, and looking at it costs each of them
something; on a CPU the latter is most of what a long context costs a tree. The curve is piecewise linear between
measured numbers of rows and never falls: a step over a tree is bound by reading the weights until its rows fill the
arithmetic units, so it has plateaus and bends rather than one slope.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from graftree.errors import InvalidArgument

if TYPE_CHECKING:
    from graftree.v1 import verification_pb2

MAX_KNOTS = 64
LEAST_SECONDS, MOST_SECONDS = 1e-7, 3600.0  # of a step; the other terms may be 0

_LIMIT = f"{LEAST_SECONDS:g} to {MOST_SECONDS:g}"

# A hundredth of a relative error of 1 pulls the increments of the curve together where samples leave them open.
_RIDGE = 1e-4


class Sample(NamedTuple):
    """One measured step.

    Attributes:
        rows: packed rows: tree nodes, roots and prefill.
        sequences: sequences among which they are shared.
        context: cached tokens of all of them together.
        seconds: what it took.
    """

    rows: int
    sequences: int
    context: int
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """A verifier's step time.

    Attributes:
        rows: (K,) numbers of rows, strictly ascending, from 1.
        curve: (K,) seconds at each, for one sequence without context; LEAST_SECONDS to MOST_SECONDS, never falling.
            Between them the curve is linear, before the first it is constant, behind the last it goes on with the
            last slope.
        per_sequence: seconds for each sequence beyond the first.
        per_context_token: seconds for each cached token.
        per_row_context: seconds for each row and each cached token that it sees: as many as a sequence has on
            average.

    Raises:
        InvalidArgument: a value that breaks this.
    """

    rows: tuple[int, ...]
    curve: tuple[float, ...]
    per_sequence: float = 0.0
    per_context_token: float = 0.0
    per_row_context: float = 0.0

    def __post_init__(self) -> None:
        steps = list(pairwise(self.rows))
        _check("rows", self.rows, 0 < len(self.rows) <= MAX_KNOTS, f"1 to {MAX_KNOTS} numbers of rows")
        _check("rows", self.rows, self.rows[0] >= 1 and all(a < b for a, b in steps), "ascending, from 1")
        _check("seconds", self.curve, len(self.curve) == len(self.rows), "one for each number of rows")
        rises = all(a <= b for a, b in pairwise(self.curve))
        _check("seconds", self.curve, rises and all(map(_is_step, self.curve)), f"{_LIMIT} and never falling")
        for name in ("per_sequence", "per_context_token", "per_row_context"):
            value = getattr(self, name)
            _check(f"seconds_{name}", value, 0 <= value <= MOST_SECONDS, f"0 to {MOST_SECONDS:g}")

    def seconds(self, rows: int, sequences: int = 1, context: int = 0) -> float:
        """Predicted time of a step of `rows` packed rows over `sequences` sequences with `context` cached tokens."""
        for_context = self.per_context_token + self.per_row_context * rows / max(1, sequences)
        return self._at(rows) + self.per_sequence * max(0, sequences - 1) + for_context * context

    @classmethod
    def flat(cls, seconds: float) -> StepTime:
        """A step that takes the same, as far as a step can, whatever is in it."""
        return cls((1,), (_bounded(seconds),))

    @classmethod
    def fit(cls, samples: Sequence[Sample], *, knots: Sequence[int] | None = None) -> StepTime:
        """Least relative squares under the constraints that nothing is negative and the curve never falls.

        What is still more than the same rows would take in several steps of fewer was no measurement of the step: the
        machine was away. The curve is lowered there.

        Args:
            samples: at least one; seconds above 0.
            knots: where the curve may bend; None = the samples' own numbers of rows, at most `MAX_KNOTS` of them.

        Raises:
            InvalidArgument: no sample, or a value out of range.
        """
        _check("samples", 0, bool(samples), "at least one")
        times = np.array([sample.seconds for sample in samples])
        _check("samples.seconds", float(times.min()), bool(np.all(np.isfinite(times) & (times > 0))), "above 0")
        times = np.clip(times, LEAST_SECONDS, MOST_SECONDS)
        places = _thin(sorted(set(knots or (max(1, sample.rows) for sample in samples))))
        columns = [np.ones(len(samples))]
        rows = np.array([sample.rows for sample in samples], float)
        for left, right in pairwise(places):
            ramp = np.maximum((rows - left) / (right - left), 0)
            columns.append(ramp if right == places[-1] else np.minimum(ramp, 1))
        columns += _other_terms(samples)
        found = _non_negative(np.stack(columns, axis=1) / times[:, None], np.ones(len(samples)))
        floor = float(times.min()) * 1e-3  # everything may have been explained by the other terms
        heights = [max(float(height), floor) for height in np.cumsum(found[: len(places)])]
        curve = tuple(map(_bounded, _in_parts(places, heights)))
        return cls(tuple(places), curve, *(min(float(value), MOST_SECONDS) for value in found[len(places) :]))

    def scaled(self, factors: Sequence[tuple[int, float]]) -> StepTime:
        """The whole model times a factor that depends on the rows.

        Args:
            factors: (rows, factor), ascending; between them the factor is interpolated, outside it is the nearest.

        Returns:
            The scaled curve, raised where it would fall; the other terms get the mean factor.
        """
        places, values = [place for place, _ in factors], [value for _, value in factors]
        bends = _thin(sorted({*self.rows, *places}))
        heights = [self._at(rows) * float(np.interp(rows, places, values)) for rows in bends]
        mean = sum(values) / len(values)
        return replace(
            self,
            rows=tuple(bends),
            curve=tuple(_bounded(float(height)) for height in np.maximum.accumulate(heights)),
            per_sequence=min(self.per_sequence * mean, MOST_SECONDS),
            per_context_token=min(self.per_context_token * mean, MOST_SECONDS),
            per_row_context=min(self.per_row_context * mean, MOST_SECONDS),
        )

    def to_proto(self) -> verification_pb2.StepTime:
        from graftree.v1 import verification_pb2

        return verification_pb2.StepTime(
            rows=self.rows,
            seconds=self.curve,
            seconds_per_sequence=self.per_sequence,
            seconds_per_context_token=self.per_context_token,
            seconds_per_row_context=self.per_row_context,
        )

    @classmethod
    def from_proto(cls, message: verification_pb2.StepTime) -> StepTime:
        """Raises InvalidArgument: the curve falls, or a value is out of range."""
        return cls(
            tuple(message.rows),
            tuple(message.seconds),
            message.seconds_per_sequence,
            message.seconds_per_context_token,
            message.seconds_per_row_context,
        )

    def _at(self, rows: int) -> float:
        places, curve = self.rows, self.curve
        index = bisect_right(places, rows)
        if index == 0 or len(places) == 1:
            return curve[0]
        index = min(index, len(places) - 1)
        share = (rows - places[index - 1]) / (places[index] - places[index - 1])
        return curve[index - 1] + share * (curve[index] - curve[index - 1])


def _other_terms(samples: Sequence[Sample]) -> list[npt.NDArray[np.float64]]:
    """(samples,) columns of the terms beside the curve; nothing where the samples cannot tell one from another."""
    sequences = np.array([max(1, sample.sequences) for sample in samples], float)
    context = np.array([sample.context for sample in samples], float)
    seen = context / sequences
    rows = np.array([sample.rows for sample in samples], float)
    longer = rows[seen > seen.min()]
    known = (len(set(sequences)) > 1, len(set(context)) > 1, len(set(longer)) > 1)
    terms = (sequences - 1, context, rows * seen)
    return [term if tells else np.zeros(len(samples)) for term, tells in zip(terms, known, strict=True)]


def _in_parts(rows: Sequence[int], heights: Sequence[float]) -> list[float]:
    """A curve at `rows`, lowered to what each number of rows takes in steps of a smaller one."""
    lowered = list[float]()
    for count, height in zip(rows, heights, strict=True):
        parts = (-(-count // fewer) * below for fewer, below in zip(rows, lowered, strict=False))
        lowered.append(min((height, *parts)))
    return lowered


def _thin(places: list[int]) -> list[int]:
    """At most `MAX_KNOTS` of ascending numbers, the first and last among them, dense where they are small."""
    if len(places) <= MAX_KNOTS:
        return places
    wanted = np.geomspace(places[0], places[-1], MAX_KNOTS)
    nearest = np.abs(np.array(places, float)[None] - wanted[:, None]).argmin(axis=1)
    return [places[index] for index in sorted(set(nearest.tolist()))]


def _non_negative(matrix: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The x >= 0 that minimises |matrix x - target|^2 plus a small ridge (Lawson and Hanson 1974, chapter 23)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    unit = matrix / scale
    count = matrix.shape[1]
    gram, right = unit.T @ unit + _RIDGE * np.eye(count), unit.T @ target
    x, passive = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count):
        gradient = right - gram @ x
        gradient[passive] = -np.inf
        if gradient.max() <= 1e-10 * len(target):
            break
        passive[gradient.argmax()] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.solve(gram[np.ix_(passive, passive)], right[passive])
            falling = passive & (trial <= 0)
            if not falling.any():
                break
            step = float(np.min(x[falling] / (x[falling] - trial[falling])))
            x += step * (trial - x)
            passive &= x > 1e-12
            x[~passive] = 0
        x = trial
    return np.asarray(x / scale)


def _is_step(seconds: float) -> bool:
    return LEAST_SECONDS <= seconds <= MOST_SECONDS  # not a number is neither


def _bounded(seconds: float) -> float:
    return min(max(seconds, LEAST_SECONDS), MOST_SECONDS)


def _check(field: str, value: object, holds: bool, limit: str) -> None:
    if not holds:
        raise InvalidArgument(f"step_time.{field}", value, limit)
