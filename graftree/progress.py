"""`Bar`: a progress bar that redraws itself on a terminal and writes a line now and then to a log."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 10.0  # between two lines where stderr is no terminal


class Bar(tqdm):
    """tqdm on stderr; where that is no terminal, a line at the begin, every `LOG_SECONDS` at most, and at the end."""

    def __init__(self, **options: Any) -> None:
        self._log, self._said = not sys.stderr.isatty(), -math.inf
        super().__init__(file=sys.stderr, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # type: ignore[override]
        """Draw; called by tqdm."""
        if not self._log:
            return bool(super().display(msg, pos))
        if msg is None and (now := time.monotonic()) - self._said >= LOG_SECONDS:
            self._said = now
            self._say()
        return False

    def close(self) -> None:
        """End, with a last line."""
        if self._log and not self.disable:
            self.leave = False  # tqdm need not draw it again
            self._say()
        super().close()

    def _say(self) -> None:
        print(str(self).strip(), file=sys.stderr, flush=True)
