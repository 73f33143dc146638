"""`Budget`: exactly the number of nodes that enumeration finds best, without looking at all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.step_time import StepTime
from router.budget import Budget, FixedBudget, StepTable

survivals = st.lists(st.floats(0.0, 1.0), max_size=40).map(lambda values: sorted(values, reverse=True))
curves = st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=64)


def table(seconds: list[float]) -> StepTable:
    """Step times as listed, from 1 row on; the last one goes on."""
    return StepTable(lambda rows: seconds[min(rows, len(seconds)) - 1])


def offered(budget: Budget, candidates: list[float]) -> int:
    """Candidates looked at until the budget wants no more."""
    for count, survival in enumerate(candidates, 1):
        if not budget.offer(survival):
            return count
    return len(candidates)


@settings(max_examples=300, deadline=None)
@given(survivals, curves, st.integers(1, 30), st.floats(0, 0.2), st.floats(0, 20), st.floats(0, 1))
def test_the_best_number_is_found(
    candidates: list[float], curve: list[float], rows: int, seconds: float, tokens: float, trust: float
) -> None:
    """For any step times, falling ones too, no number of nodes gives more tokens per second than the chosen one."""
    times = table(curve)
    budget = Budget(max(1, len(candidates)), times, rows=rows, seconds=seconds, tokens=1 + tokens, trust=trust)
    offered(budget, candidates)
    rates = [
        (1 + tokens + trust * sum(candidates[:nodes])) / (seconds + times.seconds[rows + nodes])
        for nodes in range(len(candidates) + 1)
    ]
    assert budget.rate == pytest.approx(max(rates), rel=1e-9)
    assert rates[budget.nodes] == pytest.approx(max(rates), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(curves)
def test_cheapest_is_the_least_slope(curve: list[float]) -> None:
    """What a further row costs at least, over any number of further rows in the table."""
    times = table(curve)
    times.reach(50)
    values = times.seconds
    for i in range(len(values) - 1):
        least = min((values[j] - values[i]) / (j - i) for j in range(i + 1, len(values)))
        assert times.cheapest[i] == pytest.approx(least, abs=1e-12)


def test_rows_that_cost_nothing_are_all_taken() -> None:
    """A flat step time takes every node that has a chance, up to the limit."""
    budget = Budget(8, table([0.05]))
    assert offered(budget, [0.5] * 20) == 8
    assert budget.nodes == 8


def test_rows_that_cost_too_much_are_not_taken() -> None:
    """Where each row doubles the step a node that is nearly sure is not taken, and no second one is looked at."""
    times = table([0.01 * 2**row for row in range(12)])
    budget = Budget(10, times)
    assert offered(budget, [0.9] * 10) == 1
    assert budget.nodes == 0


def test_load_makes_nodes_dearer() -> None:
    """The same tree gets fewer nodes when rows of other sessions already fill the plateau of the curve."""
    times = StepTable(StepTime((1, 16, 64), (0.06, 0.06, 0.25)).seconds)
    candidates = [0.8**depth for depth in range(1, 31)]
    alone, crowded = Budget(30, times), Budget(30, times, rows=16, tokens=8.0)
    offered(alone, candidates)
    offered(crowded, candidates)
    assert alone.nodes == 15
    assert crowded.nodes == 2


def test_overhead_makes_nodes_cheaper() -> None:
    """What passes in any case is spread over more tokens: a round with much overhead takes more nodes."""
    times = StepTable(StepTime((1, 64), (0.02, 0.2)).seconds)
    candidates = [0.8**depth for depth in range(1, 31)]
    lean, slow = Budget(30, times), Budget(30, times, seconds=0.1)
    offered(lean, candidates)
    offered(slow, candidates)
    assert (lean.nodes, slow.nodes) == (5, 10)


def test_no_trust_takes_nothing() -> None:
    """Candidates that are not believed are not verified once rows cost anything."""
    budget = Budget(8, StepTable(StepTime((1, 64), (0.02, 0.2)).seconds), trust=0.0)
    assert offered(budget, [1.0] * 8) == 1
    assert budget.nodes == 0


def test_fixed_budget() -> None:
    """Takes everything up to its number."""
    budget = FixedBudget(3)
    assert [budget.offer(0.1), budget.offer(0.0), budget.offer(0.0)] == [True, True, False]
    assert budget.nodes == 3
