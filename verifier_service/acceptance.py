"""Target-only acceptance: which of the guessed tokens the LLM says itself.

At each node u the LLM picks one token t(u), as plain decoding would there. The walk starts at the root and goes on
while a child carries t(u); every pick on it is emitted, the last one is the bonus token. Guesses decide how far the
walk gets, never what it says.

At temperature 0 this is VerifyGreedy of SpecInfer (ASPLOS'24, section 4.3). Above, the argmax is over
log p + noise that depends on (seed, position, token) alone: "drafter-invariant speculative decoding" (Daliri, Musco,
Suresh, arXiv 2408.07978), on a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from graftree.errors import GraftreeError
from graftree.sampling import SamplingContext, SamplingParams, choose
from graftree.tree import TokenTree

ROOT = -1


@dataclass(frozen=True)
class Acceptance:
    """What one verify step says.

    Attributes:
        token_ids: (A + 1,) accepted draft tokens in order, then the bonus token.
        nodes: (A,) the accepted nodes, the root's child first.
    """

    token_ids: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def visited(self) -> tuple[int, ...]:
        """(A + 1,) the node each token was picked at; `ROOT` first."""
        return (ROOT, *self.nodes)


def accept(
    tree: TokenTree,
    logits: Callable[[int], NDArray[Any]],
    params: SamplingParams,
    context: SamplingContext,
) -> Acceptance:
    """Walk the tree from its root.

    Args:
        tree: valid guesses below the last committed token.
        logits: node index or `ROOT` -> (V,) the LLM's logits there; asked for only along the walk.
        params: the session's.
        context: its committed tokens; not changed.

    Raises:
        GraftreeError: the LLM's logits at the root are not finite, or no token is left there.
    """
    children = tree.children()
    node, path, nodes = ROOT, list[int](), list[int]()
    while True:
        try:
            token = choose(logits(node), params, context, path)
        except GraftreeError:
            if not nodes:
                raise
            # What came before may end the request, and then plain decoding never asks here: the run ends with the
            # token that led here, and the error is the next step's, if there is one.
            return Acceptance(tuple(path), tuple(nodes[:-1]))
        path.append(token)
        child = children[node].get(token)
        if child is None:
            return Acceptance(tuple(path), tuple(nodes))
        nodes.append(child)
        node = child
