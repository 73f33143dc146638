"""Is an answer of a drafter what the interface promises? A user's drafter is not trusted to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from speculator_service.drafters.base import Candidate

_SLACK = 1e-6  # rounding may leave a log probability a little above 0


class BadAnswer(ValueError):
    """A drafter returned something that its interface rules out: says what, in few words, never a value."""


def check_answers(answers: Any, count: int) -> list[object]:
    """One answer per leaf, unchecked in itself.

    Raises:
        BadAnswer: not a sequence of `count`.
    """
    if not isinstance(answers, Sequence) or isinstance(answers, str | bytes):
        raise BadAnswer("not a sequence of answers")
    if len(answers) != count:
        raise BadAnswer("not one answer per leaf")
    return list(answers)


def check_answer(answer: object) -> list[Candidate]:
    """The candidates of one leaf.

    Raises:
        BadAnswer: not a sequence of (token_id, log_prob), a negative or non-integer id, a repeated id, or a log
            probability that is not finite or above 0.
    """
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise BadAnswer("candidates are not a sequence")
    candidates: list[Candidate] = []
    seen: set[int] = set()
    for entry in answer:
        if type(entry) is Candidate and type(entry[0]) is int and type(entry[1]) is float:
            token, log_prob = entry  # what the built-in drafters return
        else:
            token, log_prob = _unpack(entry)
        if token < 0:
            raise BadAnswer("a negative token id")
        if token in seen:
            raise BadAnswer("a token id twice")
        if not math.isfinite(log_prob) or log_prob > _SLACK:
            raise BadAnswer("a log probability that is not finite or above 0")
        seen.add(token)
        candidates.append(Candidate(token, min(log_prob, 0.0)))
    return candidates


def _unpack(entry: object) -> tuple[int, float]:
    if not isinstance(entry, Sequence) or len(entry) != 2:
        raise BadAnswer("a candidate is not (token_id, log_prob)")
    token, log_prob = entry
    if not isinstance(token, Integral) or isinstance(token, bool):
        raise BadAnswer("a token id is not an integer")
    if not isinstance(log_prob, Real):
        raise BadAnswer("a log probability is not a number")
    return int(token), float(log_prob)
