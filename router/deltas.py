"""`check_delta`: what arrives from a speculator is validated before anything is made of it."""

from __future__ import annotations

import math

from graftree.codec import check_proposals
from graftree.errors import InvalidTree
from graftree.v1.speculation_pb2 import TreeDelta


def check_delta(delta: TreeDelta, *, vocab_size: int, max_nodes: int, with_proposals: bool) -> None:
    """Check what needs no tree to be checked.

    Args:
        vocab_size: token ids at or above it are garbage.
        max_nodes: most nodes of a delta.
        with_proposals: whether what children were drawn from may come.

    Raises:
        InvalidTree: names the field, the value and the limit of the first violation.
    """
    count = len(delta.token_ids)
    for name in ("parent_ids", "log_probs"):
        if len(getattr(delta, name)) != count:
            raise InvalidTree(f"delta.{name}", len(getattr(delta, name)), f"one entry per node, {count}")
    if count > max_nodes:
        raise InvalidTree("delta.token_ids", count, f"at most {max_nodes} nodes")
    for token, log_prob in zip(delta.token_ids, delta.log_probs, strict=True):
        if token >= vocab_size:
            raise InvalidTree("delta.token_ids", token, f"0 <= token < {vocab_size}")
        if not math.isfinite(log_prob) or log_prob > 1e-6:
            raise InvalidTree("delta.log_probs", log_prob, "finite and <= 0")
    if len(set(zip(delta.parent_ids, delta.token_ids, strict=True))) != count:
        raise InvalidTree("delta.token_ids", count, "siblings carry different tokens")
    most = max_nodes + 1 if with_proposals else 0
    if len(delta.proposals) > most:
        raise InvalidTree("delta.proposals", len(delta.proposals), f"at most {most} in this mode")
    for entry in delta.proposals:
        check_proposals(entry.proposals, vocab_size=vocab_size)
