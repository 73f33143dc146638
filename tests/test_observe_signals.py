"""What an autoscaler is told about speculators."""

from __future__ import annotations

import pytest

from router.metrics import Metrics, Outcome
from router.signals import Scaling, Signals


class Router:
    """A router of constant load, second by second."""

    def __init__(self, speculators: int = 2) -> None:
        self.metrics, self.now, self.speculators = Metrics(), 0.0, speculators
        self.signals = Signals(self.metrics, lambda: self.speculators, clock=lambda: self.now, window=30.0)

    def run(
        self, seconds: int, *, good: int = 0, late: int = 0, alone: int = 0, plain: int = 0, cut: int = 0
    ) -> None:
        """Rounds of each kind in every second; a good one has 8 nodes, of which 2 are accepted."""
        for _ in range(seconds):
            for count, outcome in ((late, Outcome.LATE), (alone, Outcome.ALONE), (plain, Outcome.PLAIN)):
                for _ in range(count):
                    self.metrics.count_round(drafted=0, accepted=0, delivered=1, without=outcome)
            for _ in range(good):
                self.metrics.count_round(drafted=8, accepted=2, delivered=3, without=Outcome.PLAIN)
            self.metrics.cut_rounds += cut
            self.now += 1.0
            self.signals.tick()


def test_nothing_is_said_before_anything_happened() -> None:
    """No demand, no signal; rounds that want no tree are no demand."""
    router = Router()
    assert router.signals.now() == Scaling(0.0, 0.0, 0.0)
    router.run(10, plain=5)
    assert router.signals.now() == Scaling(0.0, 0.0, 0.0)


def test_a_pool_that_keeps_up_needs_no_pod() -> None:
    """All trees in time: demand is seen, and one more pod would add nothing."""
    router = Router()
    router.run(10, good=20)
    assert router.signals.now() == Scaling(pytest.approx(20.0), 0.0, 0.0)


def test_late_trees_are_worth_a_pod() -> None:
    """With 2 pods in time for 20 of 40 rounds, a third would serve 10 more, at 2 tokens each."""
    router = Router()
    router.run(10, good=20, late=20)
    assert router.signals.now() == Scaling(pytest.approx(40.0), pytest.approx(0.5), pytest.approx(20.0))


def test_one_more_pod_cannot_serve_more_than_is_missing() -> None:
    """Where only 2 rounds a second are late, no pod adds more than their tokens."""
    router = Router()
    router.run(10, good=38, late=2)
    assert router.signals.now().marginal_tokens_per_second == pytest.approx(4.0)


def test_no_speculator_at_all() -> None:
    """From zero: all demand is starved, and a first pod is worth what drafts were last worth, or one token."""
    router = Router(speculators=0)
    router.run(10, alone=10)
    assert router.signals.now() == Scaling(pytest.approx(10.0), 1.0, pytest.approx(10.0))
    router.run(10, good=10)
    router.signals.now()
    router.run(40, alone=10)
    assert router.signals.now().marginal_tokens_per_second == pytest.approx(20.0)


def test_drafts_that_are_never_right_are_worth_nothing() -> None:
    """Late or not: where acceptance is nil, so is the gain."""
    router = Router()
    for _ in range(50):
        router.metrics.count_round(drafted=8, accepted=0, delivered=1, without=Outcome.PLAIN)
    router.run(10, late=10)
    assert router.signals.now().marginal_tokens_per_second == 0.0


def test_cut_trees_show() -> None:
    """Trees made smaller because of load count as short, though they were there."""
    router = Router()
    router.run(10, good=10, cut=5)
    assert router.signals.now().short_share == pytest.approx(0.5)


def test_the_past_is_forgotten() -> None:
    """After the window only what happened since counts."""
    router = Router()
    router.run(60, late=50)
    router.run(31, good=10)
    assert router.signals.now() == Scaling(pytest.approx(10.0), 0.0, 0.0)
