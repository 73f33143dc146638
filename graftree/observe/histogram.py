"""`Histogram`: a latency distribution in fixed buckets, for one writer on one event loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper bounds in seconds. vLLM's, and below 10 ms finer: a run of accepted drafts is that quick.
TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts per bucket and their sum. An observation costs a bisection and two additions.

    Args:
        bounds: upper bounds of the buckets, ascending; what is above the last one is counted too.

    Attributes:
        counts: (len(bounds) + 1,) observations in each bucket alone, the last one open.
        sum: of all observed values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `times` observations of the same value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Observations in all."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it) as Prometheus has it, ending with +Inf."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return found
