"""`Watch`: when the machine itself stood still, so that nobody takes that for the system's doing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

STEP_SECONDS = 0.02
LATE_SECONDS = 0.3  # beyond what a busy machine does to a thread that only sleeps


@dataclass
class Watch:
    """A thread that sleeps, and notes when it was woken much too late: its process group got no CPU meanwhile.

    Attributes:
        still: (begun, over) of each standstill, by `clock`.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    still: list[tuple[float, float]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """Sleep once."""
        begun = self.clock()
        self.sleep(STEP_SECONDS)
        now = self.clock()
        if now - begun > STEP_SECONDS + LATE_SECONDS:
            self.still.append((begun, now))

    def stood_still(self, begun: float, over: float) -> bool:
        """Whether any part of a stretch of time was one."""
        return any(first <= over and last >= begun for first, last in self.still)

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(over - begun for begun, over in self.still)

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self.look()
