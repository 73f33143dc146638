"""The acceptance lab: walks without trees are walks down whole trees; copies of a prompt are texts of their own."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.lab import RULES, SALT, Decoder, Text, Walker
from bench.node_success import Scheme
from graftree.acceptance import ROOT, accept, draw_proposals
from graftree.proposals import DraftDistribution, Proposals, draft_salt
from graftree.sampling import GREEDY, SamplingContext, SamplingParams, process
from graftree.tree import TokenTree, node_id

PROMPT, VOCAB, EXPANSION = (3, 1), 6, (2, 3, 1)
MODEL = "random:llama?vocab=64&layers=2&hidden=32&heads=2&kv_heads=1&intermediate=64&context=128"


@cache
def logits(model: int, path: tuple[int, ...]) -> NDArray[np.float64]:
    """Of two models that are like each other."""
    shared, own = (np.random.default_rng([seed, *path]).normal(size=VOCAB) for seed in (7, model))
    return 1.5 * shared + 0.7 * own


def q_after(path: tuple[int, ...], params: SamplingParams) -> DraftDistribution:
    return DraftDistribution.truncate(process(logits(2, path), params, SamplingContext(PROMPT, vocab_size=VOCAB)))


def whole_tree(
    scheme: Scheme, output: tuple[int, ...], params: SamplingParams
) -> tuple[TokenTree, list[tuple[int, ...]], dict[int, list[Proposals]]]:
    tokens, parents, paths = list[int](), list[int](), list[tuple[int, ...]]()
    proposals: dict[int, list[Proposals]] = {}
    level = [(ROOT, output)]
    for count in EXPANSION:
        below = []
        for node, path in level:
            address = 0
            for token in path:
                address = node_id(address, token)
            q, shown = q_after(path, params), GREEDY if scheme == "top_k" else params
            salt = draft_salt(SALT, address)
            drawn = draw_proposals(RULES[scheme], q, count, shown, len(PROMPT) + len(path), salt)
            proposals[node] = [Proposals(q, drawn)]
            for token in dict.fromkeys(drawn):
                tokens.append(token)
                parents.append(node)
                paths.append((*path, token))
                below.append((len(tokens) - 1, paths[-1]))
        level = below
    return TokenTree(0, tuple(tokens), tuple(parents), (-1.0,) * len(tokens)), [*paths, output], proposals


@pytest.mark.parametrize("scheme", list(RULES))
def test_a_walk_without_a_tree_is_the_walk_down_the_whole_tree(scheme: Scheme) -> None:
    """Same tokens and same steps as `accept` on trees with every node of the expansion."""
    lengths = set[int]()
    for seed in range(20):
        walker, params = Walker(scheme, EXPANSION), SamplingParams(seed=seed)
        text = Text(PROMPT, RULES[scheme], [walker], seed, VOCAB)
        while len(text.output) < 12:
            path = tuple(text.output)
            text.advance(*text.distributions(logits(1, path), logits(2, path)))
        output, steps = tuple[int, ...](), list[int]()
        while len(output) < 12:
            tree, paths, proposals = whole_tree(scheme, output, params)
            context = SamplingContext(PROMPT, output, vocab_size=VOCAB)
            after = [logits(1, path) for path in paths]
            got = accept(tree, after.__getitem__, params, context, rule=RULES[scheme], proposals=proposals)
            output += got.token_ids
            steps.append(len(got.token_ids))
        assert tuple(text.output) == output[:12]
        assert walker.steps[:-1] == steps[: len(walker.steps) - 1]
        lengths.update(steps)
    assert {1, 4} < lengths  # from nothing passed to everything


def test_copies_of_a_prompt_share_its_rows_and_nothing_else() -> None:
    """Three texts from one prefill, against the same texts one by one."""
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, 64, 37)]
    later = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    together, alone = Decoder(MODEL, kv_tokens=512), Decoder(MODEL, kv_tokens=512)
    cursors = together.open(prompt, 3, 4)
    rows = [together.step(cursors)]
    for step in zip(*later, strict=True):
        for cursor, token in zip(cursors, step, strict=True):
            cursor.pending.append(token)
        rows.append(together.step(cursors))
    for index, tokens in enumerate(later):
        (cursor,) = alone.open([*prompt, *tokens], 1, 1)
        assert alone.step([cursor])[0] == pytest.approx(rows[-1][index], abs=1e-4)
    together.close()
    together.runner.pool.check()
    assert together.runner.pool.free_blocks == 512 // 16
