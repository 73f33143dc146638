"""`Limits`: what a speculator pod takes, and the check of what a router sends against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graftree.acceptance import Rule
from graftree.errors import ContextTooLong, InvalidArgument
from graftree.proposals import MAX_DRAWS, MAX_SUPPORT
from graftree.sampling import SamplingParams
from graftree.tree import root_id
from graftree.v1 import speculation_pb2
from speculator_service.drafters.base import DraftSession
from speculator_service.drawing import WORTH_DRAWING, Drawing
from speculator_service.living_tree import LivingTree
from speculator_service.shapes import BEST_FIRST, Shape

MAX_SESSION_ID = 128  # characters


@dataclass(frozen=True)
class Limits:
    """Most sessions of the pod, nodes and depth of a tree, children of a node; and the drafter's own limits.

    Attributes:
        branching: most children of a node where the shape of trees leaves that open.
        vocab_size: tokens the drafter can draft; 0 = any.
        max_context: longest sequence the drafter looks at; 0 = any.
    """

    max_sessions: int
    max_nodes: int
    max_depth: int
    branching: int
    vocab_size: int = 0
    max_context: int = 0
    shape: Shape = BEST_FIRST

    @property
    def children(self) -> int:
        """Most children of a node."""
        return self.shape.children or self.branching

    def session(self, key: str, request: speculation_pb2.DraftOpen) -> DraftSession:
        """Check an open and take it over under the pod's own key.

        Raises:
            InvalidArgument: names the field, the value and the limit.
            ContextTooLong: more tokens than the drafter's context.
        """
        if not 1 <= len(request.session_id) <= MAX_SESSION_ID:
            raise InvalidArgument("session_id", len(request.session_id), f"1 to {MAX_SESSION_ID} characters")
        if not request.vocab_size:
            raise InvalidArgument("vocab_size", 0, "at least 1")
        if not request.token_ids:
            raise InvalidArgument("token_ids", 0, "at least one token")
        check_tokens(request.token_ids, request.vocab_size)
        length = len(request.token_ids)
        if request.prompt_tokens > length:
            raise InvalidArgument("prompt_tokens", request.prompt_tokens, f"at most the {length} tokens sent")
        if self.max_context and length > self.max_context:
            raise ContextTooLong("token_ids", length, f"at most the drafter's context of {self.max_context} tokens")
        sampling = SamplingParams.from_proto(request.sampling)
        sampling.validate(vocab_size=request.vocab_size)
        max_nodes = min(request.max_nodes or self.max_nodes, self.max_nodes)
        branching = self.children
        if Rule.from_proto(request.mode).at(sampling) is not Rule.TARGET_ONLY:
            if sampling.seed is None:
                raise InvalidArgument("sampling.seed", None, "set in the modes that draw")
            sampling, branching = replace(sampling, seed=None), MAX_SUPPORT
        return DraftSession(
            session_id=key,
            root_id=root_id(request.salt, request.token_ids),
            token_ids=tuple(request.token_ids),
            prompt_tokens=request.prompt_tokens,
            sampling=sampling,
            vocab_size=min(request.vocab_size, self.vocab_size or request.vocab_size),
            max_length=request.max_length,
            max_nodes=max_nodes,
            branching=branching,
            structured_output=request.structured_output if request.HasField("structured_output") else None,
            stop_token_ids=tuple(request.stop_token_ids),
        )

    def drawing(self, session: DraftSession, request: speculation_pb2.DraftOpen) -> Drawing | None:
        """How the session's children are drawn; None where they are the drafter's best."""
        params = SamplingParams.from_proto(request.sampling)
        rule = Rule.from_proto(request.mode).at(params)
        if rule is Rule.TARGET_ONLY:
            return None
        count = min(self.shape.children or min(self.branching, WORTH_DRAWING), session.max_nodes, MAX_DRAWS)
        return Drawing(rule, params, count, request.draft_salt, session.vocab_size)

    def tree(self, session: DraftSession, max_depth: int) -> LivingTree:
        """The session's tree, with its root alone; `max_depth` as the router asked, 0 = the pod's own."""
        # The last token whose children can be drafted is the last one of the drafter's context.
        beyond = self.max_context + 1 if self.max_context else session.max_length
        return LivingTree(
            session.root_id,
            len(session.token_ids),
            max_nodes=session.max_nodes,
            max_depth=min(max_depth or self.max_depth, self.max_depth),
            max_position=min(session.max_length, beyond),
            vocab_size=session.vocab_size,
            shape=self.shape,
        )


def check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument: a token id outside the vocabulary."""
    if max(token_ids) >= vocab_size:
        raise InvalidArgument("token_ids", max(token_ids), f"below the vocabulary size {vocab_size}")
