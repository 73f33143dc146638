"""The suffix automaton: agrees with a search of the whole text, and costs the same however long that is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculator_service.drafters.suffix_automaton import Match, SuffixAutomaton

TOKENS = st.integers(0, 3)


def occurrences(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """Where in the text a context ends."""
    size = len(context)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(context)]


def latest_first(tokens: Sequence[int]) -> list[int]:
    """Each token once, by its last place."""
    return list(dict.fromkeys(reversed(tokens)))


@settings(max_examples=300, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=60), st.lists(TOKENS, max_size=6), st.integers(1, 9))
def test_agrees_with_a_search_of_the_text(text: list[int], path: list[int], max_match: int) -> None:
    """At every prefix of any text: the longest suffix of the context, all shorter ones that occur at more places,
    their counts, and what followed them how often and in which order, as found by comparing everywhere."""
    automaton = SuffixAutomaton(max_match)
    for size, token in enumerate(text, 1):
        automaton.append(token)
        known, context = text[:size], [*text[:size], *path]
        match = automaton.end()
        for step in path:
            match = automaton.step(match, step)
        lengths = range(1, min(max_match, len(context)) + 1)
        found = {n: ends for n in lengths if (ends := occurrences(known, context[-n:]))}
        assert match.length == max(found, default=0)
        suffixes = list(automaton.suffixes(match))
        for state, length in suffixes:
            ends = found[length]
            followed = [known[end] for end in ends if end < size]
            assert automaton.count(state) == len(ends)
            assert automaton.followers(state, 100) == [(t, followed.count(t)) for t in latest_first(followed)]
            assert automaton.branching(state) == len(set(followed))
        # A length that is left out occurs where the next longer one that is there does.
        for length, ends in found.items():
            assert ends == found[min(n for _, n in suffixes if n >= length)]


def text_of(kind: str, size: int) -> list[int]:
    """A text: distributed as words are, copied together from phrases, one token, or two in turn."""
    lots = random.Random(1)
    if kind in ("same", "turns"):
        return ([7, 7] if kind == "same" else [7, 8]) * (size // 2)
    words = [int(lots.paretovariate(0.6)) % 49152 for _ in range(size if kind == "words" else 500)]
    while len(words) < size:
        start = lots.randrange(450)
        words += words[start : start + lots.randrange(5, 50)]
    return words[:size]


@pytest.mark.parametrize("kind", ["words", "copied", "same", "turns"])
def test_work_does_not_grow_with_the_text(kind: str) -> None:
    """Elementary steps per token appended stay below twice the longest match and a few, at 1,000 tokens and at
    64,000; those of a look-up with all that may follow below the longest match times what is looked at, and at
    64,000 no more than three times those at 1,000."""
    max_match, most, look_ups = 16, 8, {}
    for size in (1_000, 64_000):
        automaton = SuffixAutomaton(max_match)
        automaton.extend(text_of(kind, size))
        assert automaton.work / size <= 2 * (max_match + 1) + 8
        lots, before, number = random.Random(2), automaton.work, 0
        for _ in range(200):
            match = automaton.end()
            for _ in range(8):
                followers = automaton.followers(match.state, most)
                match = automaton.step(match, lots.choice(followers)[0] if followers else 0)
                for state, _ in automaton.suffixes(match):
                    automaton.followers(state, most)
                number += 1
        look_ups[size] = (automaton.work - before) / number
        assert look_ups[size] <= (max_match + 1) * (most + 2)
    assert look_ups[64_000] <= 3 * look_ups[1_000] + max_match


def test_matches_longer_than_the_limit_are_not_told_apart() -> None:
    """A context counts as its last max_match tokens, wherever these occur."""
    automaton = SuffixAutomaton(2)
    automaton.extend([1, 2, 3, 9, 2, 3, 8])
    match = automaton.step(automaton.step(automaton.step(Match(0, 0), 1), 2), 3)
    assert match.length == 2
    assert automaton.followers(match.state, 10) == [(8, 1), (9, 1)]


def test_an_empty_text_matches_nothing() -> None:
    """No context, no continuation."""
    automaton = SuffixAutomaton(4)
    assert automaton.end() == Match(0, 0)
    assert automaton.step(automaton.end(), 5) == Match(0, 0)
    assert list(automaton.suffixes(automaton.end())) == []
    assert len(automaton) == 0
