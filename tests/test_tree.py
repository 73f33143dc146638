"""The token tree: content addresses and invariants (trials 13, 14, 15 at the level of the data structure)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftree.errors import InvalidTree
from graftree.tree import TokenTree, node_id, root_id


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 40) -> TokenTree:
    """Valid random trees: a random earlier parent for each node, siblings numbered apart."""
    count = draw(st.integers(0, max_nodes))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(count))
    tokens = tuple(sum(p == q for q in parents[:i]) for i, p in enumerate(parents))
    return TokenTree(7, tokens, parents, (-1.0,) * count)


@given(trees())
def test_node_ids_are_the_chain_over_the_path(tree: TokenTree) -> None:
    """A node's id depends on its path alone: the same chain that gives a root its id."""
    assert tree.node_ids() == [root_id(7, tree.path(i)) for i in range(len(tree))]
    assert len(set(tree.node_ids())) == len(tree)


@given(trees())
def test_depths_and_children_agree_with_parents(tree: TokenTree) -> None:
    """Depth is the path's length, and the child table holds each node exactly once, under its parent."""
    tree.validate(vocab_size=64)
    table = tree.children()
    for index, parent in enumerate(tree.parents):
        assert tree.depths[index] == len(tree.path(index))
        assert table[parent][tree.token_ids[index]] == index
    assert sum(map(len, table)) == len(tree)


def test_a_commit_moves_the_root_to_the_childs_id() -> None:
    """After a token is committed the new root's id is the old child's id: re-rooting needs no new names."""
    assert root_id(3, [1, 2, 3]) == node_id(root_id(3, [1, 2]), 3)


def test_hash_is_the_documented_function() -> None:
    """Golden values, so that a speculator in another language can be checked against them."""
    assert node_id(0, 0) == 0xAD53D5472392EDEC
    assert node_id(0, 1) == 0xBDBDF2EC8090B8F0
    assert root_id(42, [1, 2, 3]) == 0x548B06D24DA3AA6A


VALID: dict[str, Any] = {"root_id": 1, "token_ids": (1, 2), "parents": (-1, 0), "log_probs": (-0.1, -0.2)}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"parents": (-1, 1)}, "tree.parents[1]"),  # a cycle of one
        ({"parents": (1, -1)}, "tree.parents[0]"),  # parent after child
        ({"parents": (-1, 5)}, "tree.parents[1]"),  # missing parent
        ({"parents": (-1, -2)}, "tree.parents[1]"),
        ({"parents": (-1,)}, "tree.parents"),
        ({"parents": (-1, -1), "token_ids": (4, 4)}, "tree.token_ids[1]"),  # duplicate siblings
        ({"token_ids": (1, 64)}, "tree.token_ids[1]"),
        ({"token_ids": (-1, 2)}, "tree.token_ids[0]"),
        ({"log_probs": (math.nan, -1.0)}, "tree.log_probs[0]"),
        ({"log_probs": (-math.inf, -1.0)}, "tree.log_probs[0]"),
        ({"log_probs": (0.5, -1.0)}, "tree.log_probs[0]"),
        ({"token_ids": (1,) * 9, "parents": tuple(range(-1, 8)), "log_probs": (-1.0,) * 9}, "tree.token_ids"),
        ({"token_ids": (1,) * 5, "parents": tuple(range(-1, 4)), "log_probs": (-1.0,) * 5}, "tree.parents[4]"),
    ],
)
def test_each_broken_invariant_is_named(change: dict[str, Any], field: str) -> None:
    """Trial 14: every malformation is refused with the field that is wrong."""
    with pytest.raises(InvalidTree) as caught:
        TokenTree(**{**VALID, **change}).validate(vocab_size=64, max_nodes=8, max_depth=4)
    assert caught.value.field == field


def test_the_empty_tree_is_valid() -> None:
    """No nodes is plain decoding, not an error."""
    TokenTree(5).validate(vocab_size=1, max_nodes=0, max_depth=1)
