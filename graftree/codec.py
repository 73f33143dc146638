"""`TokenTree` and tree deltas to and from the wire. Decoding never validates: `TokenTree.validate` does."""

from __future__ import annotations

from graftree.tree import TokenTree
from graftree.v1 import common_pb2


def tree_to_proto(tree: TokenTree, *, log_probs: bool = True) -> common_pb2.TokenTree:
    """Encode; the verifier needs no log probabilities, so they can be left out towards it."""
    return common_pb2.TokenTree(
        root_id=tree.root_id,
        token_ids=tree.token_ids,
        parents=tree.parents,
        log_probs=tree.log_probs if log_probs else (),
    )


def tree_from_proto(message: common_pb2.TokenTree) -> TokenTree:
    """Decode. Absent log probabilities read as 0, which is what a tree that carries none means."""
    count = len(message.token_ids)
    return TokenTree(
        root_id=message.root_id,
        token_ids=tuple(message.token_ids),
        parents=tuple(message.parents),
        log_probs=tuple(message.log_probs) if message.log_probs else (0.0,) * count,
    )
