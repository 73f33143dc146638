"""The n-gram drafter: what it predicts, what it costs, and that it needs no torch."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.errors import InvalidArgument
from graftree.sampling import SamplingParams
from graftree.tree import node_id, root_id
from speculator_service.drafters.base import DraftSession, Leaf
from speculator_service.drafters.ngram import CHUNK, NgramDrafter, RecentText
from speculator_service.drafters.suffix_automaton import Match

GREEDY = SamplingParams(temperature=0.0)


def open_session(
    drafter: NgramDrafter,
    tokens: list[int],
    sampling: SamplingParams = GREEDY,
    *,
    name: str = "s",
    branching: int = 4,
) -> None:
    identifier = root_id(0, tokens)
    drafter.open(DraftSession(name, identifier, tuple(tokens), len(tokens), sampling, 1000, 5000, 64, branching))


def leaf(path: tuple[int, ...], position: int = 0) -> Leaf:
    return Leaf("s", 0, 0, path, position)


def brute_force(tokens: list[int], context: list[int], max_n: int, most: int, sampled: float) -> dict[int, float]:
    """The chances of `suffix_chances`, from its formula and a search of the whole text."""
    chances: dict[int, float] = {}
    left = 1.0
    for n in range(min(max_n, len(context)), 0, -1):
        followed = [tokens[end] for end in range(n, len(tokens)) if tokens[end - n : end] == context[-n:]]
        fresh = [token for token in list(dict.fromkeys(reversed(followed)))[:most] if token not in chances]
        if not fresh:
            continue
        counts = {token: followed.count(token) for token in fresh}
        total = sum(counts.values())
        odds = -1.0 + 1.25 * math.log(n) + 1.5 * math.log(total) - 1.4 * math.log(len(fresh))
        odds -= 0.5 * bool(chances) + 0.7 * sampled
        part = 1 / (1 + math.exp(-odds))
        weights = {token: count - 0.3 + 0.3 * (token == fresh[0]) for token, count in counts.items()}
        chances |= {token: left * part * weight / sum(weights.values()) for token, weight in weights.items()}
        left *= 1 - part
    return chances


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=80),
    st.lists(st.integers(0, 5), max_size=5),
    st.integers(1, 8),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.6, 1.0, 1.5]),
)
def test_chances_are_those_of_a_search_of_the_text(
    tokens: list[int], path: list[int], max_n: int, most: int, temperature: float
) -> None:
    """Through open, commits and paths: every continuation that matters has the chance that the formula gives it over
    every occurrence; together they are below 1."""
    drafter = NgramDrafter(max_n=max_n, recent=most)
    cut = len(tokens) // 2 or 1
    open_session(drafter, tokens[:cut], SamplingParams(temperature=temperature), branching=100)
    if tokens[cut:]:
        drafter.expand([leaf(())])
        drafter.commit("s", tokens[cut:])
    ids = [root_id(0, tokens)]
    for token in path:
        ids.append(node_id(ids[-1], token))
    for depth in range(len(path) + 1):
        at = Leaf("s", ids[depth], ids[max(depth - 1, 0)], tuple(path[:depth]), len(tokens) + depth)
        (answer,) = drafter.expand([at])
        want = brute_force(tokens, [*tokens, *path[:depth]], max_n, most, min(temperature, 1.0))
        got = {candidate.token_id: math.exp(candidate.log_prob) for candidate in answer}
        assert sum(got.values()) < 1
        for token, chance in want.items():
            assert got.get(token, 0.0) == pytest.approx(chance, abs=0.006)
        assert got.keys() <= want.keys()


def test_more_evidence_is_worth_more() -> None:
    """A longer match, more occurrences and fewer alternatives raise the chance; a temperature lowers it."""

    def chance(tokens: list[int], temperature: float = 0.0) -> float:
        drafter = NgramDrafter()
        open_session(drafter, tokens, SamplingParams(temperature=temperature))
        (answer,) = drafter.expand([leaf(())])
        return math.exp(answer[0].log_prob)

    once = chance([1, 5, 2, 1])
    assert 0.2 < once < 0.4
    assert chance([1, 5, 2, 1], 1.0) < once
    assert chance([1, 5, 2, 1, 5, 3, 1]) > once + 0.1
    assert chance([4, 1, 5, 2, 4, 1]) > once + 0.1
    assert chance([1, 5, 1, 6, 1]) < once
    assert chance([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8]) > 0.8


def test_drafts_what_followed_as_a_tree() -> None:
    """Both continuations of a repeated phrase are drafted, and each goes on along its own path."""
    drafter = NgramDrafter()
    open_session(drafter, [1, 2, 3, 10, 11, 12, 9, 1, 2, 3, 20, 21, 22, 9, 1, 2, 3])
    (root,) = drafter.expand([leaf(())])
    assert {candidate.token_id for candidate in root} == {10, 20}
    answers = drafter.expand([leaf((10,)), leaf((20,)), leaf((20, 21))])
    assert [answer[0].token_id for answer in answers] == [11, 21, 22]


def test_commits_extend_the_index() -> None:
    """Output is matched as the prompt is, from the next step on."""
    drafter = NgramDrafter()
    open_session(drafter, [1, 2])
    assert drafter.expand([leaf(())]) == [[]]
    drafter.commit("s", [7, 8, 9, 2])
    (answer,) = drafter.expand([leaf(())])
    assert [candidate.token_id for candidate in answer] == [7]


def test_under_noise_the_order_follows_the_noise() -> None:
    """At a temperature different seeds rank equally frequent continuations differently; chances stay below 1."""
    tokens = [token for follower in (10, 11, 12, 13) for token in (5, follower)] + [5]
    firsts = set()
    for seed in range(20):
        drafter = NgramDrafter()
        open_session(drafter, tokens, SamplingParams(temperature=1.0, seed=seed))
        (answer,) = drafter.expand([leaf((), len(tokens))])
        firsts.add(answer[0].token_id)
        assert sum(math.exp(candidate.log_prob) for candidate in answer) < 1
    assert firsts == {10, 11, 12, 13}


def test_a_long_prompt_is_taken_in_piece_by_piece() -> None:
    """Each step takes in a bounded number of tokens and says "not yet" until all are there; commits may come
    meanwhile, and other sessions are answered at once."""
    lots = random.Random(0)
    tokens = [lots.randrange(500) for _ in range(3 * CHUNK)]
    drafter = NgramDrafter()
    open_session(drafter, tokens)
    open_session(drafter, [1, 2, 1], name="other")
    other = Leaf("other", 0, 0, (), 3)
    answers = [drafter.expand([leaf(()), other]), drafter.expand([leaf(()), other])]
    assert [answer[0] for answer in answers] == [None, None]
    assert [candidate.token_id for candidate in answers[1][1]] == [2]
    drafter.commit("s", tokens[:20])
    assert drafter.expand([leaf(())]) == [None]
    (answer,) = drafter.expand([leaf(())])
    assert answer[0].token_id == tokens[20]
    assert math.exp(answer[0].log_prob) > 0.9


def test_a_path_is_walked_from_its_parent() -> None:
    """A leaf costs one step of the automaton behind its parent, also in a tree that has outlived a commit."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    drafter = NgramDrafter()
    open_session(drafter, tokens)
    ids = [root_id(0, tokens)]
    for token in (3, 4, 5, 6, 7):
        ids.append(node_id(ids[-1], token))

    def at(depth: int, root: int) -> Leaf:
        path = tuple(range(3 + root, 3 + depth))
        return Leaf("s", ids[depth], ids[max(depth - 1, root)], path, len(tokens) + depth)

    for depth in range(3):
        (answer,) = drafter.expand([at(depth, 0)])
        assert answer[0].token_id == 3 + depth
    drafter.commit("s", [3, 4])
    for depth in (4, 5, 3, 2):
        (answer,) = drafter.expand([at(depth, 2)])
        assert answer[0].token_id == 3 + depth


