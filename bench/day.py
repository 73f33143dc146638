"""A day of load: how many requests come when, and what befalls the speculators."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

# (share of the day, load as a share of the peak), linear between: night, ramp, plateau, burst, evening, night.
SHAPE = (
    *((0.00, 0.08), (0.20, 0.08), (0.35, 0.50), (0.50, 0.50), (0.501, 1.00), (0.58, 1.00)),
    *((0.581, 0.50), (0.78, 0.50), (0.90, 0.08), (1.00, 0.08)),
)
NODE_LOSS = 0.68  # share of the day at which half of the speculators die at once


@dataclass(frozen=True)
class Arrival:
    """A request.

    Attributes:
        at: seconds since the day began.
        prompt: its text.
    """

    at: float
    prompt: str


def load(share: float) -> float:
    """Load at a time of the day, as a share of the peak."""
    for (begin, low), (end, high) in pairwise(SHAPE):
        if begin <= share <= end:
            return low + (high - low) * (share - begin) / (end - begin)
    raise ValueError(f"{share} is no share of a day")


def arrivals(seconds: float, peak: float, seed: int) -> list[Arrival]:
    """A Poisson process whose rate follows `load`, the same for the same seed.

    Args:
        seconds: length of the day.
        peak: requests per second at a load of 1.
    """
    source, now, found = random.Random(seed), 0.0, list[Arrival]()
    while (now := now + source.expovariate(peak)) < seconds:
        if source.random() < load(now / seconds):
            found.append(Arrival(now, "".join(source.choices("abcdefghijklmnop ", k=24))))
    return found
