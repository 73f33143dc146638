"""The verifier on SCRIPTED trees says exactly what plain decoding says (trials 11, 12, 13, 15)."""

from __future__ import annotations

import random

import pytest

from graftree.sampling import GREEDY, SamplingParams
from graftree.tree import TokenTree
from tests.verifier_harness import LLAMA, Router, TreeMaker, chain, greedy, make_engine, plain

PROMPT = list(range(3, 20))
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=21)
FAMILIES = ["llama", "qwen2", "qwen3", "opt", "gpt2", "mistral"]


def around(path: list[int], width: int, root: int, *, last: bool = True, vocab: int = 512) -> TokenTree:
    """A tree that holds `path` and `width - 1` wrong siblings per level, each wrong one with a child of its own."""
    tokens, parents, parent = list[int](), list[int](), -1
    for token in path:
        wrong = [(token + 1 + offset) % vocab for offset in range(width - 1)]
        level = [*wrong, token] if last else [token, *wrong]
        base = len(tokens)
        tokens += level
        parents += [parent] * width
        for offset, sibling in enumerate(level):
            if sibling != token:
                tokens.append(token)
                parents.append(base + offset)
        parent = base + level.index(token)
    return TokenTree(root, tuple(tokens), tuple(parents), (-1.0,) * len(tokens))


def oracle(truth: list[int], start: int, depth: int, width: int = 1, **options: bool) -> TreeMaker:
    """Trees that hold the next `depth` tokens of `truth`."""

    def make(committed: list[int], root: int) -> TokenTree:
        done = len(committed) - start
        return around(truth[done : done + depth], width, root, **options)

    return make


def random_tree(size: int, root: int, path: list[int], seed: int) -> TokenTree:
    """A random tree of exactly `size` nodes in which `path` is likely to be found."""
    lots = random.Random(seed)
    tokens, parents, depth, seen = list[int](), list[int](), [0], set[tuple[int, int]]()
    while len(tokens) < size:
        parent = lots.randrange(-1, len(tokens))
        level = depth[parent + 1]
        token = path[level] if level < len(path) and lots.random() < 0.5 else lots.randrange(512)
        if (parent, token) not in seen:
            seen.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depth.append(level + 1)
    return TokenTree(root, tuple(tokens), tuple(parents), (-1.0,) * size)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("last", [True, False], ids=["last child", "first child"])
def test_accepted_branches_are_compacted(params: SamplingParams, last: bool) -> None:
    """Trial 11: the right child is the last (first) at every level; the 50 tokens after depend on moved rows."""
    truth = plain(PROMPT, 80, params)
    router = Router(make_engine())
    client = router.open("a", PROMPT, params=params)
    make = oracle(truth, len(PROMPT), depth=4, width=3, last=last)
    assert client.generate(30, make) == truth[:30]
    counters = router.engine.counters
    assert counters.num_accepted_tokens_per_pos == [6] * 4, "every level of every tree was accepted"
    assert client.generate(50)[-50:] == truth[len(client.token_ids) - len(PROMPT) - 50 :][:50]
    assert client.token_ids[len(PROMPT) :] == truth[: len(client.token_ids) - len(PROMPT)]


def test_greedy_equals_transformers_generate() -> None:
    """The reference is independent of this code: 60 tokens, every third step's tree is wrong at its second level."""
    truth = greedy(PROMPT, 60)

    def make(committed: list[int], root: int) -> TokenTree:
        done = len(committed) - len(PROMPT)
        path = truth[done : done + 4]
        if done % 3 == 0 and len(path) > 1:
            path[1] = (path[1] + 1) % 512
        return chain(root, path)

    assert Router(make_engine()).open("a", PROMPT).generate(60, make) == truth


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, params: SamplingParams) -> None:
    """Right, wrong and no trees give plain decoding's tokens on every architecture claimed."""
    uri = f"random:{family}?context=256&seed=3&scale=3"
    truth = plain(PROMPT, 40, params, uri)
    client = Router(make_engine(uri)).open("a", PROMPT, params=params)

    def make(committed: list[int], root: int) -> TokenTree:
        done = len(committed) - len(PROMPT)
        return random_tree(12, root, truth[done : done + 6], seed=done)

    assert client.generate(40, make) == truth


def test_shapes_share_a_step() -> None:
    """Trial 12: sizes 0, 1, 7 and 64, different prompts and parameters, in one forward, for 10 rounds."""
    engine = make_engine()
    router = Router(engine)
    sizes, prompts = [0, 1, 7, 64, 64], [[5], PROMPT, list(range(100, 140)), [9, 9, 9], PROMPT]
    params = [GREEDY, SAMPLED, GREEDY, SamplingParams(seed=1, top_k=40), SamplingParams(temperature=1.5, seed=9)]
    truths = [plain(prompt, 80, chosen) for prompt, chosen in zip(prompts, params, strict=True)]
    clients = [
        router.open(str(index), prompt, params=chosen)
        for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True))
    ]
    for turn in range(10):
        for client, size, prompt, truth in zip(clients, sizes, prompts, truths, strict=True):
            done = len(client.token_ids) - len(prompt)
            client.send(random_tree(size, client.root, truth[done : done + 5], seed=turn))
        router.run()
        assert {client.take().batch_sessions for client in clients} == {5}
    for client, prompt, truth in zip(clients, prompts, truths, strict=True):
        got = client.token_ids[len(prompt) :]
        assert got == truth[: len(got)]
        assert len(got) >= 10
    assert engine.counters.num_accepted_tokens > 10


