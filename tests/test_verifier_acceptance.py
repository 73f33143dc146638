"""Target-only acceptance, without a model: the walk says what plain decoding says, whatever was guessed."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from graftree.acceptance import ROOT, accept
from graftree.sampling import GREEDY, SamplingContext, SamplingParams, choose
from graftree.tree import TokenTree

VOCAB = 6


def row_after(path: tuple[int, ...]) -> NDArray[np.float64]:
    """A fixed random distribution for every path: a language model as a table."""
    return np.random.default_rng([len(path), *path]).normal(size=VOCAB)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(0, 20))
    tokens, parents, seen = list[int](), list[int](), set[tuple[int, int]]()
    for _ in range(size):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, VOCAB - 1))
        if (parent, token) not in seen:
            seen.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return TokenTree(0, tuple(tokens), tuple(parents), (-1.0,) * len(tokens))


@settings(max_examples=200, deadline=None)
@given(
    trees(),
    st.sampled_from(
        [
            GREEDY,
            SamplingParams(seed=3),
            SamplingParams(temperature=0.7, top_k=3, seed=4),
            SamplingParams(temperature=0.0, frequency_penalty=2.0),
            SamplingParams(seed=5, presence_penalty=2.0, repetition_penalty=1.5),
        ]
    ),
)
def test_every_pick_is_plain_decodings(tree: TokenTree, params: SamplingParams) -> None:
    """Token by token the run equals plain decoding; it ends where no child carries the pick, never earlier."""
    asked: list[int] = []

    def logits(node: int) -> NDArray[np.float64]:
        asked.append(node)
        return row_after(() if node == ROOT else tuple(tree.path(node)))

    context = SamplingContext([1, 2], [3], vocab_size=VOCAB)
    got = accept(tree, logits, params, context)
    plain: list[int] = []
    for _ in got.token_ids:
        plain.append(choose(row_after(tuple(plain)), params, context, plain))
    assert list(got.token_ids) == plain
    assert len(got.nodes) == len(got.token_ids) - 1
    assert [tree.token_ids[node] for node in got.nodes] == plain[:-1]
    assert [tree.parents[node] for node in got.nodes] == [ROOT, *got.nodes][:-1]
    last = got.visited[-1]
    assert plain[-1] not in tree.children()[last]
    assert asked == list(got.visited), "logits are asked for along the walk only"


def test_no_tree_gives_the_bonus_token_alone() -> None:
    """Plain decoding is the tree without nodes."""
    got = accept(TokenTree(0), lambda _: row_after(()), GREEDY, SamplingContext([0], vocab_size=VOCAB))
    assert got.token_ids == (int(np.argmax(row_after(()))),)
    assert got.nodes == ()


@pytest.mark.parametrize(("guess", "seeds"), [((), 4000), ((0,), 4000), ((2,), 4000), ((0, 1, 2), 20_000)])
def test_the_first_two_tokens_have_the_target_distribution(guess: tuple[int, ...], seeds: int) -> None:
    """Chi-square over thousands of seeds with adversarial guesses: p = (0.1, 0.6, 0.3) at every node."""
    probabilities = np.array([0.1, 0.6, 0.3])
    width = len(guess)
    # Each guess has all guesses as children, so that both tokens come out of accepted nodes where they can.
    tree = TokenTree(
        0, guess * (1 + width), (-1,) * width + tuple(np.repeat(range(width), width)), (-1.0,) * width * (1 + width)
    )
    context = SamplingContext([0], vocab_size=3)
    pairs = np.zeros((3, 3))
    rows = np.log(probabilities)
    for seed in range(seeds):
        params = SamplingParams(seed=seed)
        run = list(accept(tree, lambda _: rows, params, context).token_ids)
        if len(run) < 2:
            context_after = SamplingContext([0], run, vocab_size=3)
            run += accept(TokenTree(0), lambda _: rows, params, context_after).token_ids
        pairs[run[0], run[1]] += 1
    expected = np.outer(probabilities, probabilities) * pairs.sum()
    assert scipy.stats.chisquare(pairs.ravel(), expected.ravel()).pvalue > 1e-3
