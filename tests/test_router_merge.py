"""`MergedTree`: order independence, staleness, connectivity, re-rooting, limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.errors import InvalidTree
from graftree.tree import TokenTree, node_id, root_id
from graftree.v1.speculation_pb2 import TreeDelta
from router.budget import FixedBudget
from router.cut import Cut
from router.merge import MergedTree

SALT, VOCAB = 99, 5
ROOT = root_id(SALT, [1, 2])

Paths = dict[tuple[int, ...], float]


def tree(max_nodes: int = 1000, max_depth: int = 8) -> MergedTree:
    return MergedTree(ROOT, vocab_size=VOCAB, max_nodes=max_nodes, max_depth=max_depth)


def delta(nodes: Sequence[tuple[tuple[int, ...], float]], root: int = ROOT) -> TreeDelta:
    message = TreeDelta()
    for path, log_prob in nodes:
        parent = root
        for token in path[:-1]:
            parent = node_id(parent, token)
        message.parent_ids.append(parent)
        message.token_ids.append(path[-1])
        message.log_probs.append(log_prob)
    return message


def whole_cut(merged: MergedTree, budget: int, max_depth: int) -> Cut:
    """The best `budget` nodes, whatever they cost."""
    return merged.cut(FixedBudget(budget), max_depth) if budget else Cut(TokenTree(merged.root_id))


def cut(merged: MergedTree, budget: int, max_depth: int) -> TokenTree:
    return whole_cut(merged, budget, max_depth).tree


def paths(cut: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(cut.path(index)) for index in range(len(cut))]


def closed(leaves: Paths) -> Paths:
    """The leaves with all their ancestors."""
    nodes: Paths = {}
    for leaf, log_prob in leaves.items():
        for end in range(1, len(leaf) + 1):
            nodes.setdefault(leaf[:end], log_prob)
    return nodes


trees = st.dictionaries(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple),
    st.floats(-8, 0, width=32),
    max_size=8,
).map(closed)


def parts(nodes: Paths, cuts: list[int]) -> list[list[tuple[tuple[int, ...], float]]]:
    """The tree as consecutive deltas, parents first."""
    ordered = sorted(nodes.items(), key=lambda item: (len(item[0]), item[0]))
    edges = [0, *sorted({cut % (len(ordered) + 1) for cut in cuts}), len(ordered)]
    return [ordered[a:b] for a, b in pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(trees, min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=4),
    st.randoms(),
    st.integers(0, 40),
)
def test_order_of_arrival_does_not_matter(speculators: list[Paths], cuts: list[int], random, budget: int) -> None:
    """Any interleaving of the speculators' deltas gives byte for byte the same tree, before and after a commit."""
    queues = [(str(index), parts(nodes, cuts)) for index, nodes in enumerate(speculators)]
    one, other = tree(), tree()
    for name, queue in queues:
        for part in queue:
            one.add(name, delta(part))
    pending = [name for name, queue in queues for _ in queue]
    random.shuffle(pending)
    positions = dict.fromkeys(pending, 0)
    for name in pending:
        other.add(name, delta(dict(queues)[name][positions[name]]))
        positions[name] += 1
    assert cut(one, budget, 3) == cut(other, budget, 3)
    one.reroot([0, 1])
    other.reroot([0, 1])
    assert cut(one, budget, 3) == cut(other, budget, 3)


@settings(max_examples=100, deadline=None)
@given(st.lists(trees, min_size=1, max_size=3), st.integers(0, 30), st.integers(1, 4))
def test_cut_is_connected_and_best(speculators: list[Paths], budget: int, depth: int) -> None:
    """The cut is a valid tree within budget and depth, and no node left out would survive likelier than one in it."""
    merged = tree()
    for index, nodes in enumerate(speculators):
        merged.add(str(index), delta(list(nodes.items())))
    chosen = cut(merged, budget, depth)
    chosen.validate(vocab_size=VOCAB, max_nodes=budget, max_depth=depth)
    everything = cut(merged, 1000, depth)
    survival: dict[tuple[int, ...], float] = {}
    for index, path in enumerate(paths(everything)):
        survival[path] = survival.get(path[:-1], 1.0) * math.exp(everything.log_probs[index])
    assert set(survival) == {path for nodes in speculators for path in nodes if len(path) <= depth}
    kept = set(paths(chosen))
    assert len(kept) == min(budget, len(survival))
    worst = min((survival[path] for path in kept), default=1.0)
    assert all(survival[path] <= worst * (1 + 1e-9) for path in set(survival) - kept)


