"""The n-gram drafter: what it predicts, what it costs, and that it needs no torch."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from fractions import Fraction

import pytest

from graftree.errors import InvalidArgument
from graftree.sampling import SamplingParams
from graftree.tree import root_id
from speculator_service.drafters.base import DraftSession, Leaf
from speculator_service.drafters.ngram import NgramDrafter
from speculator_service.drafters.ngram_index import NgramIndex

GREEDY = SamplingParams(temperature=0.0)


def open_session(drafter: NgramDrafter, tokens: list[int], sampling: SamplingParams = GREEDY) -> None:
    drafter.open(DraftSession("s", root_id(0, tokens), tuple(tokens), len(tokens), sampling, 1000, 5000, 64, 4))


def leaf(path: tuple[int, ...], position: int = 0) -> Leaf:
    return Leaf("s", 0, 0, path, position)


def brute_force(tokens: list[int], tail: list[int], max_n: int) -> dict[int, Fraction]:
    """Interpolated Witten-Bell from its formula (order 1 with a double escape), over every occurrence."""
    result: dict[int, Fraction] = {}
    left = Fraction(1)
    for n in range(max_n, 0, -1):
        if n > len(tail):
            continue
        gram, counts = tail[-n:], {}
        for end in range(n, len(tokens)):
            if tokens[end - n : end] == gram:
                counts[tokens[end]] = counts.get(tokens[end], 0) + 1
        total = sum(counts.values())
        if not total:
            continue
        unseen = len(counts) * (2 if n == 1 else 1)
        for token, number in counts.items():
            result[token] = result.get(token, Fraction(0)) + left * Fraction(number, total + unseen)
        left *= Fraction(unseen, total + unseen)
    return result


@pytest.mark.parametrize("max_n", [1, 2, 3, 4, 6])
def test_probabilities_are_interpolated_witten_bell(max_n: int) -> None:
    """The index agrees with the formula evaluated over the whole text, also when it grew piece by piece."""
    lots = random.Random(max_n)
    for vocab in (2, 5, 30):
        tokens = [lots.randrange(vocab) for _ in range(200)]
        index = NgramIndex(max_n=max_n, recent=1000)
        cut = lots.randrange(200)
        index.extend(tokens[:cut])
        index.extend(tokens[cut:])
        for tail in ([lots.randrange(vocab) for _ in range(length)] for length in (1, 2, 3, 6, 8)):
            got = index.continuations(tail)
            want = brute_force(tokens, tail, max_n)
            assert got.keys() == want.keys()
            assert all(math.isclose(got[token], want[token], rel_tol=1e-12) for token in want)


def test_a_longer_match_is_worth_more() -> None:
    """One occurrence of a single token is worth 1/3, of four tokens 11/12."""
    index = NgramIndex()
    index.extend([1, 2, 3, 4, 5, 0])
    for tail, worth in (([4], 1 / 3), ([9, 4], 1 / 3), ([3, 4], 2 / 3), ([1, 2, 3, 4], 11 / 12)):
        assert index.continuations(tail) == {5: pytest.approx(worth)}


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


def test_work_per_step_does_not_grow_with_the_text() -> None:
    """A look-up touches at most `recent` occurrences per chain, however long the text is."""
    index = NgramIndex(recent=8)
    index.extend([1, 2] * 5000)
    probabilities = index.continuations([2, 1])
    # The bigram "2 1" is followed by 2, at orders 2 and 1, and both chains stop after 8 occurrences.
    assert math.isclose(1 - probabilities[2], (1 / 9) * (2 / 10))


def test_memory_is_bounded() -> None:
    """Past the limit the older half is forgotten and the newer half still matches."""
    index = NgramIndex(max_tokens=1000)
    lots = random.Random(0)
    text = [lots.randrange(10_000) for _ in range(5000)]
    for token in text:
        index.extend([token])
        assert len(index) <= 1000
    assert text[-100] in index.continuations(text[-104:-100])


@pytest.mark.parametrize("options", [{"max_n": "0"}, {"max_n": "x"}, {"recent": "-1"}, {"max_n": "17"}])
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
