"""`TreeCache`: one session's share of the SSM's KV cache, its context rows and behind them one row per tree node.

    row 0 ... context_len - 1      committed tokens, row r at position r
    then one per expanded node     in the order of their expansion

A commit inside the tree moves the rows it names to the end of the context and the surviving branch's rows behind
them; none is computed again. The root's own row is a context row: it is computed as the last of `pending`.
"""

from __future__ import annotations

from collections.abc import Sequence

from graftree.models.paged import BlockPool, PagedKV
from graftree.models.runner import Rows, chain_rows
from graftree.tree import node_id
from speculator_service.drafters.base import Leaf


class TreeCache:
    """Rows of one session.

    Args:
        pool: where blocks come from.
        kv: the cache itself.
        root_id: content address of the last committed token.
        token_ids: (L,) committed tokens.

    Attributes:
        pending: committed tokens without a row, in order; the tree has no rows before this is empty.
    """

    def __init__(self, pool: BlockPool, kv: PagedKV, root_id: int, token_ids: Sequence[int]) -> None:
        self._pool, self._kv = pool, kv
        self._blocks: list[int] = []
        self._context_len = 0
        self._root_id = root_id
        self.pending = list(token_ids)
        self._clear_tree()

    def _clear_tree(self) -> None:
        self._row_of: dict[int, int] = {}  # node id -> tree row
        self._ids: list[int] = []
        self._parents: list[int] = []  # tree row of the parent, -1 = root
        self._masks: list[int] = []

    @property
    def tree_len(self) -> int:
        """Tree rows in the cache."""
        return len(self._ids)

    def context_rows(self, limit: int) -> Rows:
        """The next chunk of `pending`, at most `limit` tokens, with the last token's logits if it ends it.

        Raises:
            ResourceExhausted: no blocks are free.
        """
        chunk = self.pending[:limit]
        self._reserve(self._context_len + len(chunk))
        last = [len(chunk) - 1] if len(chunk) == len(self.pending) else []
        return chain_rows(self._blocks, self._context_len, chunk, logits=last)

    def context_done(self, count: int) -> None:
        """`count` tokens of `pending` have their rows."""
        self._context_len += count
        del self.pending[:count]

    def tree_rows(self, leaves: Sequence[Leaf]) -> Rows:
        """Rows of leaves whose parents have theirs, with all their logits.

        Raises:
            ResourceExhausted: no blocks are free.
        """
        self._reserve(self._context_len + len(self._ids) + len(leaves))
        masks = []
        for index, leaf in enumerate(leaves):
            above = 0 if leaf.parent_id == self._root_id else self._masks[self._row_of[leaf.parent_id]]
            masks.append(above | 1 << (len(self._ids) + index))
        return Rows(
            blocks=self._blocks,
            context_len=self._context_len,
            tree_len=len(self._ids),
            token_ids=[leaf.path[-1] for leaf in leaves],
            positions=[leaf.position - 1 for leaf in leaves],
            masks=masks,
            logits=range(len(leaves)),
        )

    def tree_done(self, leaves: Sequence[Leaf], rows: Rows) -> None:
        """The rows that `tree_rows` gave for these leaves are in the cache."""
        for leaf, mask in zip(leaves, rows.masks, strict=True):
            self._row_of[leaf.node_id] = len(self._ids)
            self._parents.append(-1 if leaf.parent_id == self._root_id else self._row_of[leaf.parent_id])
            self._ids.append(leaf.node_id)
            self._masks.append(mask)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed: keep what has rows, queue what has none."""
        path: list[int] = []  # tree rows of the tokens, as far as they have any
        identifier = self._root_id
        for token in token_ids:
            identifier = node_id(identifier, token)
            row = self._row_of.get(identifier)
            if row is not None:
                path.append(row)
        # Ancestors are expanded before their descendants, so the rows found are those of the first tokens.
        self.pending.extend(token_ids[len(path) :])
        survivors = self._below(path[-1]) if len(path) == len(token_ids) else []
        moved = [*path, *survivors]
        start = self._context_len
        self._kv.move_rows(
            self._blocks, [start + row for row in moved], [start + index for index in range(len(moved))]
        )
        self._context_len += len(path)
        self._root_id = identifier
        self._renumber(survivors)

    def free(self) -> None:
        """Give the blocks back."""
        self._pool.free(self._blocks)
        self._blocks = []

    def _below(self, row: int) -> list[int]:
        bit = 1 << row
        return [other for other in range(row + 1, len(self._ids)) if self._masks[other] & bit]

    def _renumber(self, survivors: Sequence[int]) -> None:
        ids, parents = self._ids, self._parents
        self._clear_tree()
        new_row = {row: index for index, row in enumerate(survivors)}
        for index, row in enumerate(survivors):
            parent = new_row.get(parents[row], -1)
            self._row_of[ids[row]] = index
            self._ids.append(ids[row])
            self._parents.append(parent)
            self._masks.append((0 if parent < 0 else self._masks[parent]) | 1 << index)

    def _reserve(self, rows: int) -> None:
        missing = -(-rows // self._kv.block_size) - len(self._blocks)
        if missing > 0:
            self._blocks.extend(self._pool.allocate(missing))