@settings(max_examples=100, deadline=None)
@given(trees, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))
def test_reroot_keeps_the_branch(nodes: Paths, run: list[int]) -> None:
    """After a commit the tree is what lay below the committed tokens; everything else is gone."""
    merged = tree()
    merged.add("s", delta(list(nodes.items())))
    merged.reroot(run)
    assert merged.root_id == root_id(SALT, [1, 2, *run])
    expected = {path[len(run) :] for path in nodes if path[: len(run)] == tuple(run) and len(path) > len(run)}
    assert set(paths(cut(merged, 1000, 8))) == expected
    assert len(merged) == len(expected)


def test_late_delta_lands_where_its_parent_lives() -> None:
    """A delta grown from an older root: nodes below the new root land, the others are stale and counted."""
    merged = tree()
    merged.add("s", delta([((0,), -0.1), ((3,), -1.0)]))
    merged.reroot([0])
    placed = merged.add("s", delta([((0,), -0.1), ((0, 1), -0.2), ((0, 1, 2), -0.2), ((3, 1), -0.2), ((4,), -0.3)]))
    assert placed == 2
    assert merged.stale_nodes == 3
    assert paths(cut(merged, 10, 8)) == [(1,), (1, 2)]


def test_two_speculators_agreeing_rank_higher() -> None:
    """A token that two speculators give 0.5 each outranks one that a single speculator gives 0.6."""
    merged = tree()
    merged.add("a", delta([((0,), math.log(0.5))]))
    merged.add("b", delta([((0,), math.log(0.5)), ((1,), math.log(0.4))]))
    merged.add("c", delta([((1,), math.log(0.3))]))
    chosen = cut(merged, 2, 1)
    assert chosen.token_ids == (0, 1)
    chances = 1 - 0.5 * 0.5**0.5, 1 - 0.6 * 0.7**0.5
    assert chosen.log_probs[0] == pytest.approx(math.log(chances[0] / sum(chances)), abs=1e-3)
    assert chosen.log_probs[1] == pytest.approx(math.log(chances[1] / sum(chances)), abs=1e-3)


def test_a_speculator_that_is_never_right_loses_weight() -> None:
    """Promises that the LLM does not keep lower what is expected of a speculator's nodes, kept ones do not."""
    merged = tree()
    for _ in range(8):
        merged.add("right", delta([((0,), math.log(0.9))], merged.root_id))
        merged.add("wrong", delta([((1,), math.log(0.9))], merged.root_id))
        merged.reroot([0])
    merged.add("right", delta([((0,), math.log(0.9))], merged.root_id))
    merged.add("wrong", delta([((1,), math.log(0.9))], merged.root_id))
    chosen = whole_cut(merged, 2, 1)
    assert chosen.tree.token_ids == (0, 1)
    assert chosen.survivals[0] > 0.9
    assert chosen.survivals[1] < 0.1


def test_what_each_kind_brings_alone() -> None:
    """Nodes that only one kind proposes, and all below them, are its own; those that several propose are nobody's."""
    merged = tree()
    merged.add("a/1", delta([((0,), -0.1), ((0, 1), -0.1), ((2,), -0.1)]))
    merged.add("b/1", delta([((0,), -0.1), ((0, 1), -0.1), ((0, 1, 2), -0.1), ((3,), -0.1)]))
    merged.add("b/2", delta([((3,), -0.1)]))
    chosen = whole_cut(merged, 10, 8)
    where = {path: index for index, path in enumerate(paths(chosen.tree))}
    brought = chosen.brought()
    assert set(brought) == {"a", "b"}
    assert brought["a"] == (pytest.approx(chosen.survivals[where[(2,)]]), 1)
    own = [chosen.survivals[where[path]] for path in [(0, 1, 2), (3,)]]
    assert brought["b"] == (pytest.approx(sum(own)), 2)
    assert chosen.taken([where[(0,)], where[(0, 1)], where[(0, 1, 2)]]) == {"a": 0, "b": 1}
    assert chosen.expected == pytest.approx(sum(chosen.survivals))


