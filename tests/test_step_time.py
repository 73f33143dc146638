"""The step-time model: fitted to measured steps, carried over the wire, refreshed by observed ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from graftree.errors import InvalidArgument
from graftree.step_time import LEAST_SECONDS, MAX_KNOTS, MOST_SECONDS, Sample, StepTime
from graftree.v1 import verification_pb2

# Shapes a CPU and a GPU show: a plateau and a bend, a staircase, a straight line. Seconds by rows.
CURVES = {
    "bend": lambda rows: 0.040 + 0.002 * max(0, rows - 12),
    "stairs": lambda rows: 0.010 * math.ceil(rows / 16),
    "line": lambda rows: 0.004 + 0.0005 * rows,
}
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def synthetic(curve: str, rows: int, sequences: int, context: int) -> float:
    return float(CURVES[curve](rows)) + 0.0008 * (sequences - 1) + 2e-6 * context


def samples(curve: str, noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(0)
    shapes = [(rows, 1, 200) for rows in ROWS]
    shapes += [(rows, 8, context) for rows in (8, 32, 64) for context in (400, 4000)]
    return [Sample(*shape, synthetic(curve, *shape) * float(1 + noise * rng.standard_normal())) for shape in shapes]


@pytest.mark.parametrize("curve", CURVES)
def test_fit_finds_the_curve_it_was_measured_on(curve: str) -> None:
    """Exact samples of a synthetic machine are given back within a thousandth, the terms apart."""
    model = StepTime.fit(samples(curve))
    for sample in samples(curve):
        assert model.seconds(*sample[:3]) == pytest.approx(sample.seconds, rel=1e-3)
    assert model.per_sequence == pytest.approx(0.0008, rel=0.05)
    assert model.per_context_token == pytest.approx(2e-6, rel=0.05)


@pytest.mark.parametrize("curve", ["bend", "line"])
def test_shapes_that_were_not_measured_are_predicted_within_a_few_percent(curve: str) -> None:
    """Held-out rows, sequences and contexts, from samples with 2 % noise: the mean error stays below 4 %."""
    model = StepTime.fit(samples(curve, noise=0.02))
    errors = [
        abs(model.seconds(rows, sequences, context) / synthetic(curve, rows, sequences, context) - 1)
        for rows in (1, 3, 6, 12, 20, 40, 60, 80)
        for sequences in (1, 4, 16)
        if sequences <= rows
        for context in (0, 1000, 8000)
    ]
    assert np.mean(errors) < 0.04
    assert max(errors) < 0.15


def test_what_a_context_costs_each_row_is_told_from_what_it_costs_a_step() -> None:
    """From one row and sixteen behind a long context, all other terms beside it: right at shapes that were not
    measured, for any number of rows, sequences and cached tokens."""
    truth = StepTime((1, 8, 64), (0.02, 0.02, 0.08), 0.0003, 6e-6, 7e-7)
    shapes = [(rows, 1, 64) for rows in (1, 2, 4, 8, 16, 32, 64)]
    shapes += [(4, 4, 256), (16, 16, 1024), (1, 1, 1024), (16, 1, 1024)]
    model = StepTime.fit([Sample(*shape, truth.seconds(*shape)) for shape in shapes])
    for shape in ((1, 1, 2000), (8, 1, 500), (50, 1, 2000), (48, 8, 4000), (64, 4, 800)):
        assert model.seconds(*shape) == pytest.approx(truth.seconds(*shape), rel=0.02)


def test_terms_that_the_samples_cannot_tell_apart_are_nothing() -> None:
    """Steps of one sequence and one context give the curve alone; a long context behind one number of rows says
    nothing of what more rows would cost there."""
    plain = StepTime.fit([Sample(rows, 1, 64, 0.02 + rows * 1e-3) for rows in (1, 8, 64)])
    assert (plain.per_sequence, plain.per_context_token, plain.per_row_context) == (0, 0, 0)
    longer = StepTime.fit(
        [*(Sample(rows, 1, 64, 0.02 + rows * 1e-3) for rows in (1, 8, 64)), Sample(1, 1, 999, 0.04)]
    )
    assert (longer.per_sequence, longer.per_row_context) == (0, 0)
    assert longer.per_context_token > 1e-5


def test_more_rows_never_cost_less() -> None:
    """However noisy the samples are, the fitted curve never falls and nothing is negative."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        noisy = [
            Sample(int(r), 1, int(c), float(t)) for r, c, t in rng.uniform([1, 0, 0.01], [100, 999, 0.05], (30, 3))
        ]
        model = StepTime.fit(noisy)
        predicted = [model.seconds(rows, 1, 100) for rows in range(1, 130)]
        assert predicted == sorted(predicted)
        assert predicted[0] > 0


def test_a_step_that_the_machine_was_away_from_bends_nothing() -> None:
    """Half a minute for four rows, a millisecond for one: no number of rows is said to take longer than row by row,
    while a staircase of as much as that is left alone."""
    model = StepTime.fit([Sample(1, 1, 0, 0.001), Sample(2, 1, 0, 0.001), Sample(4, 1, 0, 30.0)])
    for rows in (1, 2, 4, 64, 500):
        assert model.seconds(rows) <= 0.0011 * rows
    stairs = [Sample(rows, 1, 0, 0.01 * math.ceil(rows / 16)) for rows in (1, 16, 17, 32, 33)]
    for sample in stairs:
        assert StepTime.fit(stairs).seconds(sample.rows) == pytest.approx(sample.seconds, rel=1e-3)