def test_memory_is_bounded() -> None:
    """Past the limit the older half is forgotten and the newer half still matches; a token takes about 180 bytes."""
    text = RecentText(24, max_tokens=1000)
    lots = random.Random(0)
    tokens = [lots.randrange(10_000) for _ in range(5000)]
    for token in tokens:
        text.extend([token])
        text.take_in(1000)
        assert len(text) <= 1000
    match = Match(0, 0)
    for token in tokens[-104:-100]:
        match = text.automaton.step(match, token)
    assert match.length == 4
    assert text.automaton.followers(match.state, 1) == [(tokens[-100], 1)]
    tracemalloc.start()
    long = RecentText(24)
    long.extend([int(lots.paretovariate(0.6)) % 49152 for _ in range(20_000)])
    long.take_in(20_000)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size / 20_000 < 250


@pytest.mark.parametrize("options", [{"max_n": "0"}, {"max_n": "x"}, {"recent": "-1"}, {"max_n": "257"}])
def test_bad_options_are_named(options: dict[str, str]) -> None:
    """An option out of range is refused by name."""
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        NgramDrafter(**options)


def test_a_pod_with_the_ngram_drafter_never_imports_torch() -> None:
    """The whole pod module, with the n-gram drafter loaded and used, leaves torch and transformers alone."""
    code = """
import sys
from graftree.config import SpeculatorConfig
from speculator_service.drafters import loader
import speculator_service.pod, speculator_service.__main__
loader.load(SpeculatorConfig(drafter="ngram?max_n=5"))
bad = {"torch", "transformers"} & set(sys.modules)
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", code], check=True)
