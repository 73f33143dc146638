"""`StandinDrafter`: guesses the stand-in model (`graftree.models.standin`) after a fixed time; for benchmarks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from graftree.errors import InvalidArgument
from graftree.models.standin import guess
from speculator_service.drafters.base import Answer, Candidate, Drafter, DraftSession, Leaf


class StandinDrafter(Drafter):
    """One child per leaf, right with a given chance.

    Args:
        step_ms: time that one `expand` takes, in milliseconds.
        hit_rate: share of right guesses, in [0, 1].
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        step_ms: str | float = 1.0,
        hit_rate: str | float = 0.8,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._step_seconds = _number("step_ms", step_ms, 60_000.0) / 1000
        self._hit_rate = _number("hit_rate", hit_rate, 1.0)
        if not callable(sleep):  # a spec's options are strings
            raise InvalidArgument("sleep", sleep, "not an option of a spec")
        self._log_prob = math.log(max(self._hit_rate, 0.01))
        self._sleep = sleep
        self._roots: dict[str, tuple[int, int]] = {}

    def open(self, session: DraftSession) -> None:
        self._roots[session.session_id] = session.token_ids[-1], session.vocab_size

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        self._sleep(self._step_seconds)
        answers: list[Answer] = []
        for leaf in leaves:
            root, vocab_size = self._roots[leaf.session_id]
            token = guess(leaf.path[-1] if leaf.path else root, leaf.position, vocab_size, self._hit_rate)
            answers.append([Candidate(token, self._log_prob)])
        return answers

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        self._roots[session_id] = token_ids[-1], self._roots[session_id][1]

    def close(self, session_id: str) -> None:
        self._roots.pop(session_id, None)


def _number(name: str, value: str | float, most: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise InvalidArgument(name, value, f"a number from 0 to {most:g}")
    return number
