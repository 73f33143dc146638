"""`Choice`: whether a session's KV blocks are loaded or computed, by what both take on this machine.

    prefill   the step-time model's difference between the rows with and without the blocks, chunk by chunk
    load      latency + blocks x (reading, checking, putting into the pool), as seen

Both are measured at the start and followed from then on. Where the load looks dearer nobody loads, so nothing would
be learnt any more: after a while one load is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from graftree.step_time import StepTime

_WEIGHT = 0.2  # of what was seen last
_TRY_AGAIN_SECONDS = 30.0


class LoadTimes:
    """What loading takes. Written by the event loop and the engine's thread, each its own numbers.

    Attributes:
        latency: seconds of a lookup.
        transfer: seconds to read and check one block.
        placing: seconds to put one block into the pool.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_at = clock()
        self.latency: float | None = None
        self.transfer: float | None = None
        self.placing = 0.0

    def looked_up(self, seconds: float) -> None:
        """A lookup took so long."""
        self.latency = _towards(self.latency, seconds)

    def loaded(self, blocks: int, seconds: float) -> None:
        """Reading and checking so many blocks took so long."""
        self.transfer = _towards(self.transfer, seconds / blocks)

    def placed(self, blocks: int, seconds: float) -> None:
        """Putting so many blocks into the pool took so long."""
        self.placing = _towards(self.placing or None, seconds / blocks)

    def tried(self) -> None:
        """A load begins, whatever it will show: the next trial is a while away."""
        self._seen_at = self._clock()

    def seconds(self, blocks: int) -> float | None:
        """Estimate for a load; None = nothing is known."""
        if self.latency is None or self.transfer is None:
            return None
        return self.latency + blocks * (self.transfer + self.placing)

    @property
    def stale(self) -> bool:
        """Whether nothing was seen for so long that it may be otherwise by now."""
        return self._clock() - self._seen_at > _TRY_AGAIN_SECONDS


class Choice:
    """Load or prefill."""

    def __init__(
        self,
        times: LoadTimes,
        step_time: Callable[[], StepTime | None],
        *,
        block_size: int,
        step_tokens: int,
        from_tokens: int = 0,
        wait_seconds: float,
    ) -> None:
        """
        Args:
            times: what loading takes.
            step_time: the verifier's model now; None = not known.
            block_size: tokens of a block.
            step_tokens: most rows of one forward.
            from_tokens: load whatever saves so many rows, and nothing that saves fewer; 0 = by what both take.
            wait_seconds: longest wait for a load.
        """
        self.times = times
        self._step_time, self._size, self._step_tokens = step_time, block_size, step_tokens
        self._from_tokens, self._wait = from_tokens, wait_seconds

    def saved(self, first: int, blocks: int, length: int) -> float | None:
        """Seconds of prefill that blocks save; None = step times are not known.

        Args:
            first: blocks that are cached already.
            blocks: how many more could be.
            length: tokens of the text, the root included.
        """
        model = self._step_time()
        if model is None:
            return None
        start, end = first * self._size, (first + blocks) * self._size
        return self._prefill(model, start, length) - self._prefill(model, end, length)

    def pays(self, first: int, blocks: int, length: int) -> bool:
        """Whether loading is the quicker way, as far as is known; as `saved`."""
        if self._from_tokens or not blocks:
            return bool(blocks) and blocks * self._size >= self._from_tokens
        saved, seconds = self.saved(first, blocks, length), self.times.seconds(blocks)
        return saved is None or seconds is None or seconds < saved

    def wants(self, first: int, blocks: int, length: int) -> bool:
        """Whether to ask for blocks: they pay, or nobody has loaded for so long that it must be tried again."""
        if self.pays(first, blocks, length):
            return True
        trial = bool(blocks) and not self._from_tokens and self.times.stale
        if trial:
            self.times.tried()
        return trial

    def patience(self, first: int, blocks: int, length: int) -> float:
        """Longest a session waits for blocks: not longer than computing them takes."""
        saved = None if self._from_tokens else self.saved(first, blocks, length)
        return self._wait if saved is None else min(self._wait, saved)

    @property
    def break_even_tokens(self) -> int | None:
        """Shortest text whose KV is loaded rather than computed, in tokens of whole blocks; None = not known, or none
        below a thousand blocks."""
        if self._from_tokens:
            return self._from_tokens
        for blocks in (*range(1, 64), *range(64, 1024, 16)):
            saved, seconds = self.saved(0, blocks, blocks * self._size + 1), self.times.seconds(blocks)
            if saved is None or seconds is None:
                return None
            if seconds < saved:
                return blocks * self._size
        return None

    def _prefill(self, model: StepTime, start: int, end: int) -> float:
        """Seconds to compute rows start..end - 1 of one session, alone."""
        seconds = 0.0
        while start < end:
            rows = min(end - start, self._step_tokens)
            seconds += model.seconds(rows, 1, start)
            start += rows
        return seconds


def _towards(before: float | None, seen: float) -> float:
    return seen if before is None else before + _WEIGHT * (seen - before)
