"""Shapes of living trees: levels as SpecInfer's and MCSD's, displacement in full trees, budgets, calibration."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.calibration import Calibration
from graftree.config import SpeculatorConfig, load
from graftree.errors import ConfigError
from speculator_service import shapes
from speculator_service.drafters.base import Candidate
from speculator_service.living_tree import LivingTree, Node
from speculator_service.shapes import BEST_FIRST, Shape
from tests import test_speculator_living_tree as living_tree


def make_tree(shape: Shape, **limits: int) -> LivingTree:
    return living_tree.make_tree(**{"max_nodes": 64, "max_depth": 16, "vocab_size": 1000, **limits}, shape=shape)


def candidates(node: Node, width: int = 5) -> list[Candidate]:
    """A fixed model whose answer depends on the node alone."""
    lots = random.Random(node.id)
    weights = sorted((lots.random() ** 2 + 1e-3 for _ in range(width)), reverse=True)
    tokens = lots.sample(range(1000), width)
    return [
        Candidate(token, math.log(0.9 * weight / sum(weights))) for token, weight in zip(tokens, weights, strict=True)
    ]


def grow(tree: LivingTree, limit: int = 4) -> None:
    while not tree.complete:
        for node in tree.take(limit):
            tree.attach(node, candidates(node))


def widths_of(tree: LivingTree) -> list[int]:
    """Nodes per level."""
    levels = [0] * 17
    for node in tree.nodes():
        levels[tree.depth(node)] += 1
    return [count for count in levels if count]


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [
        ("static", [1, 1, 3, 3, 3, 3, 3, 3]),
        ("static:2,2,1", [2, 4, 4]),
        ("static:1,1,5,1,1,1,1,1", [1, 1, 5, 5, 5, 5, 5, 5]),
        ("cartesian", [4, 8, 16, 16]),
        ("cartesian:3,2", [3, 6]),
    ],
)
def test_levels_are_full_products(spec: str, nodes: list[int]) -> None:
    """<k1, ..., km>: k_i best children for every node of level i - 1, whatever their chances, and nothing below."""
    tree = make_tree(shapes.parse(spec))
    grow(tree)
    assert widths_of(tree) == nodes
    for node in (tree.root, *tree.nodes()):
        best = [candidate.token_id for candidate in candidates(node)[: len(node.children)]]
        assert list(node.children) == best


def test_levels_keep_the_limits() -> None:
    """Budget, depth and last position cut the shape, level by level."""
    tree = make_tree(shapes.parse("static:2,2,2,2"), max_nodes=9)
    grow(tree)
    assert widths_of(tree) == [2, 4, 3]
    tree = make_tree(shapes.parse("static:2,2,2,2"), max_depth=2)
    grow(tree)
    assert widths_of(tree) == [2, 4]
    tree = make_tree(shapes.parse("static:2,2,2,2"), max_position=11)
    grow(tree)
    assert widths_of(tree) == [2]


def test_a_level_is_one_step() -> None:
    """All leaves of a level are offered at once, and the next level only when they are through."""
    tree = make_tree(shapes.parse("static:3,2,1"))
    for expected in (1, 3, 6):
        taken = tree.take(100)
        assert len(taken) == expected
        for node in taken:
            tree.attach(node, candidates(node))
    assert tree.complete


def test_levels_are_rebuilt_behind_a_commit() -> None:
    """The levels count from the new root: what is too wide there goes, what is too narrow is filled from offers that
    were left over, without asking the drafter again; what fits stays."""
    tree = make_tree(shapes.parse("static:1,3,1,2"))
    grow(tree)
    tree.unsent()
    first = next(iter(tree.root.children.values()))
    kept = next(iter(first.children.values()))
    expanded = {node.id for node in tree.nodes() if node.expanded}
    assert tree.commit([first.token_id])
    assert list(tree.root.children.values()) == [kept]
    assert [child.token_id for child in kept.children.values()] == [offer.token_id for offer in candidates(kept)[:3]]
    while not tree.complete:
        for node in tree.take(8):
            assert node.id not in expanded
            tree.attach(node, candidates(node))
    assert widths_of(tree) == [1, 3, 3, 6]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["static", "static:2,2,1", "static:1,4,1,3", "cartesian:3,2,1", "best_first"]),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans(), st.integers(0, 40)), max_size=12),
    st.integers(1, 40),
)
def test_invariants_hold_through_any_life(
    spec: str, life: Sequence[tuple[int, int, bool, int]], max_nodes: int
) -> None:
    """Whatever is grown, committed and budgeted: within budget, parents first, no node sent twice while the receiver
    holds it below the same root, and the receiver never holds more than twice max_nodes."""
    tree = make_tree(shapes.parse(spec), max_nodes=max_nodes)
    known: dict[int, int] = {}  # what the receiver holds below the root: id -> parent's id
    for limit, depth, inside, budget in life:
        before = len(tree)
        for node in tree.take(limit):
            tree.attach(node, candidates(node))
        assert len(tree) <= max(tree.budget, before)
        for node in tree.unsent():
            assert node.parent is not None
            assert node.parent is tree.root or node.parent.id in known
            known[node.id] = node.parent.id
        assert len(known) <= 2 * max_nodes
        tokens, at = [], tree.root
        while at.children and len(tokens) < depth:
            at = random.Random(len(tokens)).choice(list(at.children.values()))
            tokens.append(at.token_id)
        if not inside or not tokens:
            tokens.append(999)
        tree.commit(tokens, budget)
        known = {node: parent for node, parent in known.items() if below(node, tree.root.id, known)}
        ids = {tree.root.id}
        for node in tree.nodes():
            assert node.parent is not None
            assert node.parent.id in ids
            assert node.alive
            assert node.parent.children[node.token_id] is node
            ids.add(node.id)


def below(node: int, root: int, parents: dict[int, int]) -> bool:
    while node in parents:
        node = parents[node]
        if node == root:
            return True
    return False


def test_a_better_candidate_displaces_the_worst_leaf_of_a_full_tree() -> None:
    """A chain that goes on takes the places of improbable leaves, one by one, until the tree is that chain."""
    tree = make_tree(BEST_FIRST, max_nodes=8)
    tree.attach(tree.take(1)[0], [Candidate(1, math.log(0.4)), *(Candidate(i, math.log(0.14)) for i in (2, 3, 4, 5))])
    weak = list(tree.root.children.values())[1:]
    assert len(weak) == 4
    node = tree.root.children[1]
    for token in range(11, 18):
        assert tree.take(1) == [node]
        tree.attach(node, [Candidate(token, math.log(0.99))])
        node = node.children[token]
    assert [n.token_id for n in tree.nodes()] == [1, *range(11, 18)]
    assert not any(n.alive for n in weak)
    assert tree.complete


def test_displaced_candidates_come_back() -> None:
    """Where a commit has made room that nothing better takes, a node that was displaced enters and is sent again."""
    tree = make_tree(BEST_FIRST, max_nodes=8)
    tree.attach(tree.take(1)[0], [Candidate(1, math.log(0.99))])
    tree.attach(tree.take(1)[0], [Candidate(2, math.log(0.5)), *(Candidate(i, math.log(0.13)) for i in (3, 4, 5, 6))])
    first = tree.root.children[1]
    assert len(first.children) == 5
    tree.unsent()
    for token in range(11, 16):
        (node,) = tree.take(1)
        tree.attach(node, [Candidate(token, math.log(0.99))])
    assert len(first.children) == 2
    tree.unsent()
    tree.commit([1])
    for node in tree.take(1):
        tree.attach(node, [])
    while not tree.complete:
        for node in tree.take(8):
            tree.attach(node, [])
    assert len(tree) == 8
    assert len(first.children) == 3
    assert {node.token_id for node in tree.unsent()} < {3, 4, 5, 6}


def test_a_budget_may_change_with_every_commit() -> None:
    """A smaller budget keeps what is there and adds nothing; 0 is the one of the opening; more is never granted."""
    tree = make_tree(BEST_FIRST, max_nodes=20)
    grow(tree)
    child = max(tree.root.children.values(), key=lambda node: len(node.children))
    tree.commit([child.token_id], 2)
    size = len(tree)
    grow(tree)
    assert len(tree) == max(size, 2)
    tree.commit([999], 2)
    grow(tree)
    assert len(tree) == 2
    tree.commit([999], 500)
    assert tree.budget == 20
    tree.commit([999], 0)
    assert tree.budget == 20


def test_what_was_committed_teaches_the_calibration() -> None:
    """A drafter that is never right soon grows next to nothing; its offers are still held against the outcome, so
    that it grows again when it is right; and other sessions begin with what was learnt."""
    prior, tree = Calibration(), make_tree(BEST_FIRST, max_nodes=16)
    tree.calibrate(prior)

    def draft() -> int:
        while not tree.complete:
            for node in tree.take(4):
                tree.attach(node, [Candidate(5, math.log(0.9))])
        return len(tree)

    def rounds(count: int, picked: int) -> None:
        for _ in range(count):
            draft()
            tree.commit([picked])

    assert draft() == 16
    rounds(60, 6)
    assert draft() <= 1
    tree.commit([6])
    assert prior.chance(1, 0.9) < 0.2
    assert prior.observations > 0
    rounds(40, 5)
    assert tree.calibration.chance(1, 0.9) > 0.5


@pytest.mark.parametrize(
    "spec", ["static:", "static:0", "static:1,,2", "static:1,100", "tall", "best_first:3", "static:x"]
)
def test_bad_shapes_are_named(spec: str) -> None:
    """A malformed shape is refused under the key `tree`."""
    with pytest.raises(ConfigError, match="tree"):
        shapes.parse(spec)


def test_the_configuration_names_its_key() -> None:
    """Flag and variable; what is no shape is refused under the name the user wrote."""
    assert load(SpeculatorConfig, ["--tree", "static:1,2"], {}).tree == "static:1,2"
    assert load(SpeculatorConfig, [], {"GRAFTREE_TREE": "cartesian"}).tree == "cartesian"
    assert load(SpeculatorConfig, [], {}).tree == "best_first"
    with pytest.raises(ConfigError, match="GRAFTREE_TREE"):
        load(SpeculatorConfig, [], {"GRAFTREE_TREE": "bushy"})
    for spec in ("static:a", "static:0", "static:", "static:-1", "bestfirst"):
        with pytest.raises(ConfigError, match=r"--tree=.*: best_first, .* 1 to 128 numbers from 1 to 64, separated"):
            load(SpeculatorConfig, ["--tree", spec], {})
