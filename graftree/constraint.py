"""`Constraint`: where one sequence's output stands in its grammar, at every node of its tree.

llguidance follows the grammar. The states are a function of the tokens alone, so a tree node has the very state that
plain decoding would have there, and moving between two nodes costs the tokens by which their paths differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from graftree.errors import InvalidArgument

FIELD = "structured_output"

_DEAD_END = "NoExtension"  # llguidance's error where the vocabulary has no token that goes on


class Constraint:
    """Says which tokens may follow. Used on one thread at a time.

    Args:
        matcher: at the start of the output; this object's own.
        end: bit of the matcher's mask that says whether the output may end.
        vocab_size: V.
        silent: tokens that end a request and have no text. They may be part of a grammar that names them.
        spoken: end-of-sequence tokens with text: they never stand for it.

    Attributes:
        error: why the committed output cannot be gone on from.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        end: int,
        vocab_size: int,
        silent: Collection[int],
        spoken: Collection[int] = (),
    ) -> None:
        self._matcher, self._end, self._vocab_size = matcher, end, vocab_size
        self._ends = frozenset((*silent, *spoken))
        self._silent, self._spoken = (
            np.array(sorted(token for token in tokens if token < vocab_size), dtype=np.intp)
            for tokens in (silent, spoken)
        )
        self._path: list[int] = []  # where the matcher stands, from the committed output
        self._committed = matcher.deep_copy()
        self._ended = False
        self.error: InvalidArgument | None = None

    def fork(self) -> Constraint:
        """The same state, to go another way."""
        copy = object.__new__(Constraint)
        copy.__dict__.update(self.__dict__)
        copy._restart()
        return copy

    def allowed(self, path: Sequence[int] = ()) -> NDArray[np.bool_]:
        """(V,) which tokens may follow the committed output and `path`.

        Behind a token that ends the request it is the ending tokens: what is said there reaches nobody.

        Raises:
            InvalidArgument: the constraint does not allow `path`, or is too complex to follow.
        """
        if self.error is not None:
            raise self.error
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        if self._ended or not self._ends.isdisjoint(path):
            mask[self._silent] = mask[self._spoken] = True
            return mask
        self._move(path)
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if self._matcher.get_error().startswith(_DEAD_END):
            self._restart()
            return mask
        self._raise_if_broken()
        text = bits[: self._vocab_size].astype(np.bool_)
        mask[: text.size] = text
        if self._end < self._vocab_size:
            mask[self._end] = False
        may_end = bool(bits[self._end])
        mask[self._silent] |= may_end
        mask[self._spoken] = may_end
        return mask

    def advance(self, token_ids: Sequence[int]) -> None:
        """Commit output tokens; those behind a token that ends the request do not count.

        Where the constraint does not allow one, or is too complex to follow, `error` says so from now on and
        `allowed` raises it: the request may have ended before.
        """
        if self._ended or self.error is not None:
            return
        text = list(takewhile(lambda token: token not in self._ends, token_ids))
        try:
            self._move(text)
        except InvalidArgument as error:
            self.error = error
            return
        self._committed = self._matcher.deep_copy()
        self._path = []
        self._ended = len(text) < len(token_ids)

    def _move(self, path: Sequence[int]) -> None:
        """Take the matcher to `path`: back to what both have in common, then forward."""
        common = 0
        for here, there in zip(self._path, path, strict=False):
            if here != there:
                break
            common += 1
        if len(self._path) > common:
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
        consumed = self._matcher.try_consume_tokens(list(path[common:]))
        self._path += path[common : common + consumed]
        self._raise_if_broken()
        if len(self._path) < len(path):
            token = path[len(self._path)]
            raise InvalidArgument(FIELD, f"token {token}", "output that the constraint allows")

    def _raise_if_broken(self) -> None:
        if self._matcher.is_error():  # for ever
            limit = f"a constraint that is simple enough to follow: {words(self._matcher.get_error())}"
            self._restart()
            raise InvalidArgument(FIELD, "a constraint", limit)

    def _restart(self) -> None:
        """Back to the committed output, with a matcher of its own."""
        self._matcher, self._path = self._committed.deep_copy(), []


_WORDS_LIMIT = 500


def words(error: str) -> str:
    """llguidance's message without its debugging output, not too long."""
    text = error.split("\n<state>")[0].removesuffix("<non-verbose/>").strip()
    return text if len(text) <= _WORDS_LIMIT else text[:_WORDS_LIMIT] + " …"
