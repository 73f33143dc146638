"""LivingTree: growth order, limits, deltas and re-rooting."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.tree import node_id, root_id
from speculator_service.drafters.base import Candidate
from speculator_service.living_tree import LivingTree, Node
from speculator_service.shapes import BEST_FIRST, Shape


def make_tree(
    *,
    max_nodes: int = 16,
    max_depth: int = 8,
    max_position: int = 1000,
    vocab_size: int = 100,
    shape: Shape = BEST_FIRST,
) -> LivingTree:
    """A tree behind ten committed tokens."""
    return LivingTree(
        root_id(1, range(10)),
        10,
        max_nodes=max_nodes,
        max_depth=max_depth,
        max_position=max_position,
        vocab_size=vocab_size,
        shape=shape,
    )


def chances(path: tuple[int, ...]) -> list[Candidate]:
    """A fixed model: three children per path, with chances that depend on it."""
    lots = random.Random(str(path))
    weights = [lots.random() ** 3 + 1e-3 for _ in range(3)]
    return [Candidate(10 * i + len(path) % 10, math.log(w / sum(weights))) for i, w in enumerate(weights)]


def grow(tree: LivingTree, limit: int = 1) -> int:
    """Grow until complete; the number of steps."""
    for step in itertools.count():
        if tree.complete:
            return step
        for node in tree.take(limit):
            tree.attach(node, chances(absolute(tree, node)))
    raise AssertionError


def absolute(tree: LivingTree, node: Node) -> tuple[int, ...]:
    """Something that names a node's context, the same before and after a commit."""
    return (node.id % 1000,)


def shape(tree: LivingTree) -> set[int]:
    return {node.id for node in tree.nodes()}


def test_nodes_are_content_addressed() -> None:
    """Every node's id is the chain of node ids over its path from the root."""
    tree = make_tree()
    grow(tree)
    for node in tree.nodes():
        identifier = tree.root.id
        for token in tree.path(node):
            identifier = node_id(identifier, token)
        assert identifier == node.id


def test_expands_the_best_leaf_first() -> None:
    """With one leaf per step, no unexpanded node was ever more probable than one expanded after it entered."""
    tree = make_tree(max_nodes=30)
    while not tree.complete:
        (leaf,) = tree.take(1)
        others = [n for n in tree.nodes() if not n.expanded and n is not leaf and n.position - 9 < tree.max_depth]
        assert all(other.score <= leaf.score for other in others)
        tree.attach(leaf, chances(absolute(tree, leaf)))


def test_one_step_takes_leaves_of_similar_chance_only() -> None:
    """A sure child is expanded alone, equal ones together."""
    peaked, flat = make_tree(), make_tree()
    for tree, log_probs in ((peaked, (-0.01, -5.0, -6.0)), (flat, (-1.1, -1.1, -1.1))):
        tree.attach(tree.take(8)[0], [Candidate(i, p) for i, p in enumerate(log_probs)])
    assert len(peaked.take(8)) == 1
    assert len(flat.take(8)) == 3


def test_node_budget() -> None:
    """The tree holds exactly max_nodes nodes when it is complete, whatever is offered."""
    for budget in (1, 2, 7, 64):
        tree = make_tree(max_nodes=budget)
        grow(tree)
        assert len(tree) == budget
        assert tree.take(1) == []


def test_improbable_candidates_wait_until_nothing_better_can_come() -> None:
    """A candidate below a fair share of the budget enters once it is the best that is left."""
    tree = make_tree(max_nodes=4, max_depth=3)
    tree.attach(tree.take(1)[0], [Candidate(1, -0.05), Candidate(2, -3.0)])
    assert [node.token_id for node in tree.nodes()] == [1]
    tree.attach(tree.take(1)[0], [Candidate(3, -0.05)])
    tree.attach(tree.take(1)[0], [Candidate(4, -0.05)])
    assert [node.token_id for node in tree.nodes()] == [1, 3, 4]
    (late,) = tree.take(4)
    assert late.token_id == 2
    assert tree.unsent()[-1] is late


def test_growth_ends_where_a_verifier_would_not_look() -> None:
    """Far below a fair share of the budget nothing enters and nothing is expanded, however much room there is; after
    a commit that makes it probable it does."""
    tree = make_tree(max_nodes=20)
    tree.attach(tree.take(1)[0], [Candidate(1, -3.0), Candidate(2, -9.0)])
    (node,) = tree.take(4)
    assert node.token_id == 1
    tree.attach(node, [Candidate(3, -2.5)])
    assert tree.complete
    assert len(tree) == 1
    tree.commit([1])
    (node,) = tree.take(4)
    assert node is tree.root.children[3] or node is tree.root
    assert [node.token_id for node in tree.nodes()] == [3]