@pytest.mark.parametrize("size", [31, 32, 33, 63, 64, 65, 128])
def test_wide_masks(size: int) -> None:
    """Trial 13: trees on both sides of the machine word."""
    truth = plain(PROMPT, 30, SAMPLED)
    client = Router(make_engine()).open("a", PROMPT, params=SAMPLED)

    def make(committed: list[int], root: int) -> TokenTree:
        done = len(committed) - len(PROMPT)
        # The path that is right comes last, so its rows' bits are the highest ones.
        noise = random_tree(size - 3, root, [], seed=done)
        path = truth[done : done + 3]
        tokens = noise.token_ids + tuple(path)
        parents = (*noise.parents, -1, size - 3, size - 2)[: len(tokens)]
        tree = TokenTree(root, tokens, parents, (-1.0,) * len(tokens))
        tree.validate(vocab_size=512)
        return tree

    assert client.generate(16, make)[:16] == truth[:16]


@pytest.mark.parametrize("size", [31, 32, 33, 63, 64, 65, 100])
def test_long_chains(size: int) -> None:
    """Trials 13 and 15: a pure chain of any length is accepted whole."""
    truth = plain(PROMPT, size + 1, GREEDY)
    client = Router(make_engine()).open("a", PROMPT)
    verdict = client.verify(chain(client.root, truth[:size]))
    assert list(verdict.token_ids) == truth
    assert list(verdict.accepted_nodes) == list(range(size))


def test_flat_tree_and_single_node() -> None:
    """Trial 15: depth 1 with width 4, and one node, right or wrong."""
    truth = plain(PROMPT, 12, GREEDY)
    client = Router(make_engine()).open("a", PROMPT)
    flat = TokenTree(client.root, (1, 2, 3, truth[0]), (-1,) * 4, (-2.0,) * 4)
    verdict = client.verify(flat)
    assert (list(verdict.token_ids), list(verdict.accepted_nodes)) == (truth[:2], [3])
    verdict = client.verify(chain(client.root, truth[2:3]))
    assert list(verdict.token_ids) == truth[2:4]
    verdict = client.verify(chain(client.root, [(truth[4] + 1) % 512]))
    assert list(verdict.token_ids) == truth[4:5]
    assert client.generate(7) == truth[5:12]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_empty_every_other_round(params: SamplingParams) -> None:
    """Trial 15: a round without a draft does not spoil the next one."""
    truth = plain(PROMPT, 40, params)
    turn = 0

    def make(committed: list[int], root: int) -> TokenTree:
        nonlocal turn
        turn += 1
        done = len(committed) - len(PROMPT)
        return TokenTree(root) if turn % 2 else around(truth[done : done + 3], 2, root)

    client = Router(make_engine()).open("a", PROMPT, params=params)
    assert client.generate(40, make) == truth


@pytest.mark.parametrize("seed", [0, 1])
def test_sampling_is_the_same_with_and_without_trees(seed: int) -> None:
    """Temperature 0.8: no tree, right trees, wrong trees and random trees give the same tokens; seeds differ."""
    params = SamplingParams(temperature=0.8, seed=seed)
    truth = plain(PROMPT, 40, params)
    makers: list[TreeMaker | None] = [
        None,
        oracle(truth, len(PROMPT), depth=5, width=2),
        lambda committed, root: random_tree(20, root, [], seed=len(committed)),
        lambda committed, root: random_tree(20, root, truth[len(committed) - len(PROMPT) :][:4], len(committed)),
    ]
    router = Router(make_engine())
    for index, make in enumerate(makers):
        assert router.open(str(index), PROMPT, params=params).generate(40, make) == truth
    assert truth != plain(PROMPT, 40, SamplingParams(temperature=0.8, seed=seed + 2))


def test_penalties_count_the_path_inside_a_run() -> None:
    """Trials 6 and 7: on a repetitive prompt penalised output is plain decoding's, with trees that are right."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.7)
    prompt = [7, 8, 9] * 6
    truth = plain(prompt, 40, params)
    assert truth != plain(prompt, 40, GREEDY)
    client = Router(make_engine()).open("a", prompt, params=params)
    assert client.generate(40, oracle(truth, len(prompt), depth=4, width=2)) == truth
    assert client.router.engine.counters.num_accepted_tokens >= 30


def test_log_probs_inside_a_run() -> None:
    """Trial 5: one per emitted token, the raw distribution's, equal to those of plain steps within 1e-3."""
    truth = greedy(PROMPT, 8)
    router = Router(make_engine())
    fields = {"log_probs": True, "alternatives": 3}
    drafted = router.open("a", PROMPT, **fields)
    verdict = drafted.verify(chain(drafted.root, truth[:4]))
    other = router.open("b", PROMPT, **fields)
    singles = [other.verify().log_probs[0] for _ in range(5)]
    assert len(verdict.log_probs) == 5
    for got, want in zip(verdict.log_probs, singles, strict=True):
        assert got.token_id == want.token_id
        assert got.rank == want.rank == 1
        assert got.log_prob == pytest.approx(want.log_prob, abs=1e-3)
        assert got.log_prob < 0
        assert [a.token_id for a in got.alternatives] == [a.token_id for a in want.alternatives]
        assert got.alternatives[0].token_id == got.token_id


def test_the_default_model_is_peaked_enough_to_tell_paths_apart() -> None:
    """The fixtures mean something: greedy output does not degenerate into a cycle of one token."""
    assert len(set(greedy(PROMPT, 40, LLAMA))) > 10
