"""`TokenTree`: many guessed continuations of one sequence, as a struct of arrays.

The root is the session's last committed token. It is not a node: a node's parent is -1 when it continues the
root directly. Nodes are content-addressed, so trees from several speculators merge, survive commits and go
stale by one rule:

    node_id = hash64(parent's node_id, token_id)

and a root's id is the same chain run over the committed tokens from a per-session salt (`root_id`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graftree.errors import InvalidTree
from graftree.noise import mix64
from graftree.tree_limits import MAX_TREE_DEPTH as MAX_TREE_DEPTH
from graftree.tree_limits import MAX_TREE_NODES as MAX_TREE_NODES

_MASK = (1 << 64) - 1
_TOKEN_GAMMA = 0xD1342543DE82EF95


def node_id(parent_id: int, token_id: int) -> int:
    """hash64(parent, token) = mix64(mix64(parent) + (token + 1) * 0xD1342543DE82EF95 mod 2**64)."""
    return mix64((mix64(parent_id) + (token_id + 1) * _TOKEN_GAMMA) & _MASK)


def root_id(salt: int, token_ids: Iterable[int]) -> int:
    """Id of the root after `token_ids` are committed: the node chain started at the session's salt."""
    identifier = salt & _MASK
    for token in token_ids:
        identifier = node_id(identifier, token)
    return identifier


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A token tree below a root.

    Invariants (`validate` checks them; everything from the network is validated before use):
      * parents come before children: -1 <= parents[i] < i;
      * siblings carry different tokens;
      * 0 <= token_ids[i] < vocab_size; log_probs[i] is finite and <= 0;
      * at most `max_nodes` nodes, at most `max_depth` deep (a child of the root has depth 1).

    Attributes:
        root_id: content address of the root, unsigned 64 bits.
        token_ids: (N,) draft tokens.
        parents: (N,) index of each node's parent, -1 for a child of the root.
        log_probs: (N,) the speculator's log probability of the token given its path, natural logarithm.
    """

    root_id: int
    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    _depths: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depths(self) -> Sequence[int]:
        """(N,) depth of each node; a child of the root has depth 1."""
        if len(self._depths) != len(self):
            self._depths.clear()
            for parent in self.parents:
                self._depths.append(1 if parent < 0 else self._depths[parent] + 1)
        return self._depths

    def node_ids(self) -> list[int]:
        """(N,) content address of each node."""
        ids: list[int] = []
        for token, parent in zip(self.token_ids, self.parents, strict=True):
            ids.append(node_id(self.root_id if parent < 0 else ids[parent], token))
        return ids

    def children(self) -> list[dict[int, int]]:
        """(N + 1,) token -> node index, for every node; the last entry is the root's."""
        table: list[dict[int, int]] = [{} for _ in range(len(self) + 1)]
        for index, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            table[parent][token] = index  # parent -1 lands on the last entry
        return table

    def path(self, index: int) -> list[int]:
        """Tokens from the root's child down to node `index`, inclusive."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.token_ids[index])
            index = self.parents[index]
        return tokens[::-1]

    def validate(self, *, vocab_size: int, max_nodes: int = MAX_TREE_NODES, max_depth: int = MAX_TREE_DEPTH) -> None:
        """Check every invariant.

        Raises:
            InvalidTree: names the field, the value and the limit of the first violation.
        """
        count = len(self.token_ids)
        if count > max_nodes:
            raise InvalidTree("tree.token_ids", count, f"at most {max_nodes} nodes")
        for name in ("parents", "log_probs"):
            if len(getattr(self, name)) != count:
                raise InvalidTree(f"tree.{name}", len(getattr(self, name)), f"one entry per node, {count}")
        seen: set[tuple[int, int]] = set()
        depths: list[int] = []
        for index, (token, parent, log_prob) in enumerate(
            zip(self.token_ids, self.parents, self.log_probs, strict=True)
        ):
            if not -1 <= parent < index:
                raise InvalidTree(f"tree.parents[{index}]", parent, f"-1 <= parent < {index}")
            if not 0 <= token < vocab_size:
                raise InvalidTree(f"tree.token_ids[{index}]", token, f"0 <= token < {vocab_size}")
            if not math.isfinite(log_prob) or log_prob > 1e-6:
                raise InvalidTree(f"tree.log_probs[{index}]", log_prob, "finite and <= 0")
            if (parent, token) in seen:
                raise InvalidTree(f"tree.token_ids[{index}]", token, "siblings carry different tokens")
            seen.add((parent, token))
            depths.append(1 if parent < 0 else depths[parent] + 1)
            if depths[index] > max_depth:
                raise InvalidTree(f"tree.parents[{index}]", depths[index], f"at most {max_depth} deep")
