"""`StepProposals`: what the speculators proposed at the nodes of one step, for the rules that test draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from graftree.acceptance import ROOT, Rule, draw_proposals
from graftree.codec import check_proposals, distribution_from_proto
from graftree.errors import InvalidTree
from graftree.proposals import MAX_PER_NODE, Proposals, draft_salt
from graftree.sampling import SamplingParams
from graftree.tree import TokenTree, root_id
from graftree.v1 import common_pb2, verification_pb2

Offer = tuple[int, common_pb2.Proposals]  # the speculator's salt, its q and how many it drew


class StepProposals(Mapping[int, Sequence[Proposals]]):
    """Node index or `ROOT` -> the node's proposals in canonical order, drawn when a walk asks for them.

    Args:
        offers: by node of `tree`, checked.
        rule: the session's.
        params: the session's, with the seed.
        tree: the step's.
        committed_length: the absolute position behind the root.
    """

    def __init__(
        self,
        offers: Mapping[int, Sequence[Offer]],
        *,
        rule: Rule,
        params: SamplingParams,
        tree: TokenTree,
        committed_length: int,
    ) -> None:
        self._offers, self._rule, self._params = offers, rule, params
        self._tree, self._committed_length = tree, committed_length

    def __len__(self) -> int:
        return len(self._offers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._offers)

    def __getitem__(self, node: int) -> Sequence[Proposals]:
        offers = self._offers[node]
        path = self._tree.path(node)
        identifier, position = root_id(self._tree.root_id, path), self._committed_length + len(path)
        drawn: list[Proposals] = []
        for salt, message in offers:
            q, key = distribution_from_proto(message), draft_salt(salt, identifier)
            tokens = draw_proposals(self._rule, q, message.count, self._params, position, key)
            drawn.append(Proposals(q, tokens))
        return drawn


def check_offers(
    messages: Iterable[verification_pb2.VerifyStep.NodeProposals], *, nodes: int, vocab_size: int
) -> dict[int, list[Offer]]:
    """Offers by node of the tree as it was sent, in the order they came.

    Raises:
        InvalidTree: names the field, the value and the limit of the first violation.
    """
    offers: dict[int, list[Offer]] = {}
    for message in messages:
        node = message.node
        if not ROOT <= node < nodes:
            raise InvalidTree("proposals.node", node, f"-1 <= node < {nodes}")
        check_proposals(message.proposals, vocab_size=vocab_size)
        own = offers.setdefault(node, [])
        if len(own) == MAX_PER_NODE:
            raise InvalidTree("proposals.node", len(own) + 1, f"at most {MAX_PER_NODE} proposals per node")
        if any(salt == message.salt for salt, _ in own):
            # Two that share a salt share their draws, which the acceptance rules take for independent.
            raise InvalidTree("proposals.salt", node, "another salt for each proposal of a node")
        own.append((message.salt, message.proposals))
    return offers
