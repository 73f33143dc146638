"""`TokenTree` and `DraftDistribution` to and from the wire.

Decoding never validates: `TokenTree.validate` and `check_proposals` do.
"""

from __future__ import annotations

import math

from graftree.errors import InvalidTree
from graftree.proposals import MAX_DRAWS, MAX_SUPPORT, DraftDistribution
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


def proposals_to_proto(q: DraftDistribution, count: int) -> common_pb2.Proposals:
    """Encode q and how many draws were made from it; the draws follow from these."""
    return common_pb2.Proposals(ids=q.ids.tolist(), weights=q.weights.tolist(), count=count)


def distribution_from_proto(message: common_pb2.Proposals) -> DraftDistribution:
    """Decode q: the very numbers that were drawn from."""
    return DraftDistribution.of(list(message.ids), list(message.weights))


def check_proposals(message: common_pb2.Proposals, *, vocab_size: int) -> None:
    """Check what arrived from the network before anything is drawn from it or divides by it.

    Raises:
        InvalidTree: names the field, the value and the limit of the first violation.
    """
    ids, weights = list(message.ids), list(message.weights)
    if not 0 < len(ids) <= MAX_SUPPORT:
        raise InvalidTree("proposals.ids", len(ids), f"1 to {MAX_SUPPORT} tokens")
    if len(weights) != len(ids):
        raise InvalidTree("proposals.weights", len(weights), f"one per id, {len(ids)}")
    if max(ids) >= vocab_size:
        raise InvalidTree("proposals.ids", max(ids), f"0 <= id < {vocab_size}")
    if len(set(ids)) < len(ids):
        raise InvalidTree("proposals.ids", len(ids) - len(set(ids)), "no token twice")
    if not math.isfinite(sum(weights)) or min(weights) <= 0:
        raise InvalidTree("proposals.weights", min(weights), "finite and above 0")
    if not 0 < message.count <= MAX_DRAWS:
        raise InvalidTree("proposals.count", message.count, f"1 to {MAX_DRAWS} draws")
