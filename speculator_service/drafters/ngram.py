"""`NgramDrafter`: what followed the same words earlier in prompt and output, as a tree. No model, no torch.

Prompt lookup (Saxena, 2023) drafts one continuation of the longest match; here each tree node asks anew with its own
path as context, so several continuations grow side by side, with chances by how long the match is and how often and
how lately they were seen. A suffix automaton finds the matches, at a cost that does not depend on the text's length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from graftree.errors import InvalidArgument
from speculator_service.drafters.base import Answer, Drafter, DraftSession, Leaf
from speculator_service.drafters.ranking import rank
from speculator_service.drafters.suffix_automaton import Match, SuffixAutomaton
from speculator_service.drafters.suffix_chances import continuations

MAX_TOKENS = 1 << 16
CHUNK = 1024  # tokens that one step takes in: some milliseconds, so that a long prompt does not stall the others


class NgramDrafter(Drafter):
    """Suffix matches as a drafter; works with any vocabulary and any length.

    Args:
        max_n: longest match that is told apart, 1 to 256.
        recent: most different continuations of one match that are looked at, 1 to 1024.
    """

    inline: ClassVar[bool] = True

    def __init__(self, max_n: str | int = 24, recent: str | int = 32) -> None:
        self._max_n = _number("max_n", max_n, 256)
        self._recent = _number("recent", recent, 1024)
        self._sessions: dict[str, _Session] = {}

    def open(self, session: DraftSession) -> None:
        self._sessions[session.session_id] = _Session(session, self._max_n)

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        for session_id in dict.fromkeys(leaf.session_id for leaf in leaves):
            self._sessions[session_id].text.take_in(CHUNK)
        return [self._children(leaf) for leaf in leaves]

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        session = self._sessions[session_id]
        session.text.extend(token_ids)
        session.matches.clear()

    def close(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def _children(self, leaf: Leaf) -> Answer:
        session = self._sessions[leaf.session_id]
        if session.text.pending:
            return None
        given = session.given
        chances = continuations(
            session.text.automaton, session.match(leaf), temperature=given.sampling.temperature, most=self._recent
        )
        if not chances:
            return []
        token_ids = np.fromiter(chances, dtype=np.int64, count=len(chances))
        log_q = np.log(np.fromiter(chances.values(), dtype=np.float64, count=len(chances)))
        return rank(token_ids, log_q, given.sampling, leaf.position, given.branching)


class _Session:
    """A session's text, and where in it the paths of its leaves lead."""

    def __init__(self, given: DraftSession, max_n: int) -> None:
        self.given = given
        self.text = RecentText(max_n)
        self.text.extend(given.token_ids)
        self.matches: dict[int, Match] = {}  # by node id, since the last commit

    def match(self, leaf: Leaf) -> Match:
        """The context that ends with the leaf's path."""
        automaton = self.text.automaton
        if not leaf.path:
            found = automaton.end()
        elif (above := self.matches.get(leaf.parent_id)) is not None:
            found = automaton.step(above, leaf.path[-1])
        else:
            found = automaton.end()
            for token in leaf.path:
                found = automaton.step(found, token)
        self.matches[leaf.node_id] = found
        return found


class RecentText:
    """A growing text of which the latest part is kept, and the automaton of that part.

    About 180 bytes a token. Past `max_tokens` the older half is forgotten and the automaton built anew.

    Attributes:
        automaton: of the tokens taken in so far.
    """

    def __init__(self, max_match: int, max_tokens: int = MAX_TOKENS) -> None:
        self._max_match, self._max_tokens = max_match, max_tokens
        self._tokens = array("q")
        self._begin()

    def _begin(self) -> None:
        self.automaton = SuffixAutomaton(self._max_match)
        self._taken = 0

    def __len__(self) -> int:
        """Tokens kept."""
        return len(self._tokens)

    @property
    def pending(self) -> int:
        """Tokens the automaton does not have yet."""
        return len(self._tokens) - self._taken

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text goes on."""
        self._tokens.extend(token_ids)
        if len(self._tokens) > self._max_tokens:
            self._tokens = self._tokens[-(self._max_tokens // 2) :]
            self._begin()

    def take_in(self, limit: int) -> None:
        """Give the automaton up to `limit` of the pending tokens."""
        stop = min(self._taken + limit, len(self._tokens))
        self.automaton.extend(self._tokens[self._taken : stop])
        self._taken = stop


def _number(name: str, value: str | int, most: int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise InvalidArgument(name, value, f"an integer from 1 to {most}")
    return number