def test_one_sample_is_enough() -> None:
    """A single step makes a flat model; so does `flat`."""
    model = StepTime.fit([Sample(5, 1, 0, 0.02)])
    assert model.seconds(1) == model.seconds(64) == pytest.approx(0.02, rel=1e-3)
    assert StepTime.flat(0.5).seconds(99, 7, 1000) == 0.5


def test_many_numbers_of_rows_are_thinned() -> None:
    """More numbers of rows than the wire takes become as many knots as it takes, first and last kept."""
    model = StepTime.fit([Sample(rows, 1, 0, 0.01 + rows * 1e-4) for rows in range(1, 513)])
    assert len(model.rows) <= MAX_KNOTS
    assert (model.rows[0], model.rows[-1]) == (1, 512)
    assert model.seconds(300) == pytest.approx(0.04, rel=0.01)


def test_scaling_changes_what_was_observed_and_keeps_the_order() -> None:
    """Factors apply at their rows, are interpolated in between, and never make the curve fall."""
    model = StepTime((1, 8, 64), (0.01, 0.01, 0.03), 0.001, 1e-6, 1e-7)
    doubled = model.scaled([(1, 2.0)])
    assert doubled.seconds(30, 4, 100) == pytest.approx(2 * model.seconds(30, 4, 100))
    bent = model.scaled([(1, 1.0), (8, 3.0), (64, 0.5)])
    assert bent.seconds(1) == pytest.approx(0.01)
    assert bent.seconds(8) == pytest.approx(0.03)
    assert bent.seconds(64) == pytest.approx(0.03), "0.015 would be less than eight rows take"


def test_wire_roundtrip() -> None:
    """What a verifier publishes is what a router reads."""
    model = StepTime.fit(samples("bend"))
    wire = verification_pb2.StepTime.FromString(model.to_proto().SerializeToString())
    assert StepTime.from_proto(wire) == model
    whole = StepTime((1, 8), (0.01, 0.02), 0.001, 1e-6, 1e-7)
    assert StepTime.from_proto(whole.to_proto()) == whole


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rows": [], "seconds": []}, "rows"),
        ({"rows": [0], "seconds": [1.0]}, "rows"),
        ({"rows": [2, 2], "seconds": [1.0, 1.0]}, "rows"),
        ({"rows": range(1, MAX_KNOTS + 2), "seconds": [1.0] * (MAX_KNOTS + 1)}, "rows"),
        ({"rows": [1, 2], "seconds": [1.0]}, "seconds"),
        ({"rows": [1, 2], "seconds": [1.0, 0.5]}, "seconds"),
        ({"rows": [1], "seconds": [0.0]}, "seconds"),
        ({"rows": [1], "seconds": [math.nan]}, "seconds"),
        ({"rows": [1, 2], "seconds": [1e-3, math.nan]}, "seconds"),
        ({"rows": [1, 2], "seconds": [1e-300, 1.7e308]}, "seconds"),
        ({"rows": [1, 2], "seconds": [1e-3, 3601.0]}, "seconds"),
        ({"rows": [1], "seconds": [5e-324]}, "seconds"),
        ({"rows": [1], "seconds": [9e-8]}, "seconds"),
        ({"rows": [1], "seconds": [1.0], "seconds_per_sequence": 1.7e308}, "seconds_per_sequence"),
        ({"rows": [1], "seconds": [1.0], "seconds_per_context_token": 3601.0}, "seconds_per_context_token"),
        ({"rows": [1], "seconds": [1.0], "seconds_per_sequence": -1.0}, "seconds_per_sequence"),
        ({"rows": [1], "seconds": [1.0], "seconds_per_context_token": math.inf}, "seconds_per_context_token"),
        ({"rows": [1], "seconds": [1.0], "seconds_per_row_context": math.nan}, "seconds_per_row_context"),
    ],
)
def test_figures_that_cannot_be_right_are_refused(fields: dict[str, object], named: str) -> None:
    """What arrives from the network is checked; the error names the field."""
    with pytest.raises(InvalidArgument, match=f"step_time.{named} "):
        StepTime.from_proto(verification_pb2.StepTime(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [5e-324, 1e-300, 1e-9, 1e9, 1.7e308])
def test_samples_that_no_step_can_take_fit_the_nearest_that_one_can(seconds: float) -> None:
    """A clock that stood still, or jumped, makes a model of finite figures that another pod accepts."""
    for others in ([], [Sample(8, 4, 400, 0.01), Sample(64, 1, 900, 0.02)]):
        model = StepTime.fit([Sample(1, 1, 0, seconds), Sample(16, 2, 100, seconds), *others])
        assert StepTime.from_proto(model.to_proto()) == model
        assert LEAST_SECONDS <= model.seconds(1) <= MOST_SECONDS
        assert math.isfinite(model.seconds(512, 64, 1 << 20))
    assert LEAST_SECONDS <= StepTime.flat(seconds).seconds(1) <= MOST_SECONDS


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_scaling_stays_within_what_a_step_can_take(factor: float) -> None:
    """However wrong the model seems to be."""
    model = StepTime((1, 8), (0.01, 0.02), 0.001, 1e-6, 1e-7).scaled([(1, factor)])
    assert StepTime.from_proto(model.to_proto()) == model
    assert {*model.curve} <= {LEAST_SECONDS, MOST_SECONDS}


def test_nothing_is_no_fit() -> None:
    """Without a sample, or with one that took no time, there is nothing to fit."""
    with pytest.raises(InvalidArgument, match="samples"):
        StepTime.fit([])
    with pytest.raises(InvalidArgument, match=r"samples\.seconds"):
        StepTime.fit([Sample(1, 1, 0, 0.0)])
