"""`Mean`: an exponential moving average that is a plain mean while it is young."""

from __future__ import annotations


class Mean:
    """Average of what was observed lately.

    Args:
        share: weight of the newest observation, once there are 1 / share of them.
        value: before the first observation.

    Attributes:
        count: observations so far.
    """

    __slots__ = ("_share", "count", "value")

    def __init__(self, share: float, value: float = 0.0) -> None:
        self._share = share
        self.count = 0
        self.value = value

    def observe(self, value: float) -> None:
        self.count += 1
        self.value += max(self._share, 1.0 / self.count) * (value - self.value)
