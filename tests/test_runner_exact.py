"""`TreeRunner` against ordinary transformers forwards, one per root-to-leaf path."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.models.runner import chain_rows
from tests.runner_models import FAMILIES, Sequences, Tree, path_logits, runner

SIZES = (0, 1, 7, 31, 32, 33, 63, 64, 65, 128)
TOLERANCE = 1e-4


def random_tree(seed: int, context: int, size: int, depth: int = 24) -> Tree:
    """A tree with random shape and tokens, at most `depth` deep."""
    rng = random.Random(seed)
    parents: list[int] = []
    levels: list[int] = []
    for index in range(size):
        parent = rng.randrange(max(-1, index - 12), index) if index else -1
        while parent >= 0 and levels[parent] >= depth:
            parent = parents[parent]
        parents.append(parent)
        levels.append(levels[parent] + 1 if parent >= 0 else 1)
    return Tree(
        context=tuple(rng.randrange(300) for _ in range(context)),
        token_ids=tuple(rng.randrange(300) for _ in range(size)),
        parents=tuple(parents),
    )


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).abs().max()) if len(got) else 0.0


trees = st.builds(
    random_tree,
    st.integers(0, 10_000),
    st.sampled_from((0, 1, 15, 16, 17, 31, 32, 100, 230)),
    st.sampled_from((0, 1, 2, 5, 7, 16, 31, 33)),
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(batch=st.lists(trees, min_size=1, max_size=4))
def test_random_trees_in_ragged_batches(family: str, batch: list[Tree]) -> None:
    """Every node's logits equal those of an ordinary forward along its path, for several trees in one step."""
    uri = FAMILIES[family]
    with Sequences(uri, batch) as blocks:
        got = runner(uri).forward([tree.rows(own) for tree, own in zip(batch, blocks, strict=True)])
    for logits, tree in zip(got, batch, strict=True):
        assert difference(logits, tree.expected(uri)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4, deadline=None)
@given(batch=st.lists(trees, min_size=1, max_size=3), data=st.data())
def test_trees_that_grow_in_steps(family: str, batch: list[Tree], data: st.DataObject) -> None:
    """A tree run in several steps, its earlier rows read from the cache, gives what it gives in one."""
    uri = FAMILIES[family]
    cuts = [
        sorted({0, len(tree.token_ids), *data.draw(st.lists(st.integers(0, len(tree.token_ids)), max_size=2))})
        for tree in batch
    ]
    parts: list[list[torch.Tensor]] = [[] for _ in batch]
    with Sequences(uri, batch) as blocks:
        for step in range(max(map(len, cuts)) - 1):
            going = [index for index, cut in enumerate(cuts) if step < len(cut) - 1]
            rows = [batch[index].rows(blocks[index], *cuts[index][step : step + 2]) for index in going]
            for index, logits in zip(going, runner(uri).forward(rows), strict=True):
                parts[index].append(logits)
    for tree, logits in zip(batch, parts, strict=True):
        if logits:
            assert difference(torch.cat(logits), tree.expected(uri)) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_tree_sizes_around_machine_words(family: str) -> None:
    """All sizes of trial 13 in one step: 0 to 128 nodes, side by side."""
    uri = FAMILIES[family]
    batch = [random_tree(size, 10 + size % 7, size) for size in SIZES]
    with Sequences(uri, batch) as blocks:
        got = runner(uri).forward([tree.rows(own) for tree, own in zip(batch, blocks, strict=True)])
    for logits, tree in zip(got, batch, strict=True):
        assert difference(logits, tree.expected(uri)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks_beside_trees(family: str) -> None:
    """A prompt in chunks of uneven length, each beside another sequence's tree, ends where one forward ends."""
    uri = FAMILIES[family]
    prompt = random_tree(1, 150, 0).context
    tree = random_tree(2, 33, 20)
    run = runner(uri)
    with Sequences(uri, [tree]) as (own,):
        blocks = run.pool.allocate(10)
        done = 0
        for size in (1, 15, 16, 70, 48):
            chunk = chain_rows(blocks, done, prompt[done : done + size], logits=[size - 1])
            last, beside = run.forward([chunk, tree.rows(own)])
            assert difference(beside, tree.expected(uri)) < TOLERANCE
            done += size
            assert difference(last[0], path_logits(uri, prompt[:done])[-1]) < TOLERANCE
        run.pool.free(blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_accepted_path_moved_into_place(family: str) -> None:
    """After `move_rows` of an accepted path the sequence decodes as if it had been a plain prompt (trial 11)."""
    uri = FAMILIES[family]
    tree = random_tree(5, 21, 40)
    deepest = max(range(40), key=lambda index: len(tree.path(index)))
    path = tree.path(deepest)
    run = runner(uri)
    with Sequences(uri, [tree]) as (blocks,):
        run.forward([tree.rows(blocks)])
        context = len(tree.context)
        run.kv.move_rows(blocks, [context + node for node in path], range(context, context + len(path)))
        text = [*tree.context, *(tree.token_ids[node] for node in path)]
        for token in (7, 8, 9):
            (logits,) = run.forward([chain_rows(blocks, len(text), [token], logits=[0])])
            text.append(token)
            assert difference(logits[0], path_logits(uri, text)[-1]) < TOLERANCE


def test_only_wanted_rows_and_all_rows_counted() -> None:
    """Logits come for the rows asked for, in the order asked; every row run is counted."""
    uri = FAMILIES["llama"]
    tree = random_tree(3, 5, 9)
    run = runner(uri)
    with Sequences(uri, [tree]) as (blocks,):
        (everything,) = run.forward([tree.rows(blocks)])
        before = run.rows_computed
        rows = tree.rows(blocks)
        (some,) = run.forward([type(rows)(**{**vars(rows), "logits": [8, 0, 3]})])
        assert run.rows_computed == before + 9
        torch.testing.assert_close(some, everything[[8, 0, 3]])
        (none,) = run.forward([type(rows)(**{**vars(rows), "logits": []})])
        assert none.shape == (0, 300)


def test_empty_steps() -> None:
    """No sequences, and sequences without rows, are steps too."""
    run = runner(FAMILIES["llama"])
    assert run.forward([]) == []
    assert [logits.shape for logits in run.forward([chain_rows([], 0, [])])] == [(0, 300)]


def test_rows_that_were_never_written_do_not_matter() -> None:
    """A cache full of NaN gives the same logits: only rows that a step or an earlier one wrote are read."""
    uri = FAMILIES["mistral-window"]
    batch = [random_tree(8, 17, 12), random_tree(9, 3, 2), random_tree(10, 40, 33)]
    for layer in runner(uri).kv.keys + runner(uri).kv.values:
        layer.fill_(torch.nan)
    with Sequences(uri, batch) as blocks:
        got = runner(uri).forward([tree.rows(own) for tree, own in zip(batch, blocks, strict=True)])
    for logits, tree in zip(got, batch, strict=True):
        assert difference(logits, tree.expected(uri)) < TOLERANCE