def test_depth_and_position_limits() -> None:
    """Nothing is drafted below max_depth, nor for a position at or beyond max_position."""
    deep = make_tree(max_nodes=200, max_depth=3)
    grow(deep)
    assert max(node.position for node in deep.nodes()) == 9 + 3
    ending = make_tree(max_nodes=200, max_position=12)
    grow(ending)
    assert max(node.position for node in ending.nodes()) == 11
    over = make_tree(max_position=10)
    assert over.complete
    assert over.take(1) == []


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    """Padding ids of a larger SSM vocabulary, and repeated ids, are not drafted."""
    tree = make_tree(vocab_size=5)
    tree.attach(tree.take(1)[0], [Candidate(5, -0.1), Candidate(4, -0.2), Candidate(4, -0.3), Candidate(-1, -0.1)])
    assert [node.token_id for node in tree.nodes()] == [4]


def test_every_node_is_sent_once_parents_first() -> None:
    """The deltas together are the tree, each node once and behind its parent."""
    tree, known = make_tree(max_nodes=40), {make_tree().root.id}
    while not tree.complete:
        for node in tree.take(3):
            tree.attach(node, chances(absolute(tree, node)))
        for node in tree.unsent():
            assert node.parent is not None
            assert node.parent.id in known
            assert node.id not in known
            known.add(node.id)
    assert known == shape(tree) | {tree.root.id}


def test_commit_inside_the_tree_keeps_the_branch() -> None:
    """Descendants of the new root stay, expanded or not, and are not sent again; all other nodes are dropped, and
    candidates that waited for room take it."""
    tree = make_tree(max_nodes=40)
    grow(tree)
    tree.unsent()
    node = max((n for n in tree.nodes() if n.position == 11), key=lambda n: len(n.children))
    path = tree.path(node)
    expected = {n.id for n in tree.nodes() if tree.path(n)[:2] == path and n is not node}
    expanded = {n.id for n in tree.nodes() if n.expanded}
    dropped = [n for n in tree.nodes() if n.id not in expected]
    assert tree.commit(path)
    assert tree.root is node
    fresh = {n.id for n in tree.unsent()}
    assert shape(tree) == expected | fresh
    assert not expected & fresh
    assert {n.id for n in tree.nodes() if n.expanded} == expected & expanded
    assert tree.committed_length == 12
    assert not any(n.alive for n in dropped if n is not node)


def test_growth_goes_on_after_a_commit() -> None:
    """The budget refills, the depth counts from the new root, and no node is expanded twice."""
    tree = make_tree(max_nodes=30, max_depth=4)
    grow(tree)
    best = max(tree.root.children.values(), key=lambda n: len(n.children))
    tree.commit([best.token_id])
    expanded = {n.id for n in (tree.root, *tree.nodes()) if n.expanded}
    taken = set()
    while not tree.complete:
        for node in tree.take(2):
            taken.add(node.id)
            tree.attach(node, chances(absolute(tree, node)))
    assert not taken & expanded
    assert len(tree) > len(expanded)
    assert max(n.position for n in tree.nodes()) - tree.root.position == 4


def test_commit_outside_the_tree_restarts() -> None:
    """A bonus token that was not drafted becomes the root of an empty tree with the right id and position."""
    tree = make_tree()
    grow(tree)
    child = next(iter(tree.root.children.values()))
    assert not tree.commit([child.token_id, 77])
    assert len(tree) == 0
    assert tree.root.id == root_id(1, [*range(10), child.token_id, 77])
    assert tree.committed_length == 12
    assert not tree.complete


def test_commit_to_an_unsent_node_does_not_send_it() -> None:
    """A node that becomes the root before it was sent is no news; its children, sent later, hang on it."""
    tree = make_tree()
    tree.attach(tree.take(1)[0], [Candidate(3, -0.1)])
    assert tree.commit([3])
    assert tree.unsent() == []
    tree.attach(tree.take(1)[0], [Candidate(4, -0.1)])
    (node,) = tree.unsent()
    assert node.parent is tree.root


def test_a_leaf_put_back_is_offered_again() -> None:
    """A drafter that is not ready loses nothing."""
    tree = make_tree()
    (root,) = tree.take(1)
    assert tree.take(1) == []
    tree.put_back(root)
    assert tree.take(1) == [root]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=12), st.integers(1, 40))
def test_invariants_hold_through_any_life(life: list[tuple[int, int, bool]], max_nodes: int) -> None:
    """Whatever is grown and committed: parents first, within budget and depth, ids right, all alive, none dead."""
    tree = make_tree(max_nodes=max_nodes, max_depth=5)
    for leaves, depth, inside in life:
        for node in tree.take(leaves):
            tree.attach(node, chances(absolute(tree, node)))
        tokens, at = [], tree.root
        while at.children and len(tokens) < depth:
            at = next(iter(at.children.values()))
            tokens.append(at.token_id)
        if not inside or not tokens:
            tokens.append(99)
        length = tree.committed_length
        assert tree.commit(tokens) == (inside and 99 not in tokens)
        assert tree.committed_length == length + len(tokens)
        seen = {tree.root.id}
        for node in tree.nodes():
            assert node.parent is not None
            assert node.parent.id in seen
            assert node.alive
            assert node.id == node_id(node.parent.id, node.token_id)
            assert node.position == node.parent.position + 1
            assert node.position - tree.root.position <= 5
            seen.add(node.id)
        assert len(seen) == len(tree) + 1 <= max_nodes + 1
