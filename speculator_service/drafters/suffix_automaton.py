"""`SuffixAutomaton`: every substring of a growing text, where it may go on, and how often it did.

The smallest automaton of a text's suffixes (Blumer et al., 1985, "The smallest automaton recognizing the subwords of
a text"), built token by token. Its states are sets of substrings that end at the same places; a state's link leads
to the longest suffix of its strings that occurs elsewhere too. So the contexts that have been seen before are found
from the longest to the shortest by following links.

On top of that each state counts its occurrences. A new token is one more occurrence of every state on the link chain
from the end of the text, which is as long as the text where that repeats itself; so occurrences are counted for
substrings of up to `max_match + 1` tokens only, from a pointer that follows the end of the text at that length.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

ROOT = 0
_NONE = -1


class Match(NamedTuple):
    """A context: the last `length` tokens of it occur in the text, and no more than `max_match` are told apart."""

    state: int
    length: int


class SuffixAutomaton:
    """Substrings of one growing text.

    Appending costs amortised O(max_match) and a look-up O(max_match), both whatever the length of the text; where a
    state is split its transitions are copied. Memory: at most 2 states and 3 transitions a token, 24 bytes for each
    state and a dict for each that has more than one transition; seen: 120 to 180 bytes a token.

    Args:
        max_match: longest context that is told apart, >= 1.

    Attributes:
        work: elementary steps so far: links followed, transitions set or copied, occurrences counted.
    """

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.work = 0
        self._tokens = 0
        self._link, self._length, self._count = array("i", [_NONE]), array("i", [0]), array("i", [0])
        # Most states have one transition: it needs no dict. Dicts are in order of use, the latest last.
        self._token, self._target = array("q", [_NONE]), array("i", [_NONE])
        self._branches: dict[int, dict[int, int]] = {}
        self._last = ROOT  # the whole text
        self._tail = ROOT  # its suffix of up to max_match + 1 tokens

    def __len__(self) -> int:
        """Tokens appended."""
        return self._tokens

    def extend(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        """The text goes on with `token`, an id >= 0."""
        link, length, work = self._link, self._length, 1
        current = self._new(length[self._last] + 1)
        state = self._last
        while state != _NONE and (target := self._go(state, token)) == _NONE:
            self._set(state, token, current)
            state, work = link[state], work + 1
        if state == _NONE:
            link[current] = ROOT
        elif length[target] == length[state] + 1:
            link[current] = target
        else:
            clone, copied = self._clone(target, length[state] + 1)
            work += copied
            while state != _NONE and self._go(state, token) == target:
                self._set(state, token, clone)
                state, work = link[state], work + 1
            link[target] = link[current] = clone
        self._last = current
        self.work += work + self._count_tail(token)
        self._tokens += 1

    def _count_tail(self, token: int) -> int:
        """One more occurrence of the suffixes of up to max_match + 1 tokens; the number of states touched."""
        link, length, count = self._link, self._length, self._count
        most = self.max_match + 1
        size = min(self._tokens, most)
        tail = self._tail
        if tail != ROOT and length[link[tail]] >= size:  # it was split, and the suffix went to the new state
            tail = link[tail]
        touched, state = 0, tail
        while state != ROOT:
            branches = self._branches.get(state)
            if branches is not None:
                branches[token] = branches.pop(token)
            state, touched = link[state], touched + 1
        tail, size = self._go(tail, token), min(size + 1, most)
        if length[link[tail]] >= size:
            tail = link[tail]
        self._tail = state = tail
        while state != ROOT:
            count[state] += 1
            state, touched = link[state], touched + 1
        return touched

    def end(self) -> Match:
        """The context at the end of the text. It occurs at the end at least, where nothing follows yet."""
        state, size = self._tail, min(self._tokens, self.max_match)
        if state != ROOT and self._length[self._link[state]] >= size:
            state = self._link[state]
        return Match(state, size)

    def step(self, match: Match, token: int) -> Match:
        """The context one token on: its longest suffix that occurs in the text, of length 0 if none does."""
        state, size = match
        while (target := self._go(state, token)) == _NONE:
            if state == ROOT:
                return Match(ROOT, 0)
            state = self._link[state]
            size = self._length[state]
            self.work += 1
        size = min(size + 1, self.max_match)
        if self._length[self._link[target]] >= size:
            target = self._link[target]
        return Match(target, size)

    def suffixes(self, match: Match) -> Iterator[Match]:
        """The context and its shorter suffixes that occur at more places, longest first, without the empty one."""
        state, size = match
        while state != ROOT:
            self.work += 1
            yield Match(state, size)
            state = self._link[state]
            size = self._length[state]

    def count(self, state: int) -> int:
        """Occurrences of a context in the text, at its end included."""
        return self._count[state]

    def branching(self, state: int) -> int:
        """How many different tokens have followed a context."""
        branches = self._branches.get(state)
        return len(branches) if branches is not None else int(self._token[state] != _NONE)

    def followers(self, state: int, limit: int) -> list[tuple[int, int]]:
        """(token, how often it followed) for up to `limit` tokens, what followed latest first."""
        branches = self._branches.get(state)
        if branches is None:
            token = self._token[state]
            return [(token, self._count[self._target[state]])] if token != _NONE else []
        self.work += min(limit, len(branches))
        return [(token, self._count[branches[token]]) for token in islice(reversed(branches), limit)]

    # States and transitions.

    def _new(self, length: int) -> int:
        self._link.append(_NONE)
        self._length.append(length)
        self._count.append(0)
        self._token.append(_NONE)
        self._target.append(_NONE)
        return len(self._link) - 1

    def _clone(self, state: int, length: int) -> tuple[int, int]:
        """A state for the strings of `state` of up to `length` tokens, and how many transitions were copied."""
        clone = self._new(length)
        self._link[clone], self._count[clone] = self._link[state], self._count[state]
        self._token[clone], self._target[clone] = self._token[state], self._target[state]
        branches = self._branches.get(state)
        if branches is None:
            return clone, 1
        self._branches[clone] = dict(branches)
        return clone, len(branches)

    def _go(self, state: int, token: int) -> int:
        """Where `token` leads; _NONE = nowhere."""
        if self._token[state] == token:
            return self._target[state]
        branches = self._branches.get(state)
        return branches.get(token, _NONE) if branches is not None else _NONE

    def _set(self, state: int, token: int, target: int) -> None:
        branches = self._branches.get(state)
        if branches is not None:
            branches[token] = target
        elif self._token[state] in (_NONE, token):
            self._token[state], self._target[state] = token, target
        else:
            self._branches[state] = {self._token[state]: self._target[state], token: target}
            self._token[state] = _NONE
