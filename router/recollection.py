"""`Recollection`: what a client remembers of a sample, verified again where no record of it is left.

The output is a function of model, prompt, parameters and seed, so the tokens that a client has are the ones that come
again. They go to the verifier as a tree of one branch, as long as it may be, so that many are computed in one step.
They decide nothing: the verifier says what follows, and where that is something else the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from graftree.errors import InvalidArgument
from graftree.tree import TokenTree
from router.cut import Cut

LONGEST = 64  # tokens of one step; a step of so many rows costs little more than one of a usual tree


class Recollection:
    """Of one sample.

    Args:
        token_ids: the output that its client has.
        usual: nodes of the session's usual trees at most; 0 = it is decoded plainly, then this is too.
        sample: its index, which errors name.
    """

    def __init__(self, token_ids: Sequence[int], usual: int, *, sample: int = 0) -> None:
        self._token_ids = tuple(token_ids)
        self._field = f"recollection.samples[{sample}].ids"
        self._most = max(usual, LONGEST) if usual else 0

    def rest(self, length: int) -> int:
        """Tokens that the next step may carry, where so much of the output is there."""
        return min(self._most, max(0, len(self._token_ids) - length))

    def narrow(self, usual: int) -> None:
        """A verifier has no room for more than `usual` nodes."""
        self._most = min(self._most, usual)

    def cut(self, root_id: int, length: int, room: int) -> Cut | None:
        """The next step's tree; None = the client has no more than is there.

        Args:
            root_id: content address of the last committed token.
            length: of the output that is there.
            room: deepest level that the answer's limit leaves.
        """
        count = min(self.rest(length), room)
        if count <= 0:
            return None
        tokens = self._token_ids[length : length + count]
        return Cut(
            TokenTree(root_id, tokens, tuple(range(-1, count - 1)), (0.0,) * count), (1.0,) * count, (0,) * count
        )

    def check(self, length: int, token_ids: Sequence[int]) -> None:
        """Compare tokens behind the first `length`. Raises InvalidArgument, which names the first that is another."""
        known = self._token_ids[length : length + len(token_ids)]
        for index, (theirs, ours) in enumerate(zip(known, token_ids, strict=False), length):
            if theirs != ours:
                raise InvalidArgument(f"{self._field}[{index}]", theirs, f"{ours}, as the model says there")

    def check_end(self, length: int) -> None:
        """The output ends after `length` tokens. Raises InvalidArgument where the client has more."""
        if length < len(self._token_ids):
            limit = f"at most {length}: the answer ends there"
            raise InvalidArgument(self._field, f"{len(self._token_ids)} tokens", limit)
