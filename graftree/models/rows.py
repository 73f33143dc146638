"""`Rows`: one sequence's share of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels import chain_masks


@dataclass(frozen=True)
class Rows:
    """One sequence's share of a step.

    Attributes:
        blocks: the sequence's KV blocks, enough for context_len + tree_len + len(token_ids) rows.
        context_len: committed rows in the cache; row r holds position r.
        tree_len: tree rows in the cache from earlier steps; this step's rows follow them.
        token_ids, positions: (n,) this step's rows. A row's position is context_len + its depth, where depth =
            the number of its ancestors among the tree rows.
        masks: (n,) ancestors of each row as bit sets over tree rows, its own bit (tree_len + i) included.
        logits: indices of the rows whose logits are wanted.
    """

    blocks: Sequence[int]
    context_len: int
    tree_len: int
    token_ids: Sequence[int]
    positions: Sequence[int]
    masks: Sequence[int]
    logits: Sequence[int]


def chain_rows(
    blocks: Sequence[int], context_len: int, token_ids: Sequence[int], *, logits: Sequence[int] = ()
) -> Rows:
    """A prefill chunk: `token_ids` one after another behind the context, with nothing beside them."""
    count = len(token_ids)
    return Rows(
        blocks=blocks,
        context_len=context_len,
        tree_len=0,
        token_ids=token_ids,
        positions=range(context_len, context_len + count),
        masks=chain_masks(count),
        logits=logits,
    )
