"""`NgramDrafter`: what followed the last few tokens earlier in prompt and output, as a tree. No model, no torch.

Prompt lookup (Saxena, 2023) drafts one continuation of the longest match; here each tree node asks anew with its
own path as context, so several continuations grow side by side, weighted by how often and after how long a match
they were seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from graftree.errors import InvalidArgument
from speculator_service.drafters.base import Answer, Drafter, DraftSession, Leaf
from speculator_service.drafters.ngram_index import NgramIndex
from speculator_service.drafters.ranking import rank


class NgramDrafter(Drafter):
    """Suffix matches as a drafter; works with any vocabulary and any length.

    Args:
        max_n: longest match that is told apart, 1 to 16.
        recent: most earlier occurrences that are looked at per node, 1 to 1024.
    """

    inline: ClassVar[bool] = True

    def __init__(self, max_n: str | int = 4, recent: str | int = 32) -> None:
        self._max_n = _number("max_n", max_n, 16)
        self._recent = _number("recent", recent, 1024)
        self._sessions: dict[str, tuple[DraftSession, NgramIndex]] = {}

    def open(self, session: DraftSession) -> None:
        index = NgramIndex(max_n=self._max_n, recent=self._recent)
        index.extend(session.token_ids)
        self._sessions[session.session_id] = session, index

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        return [self._children(leaf) for leaf in leaves]

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        self._sessions[session_id][1].extend(token_ids)

    def close(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def _children(self, leaf: Leaf) -> Answer:
        session, index = self._sessions[leaf.session_id]
        path = leaf.path[-self._max_n :]
        tail = path if len(path) == self._max_n else (*index.tail(), *path)[-self._max_n :]
        probabilities = index.continuations(tail)
        if not probabilities:
            return []
        token_ids = np.fromiter(probabilities, dtype=np.int64, count=len(probabilities))
        log_q = np.log(np.fromiter(probabilities.values(), dtype=np.float64, count=len(probabilities)))
        return rank(token_ids, log_q, session.sampling, leaf.position, session.branching)


def _number(name: str, value: str | int, most: int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise InvalidArgument(name, value, f"an integer from 1 to {most}")
    return number