def test_kinds_can_be_left_out() -> None:
    """Nodes that only they propose are not taken, nor what hangs on them; the others' nodes are."""
    merged = tree()
    merged.add("a/1", delta([((0,), -0.1), ((0, 1), -0.1), ((2,), -0.1), ((2, 3), -0.1)]))
    merged.add("b/1", delta([((0,), -0.1), ((2, 3), -0.1)]))
    without = merged.cut(FixedBudget(10), 8, {"a", "unknown"}).tree
    assert set(paths(without)) == {(0,)}
    assert set(paths(merged.cut(FixedBudget(10), 8).tree)) == {(0,), (0, 1), (2,), (2, 3)}
    assert len(merged.cut(FixedBudget(10), 8, {"a", "b"}).tree) == 0


def test_outlook_follows_the_tree() -> None:
    """What is expected of all nodes is their survival probabilities' sum, while they come and after a commit."""
    merged = tree()
    assert merged.outlook == 0
    merged.add("a", delta([((0,), -0.1)]))
    merged.add("a", delta([((0, 1), -0.2), ((2,), -3.0)]))
    before = whole_cut(merged, 10, 8)
    assert merged.outlook == pytest.approx(before.expected)
    merged.reroot([0])
    assert merged.outlook == pytest.approx(before.survivals[1] / before.survivals[0])
    merged.reroot([3])
    assert merged.outlook == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.token_ids.append(1), "parent_ids"),
        (lambda d: d.log_probs.append(-1.0), "log_probs"),
        (lambda d: d.token_ids.__setitem__(0, VOCAB), "token_ids"),
        (lambda d: d.log_probs.__setitem__(0, math.nan), "log_probs"),
        (lambda d: d.log_probs.__setitem__(0, math.inf), "log_probs"),
        (lambda d: d.log_probs.__setitem__(0, 0.5), "log_probs"),
        (lambda d: d.MergeFrom(delta([((0,), -1.0)])), "token_ids"),
        (lambda d: d.MergeFrom(delta([((0, 1, 2, 3, 4)[:end], -1.0) for end in range(2, 6)])), "parent_ids"),
        (lambda d: d.MergeFrom(delta([((token, 1), -1.0) for token in (1, 2)] * 20)), "token_ids"),
    ],
    ids=["lengths", "log probs", "vocabulary", "nan", "inf", "positive", "siblings", "depth", "nodes"],
)
def test_bad_deltas_change_nothing(change, field: str) -> None:
    """A delta that breaks an invariant raises InvalidTree and leaves the tree as it was."""
    merged = tree(max_nodes=20, max_depth=4)
    merged.add("good", delta([((0,), -0.5), ((2,), -0.9)]))
    before = cut(merged, 100, 8)
    bad = delta([((0,), -1.0), ((1,), -2.0)])
    change(bad)
    with pytest.raises(InvalidTree, match=field):
        merged.add("bad", bad)
    assert cut(merged, 100, 8) == before


def test_node_limit_counts_live_nodes() -> None:
    """The limit is on what one speculator has alive: after a commit there is room again."""
    merged = tree(max_nodes=4)
    merged.add("s", delta([((token,), -1.0) for token in range(4)]))
    with pytest.raises(InvalidTree, match="at most 4 nodes"):
        merged.add("s", delta([((4,), -1.0)]))
    merged.reroot([0])
    assert merged.add("s", delta([((token,), -1.0) for token in range(4)], merged.root_id)) == 4


def test_sibling_says_it_again() -> None:
    """The same node twice from one speculator is one node, at its higher probability."""
    merged = tree()
    merged.add("s", delta([((0,), -2.0)]))
    merged.add("s", delta([((0,), -1.0)]))
    merged.add("s", delta([((0,), -3.0)]))
    assert len(merged) == 1
    assert cut(merged, 5, 5).log_probs == (pytest.approx(-1.0),)
