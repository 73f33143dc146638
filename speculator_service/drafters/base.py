"""`Drafter`: the extension point for guessing what the LLM will say.

A drafter is asked for children of leaves, many at once, and told what was committed. The engine owns the trees,
their budgets and their re-rooting; a drafter owns what it needs to answer quickly, e.g. a KV cache.

Your own, in a module that the speculator pod can import:

    from speculator_service.drafters.base import Candidate, Drafter

    class Parrot(Drafter):
        '''Says the same token again.'''

        def __init__(self, chance: str = "0.5") -> None:
            self.log_prob = math.log(float(chance))

        def expand(self, leaves):
            return [[Candidate(leaf.path[-1], self.log_prob)] if leaf.path else [] for leaf in leaves]

and then `python -m speculator_service --drafter 'mypackage.parrot:Parrot?chance=0.3'`: what follows the question
mark reaches the constructor as keyword arguments, all strings.

In the acceptance modes that draw (`graftree.acceptance`) the engine draws each node's children from the candidates,
in proportion to their chances: the more of them a drafter names, the better. No drafter needs to know the mode.

All methods run on one thread, one at a time. What a drafter raises or returns can cost its session's tree,
never the pod and never the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from graftree.errors import GraftreeError
from graftree.sampling import SamplingParams
from graftree.v1.common_pb2 import StructuredOutputParams


class Candidate(NamedTuple):
    """A guess for one position.

    Attributes:
        token_id: at or above the session's vocabulary size it is ignored.
        log_prob: natural logarithm of the chance that the LLM says this token, given that it says the leaf's
            path; finite and <= 0. It decides which paths grow and which are verified.
    """

    token_id: int
    log_prob: float


class Leaf(NamedTuple):
    """A node whose children are wanted.

    Attributes:
        session_id: the session, as given to `open`.
        node_id: content address of the node (`graftree.tree.node_id`), the same across commits.
        parent_id: content address of its parent; for the root its own.
        path: draft tokens from the root's child to this node; () = the root, i.e. the last committed token.
        position: absolute index of the children's position (0 = first prompt token).
    """

    session_id: str
    node_id: int
    parent_id: int
    path: tuple[int, ...]
    position: int


@dataclass(frozen=True)
class DraftSession:
    """What a drafter learns about a session.

    Attributes:
        session_id: unique within the pod.
        root_id: content address of the last of `token_ids`.
        token_ids: (L,) prompt and output committed so far, L >= 1.
        prompt_tokens: how many of these are prompt.
        sampling: the request's parameters. Where candidates are best ranked under the verifier's noise, the seed
            that keys it is set. In the modes that draw children from what the drafter says it is None: a
            distribution that knew the noise of its own draws would bias them.
        vocab_size: ids at or above this are never drafted.
        max_length: no token is drafted for a position at or beyond this.
        max_nodes: most nodes of the session's tree.
        branching: candidates beyond this many per leaf are not used. More than the children a node will have in
            the modes that draw them.
        structured_output: what the output will look like; None = anything.
        stop_token_ids: tokens that end the request; with `structured_output` only.
    """

    session_id: str
    root_id: int
    token_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    vocab_size: int
    max_length: int
    max_nodes: int
    branching: int
    structured_output: StructuredOutputParams | None = None
    stop_token_ids: tuple[int, ...] = ()


# What one leaf is answered with: its children, best first; None = not yet (work goes on, offer the leaf again);
# an error = give the session up.
Answer = Sequence[Candidate] | GraftreeError | None


class Drafter(ABC):
    """Guesses children of tree nodes for many sessions.

    Attributes:
        model_fingerprint: SHA-256 over the SSM's weights; "" without a model.
        vocab_fingerprint: SHA-256 over the token table; "" = works with any.
        llm_identity: of the LLM that its SSM was made for (`graftree.models.load.llm_identity`); "" = for any.
        vocab_size: tokens it can draft; 0 = any.
        max_context: longest sequence it can look at, in tokens; 0 = any. Longer sessions are refused, and nothing
            is drafted from beyond it.
        inline: `expand` takes microseconds: it runs on the event loop, which saves the way to the engine's thread.
    """

    model_fingerprint: str = ""
    vocab_fingerprint: str = ""
    llm_identity: str = ""
    vocab_size: int = 0
    max_context: int = 0
    inline: ClassVar[bool] = False

    def open(self, session: DraftSession) -> None:  # noqa: B027
        """A session begins. A `GraftreeError` raised here refuses it with that error."""

    @abstractmethod
    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        """Children for each leaf, in the leaves' order.

        Leaves of one session come best first, and each leaf's ancestors were expanded before it.
        """

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:  # noqa: B027
        """These tokens follow what was committed before. Paths of later leaves start behind them."""

    def close(self, session_id: str) -> None:  # noqa: B027
        """Forget the session. Called once for each session opened, also after a failure."""

    def shutdown(self) -> None:  # noqa: B027
        """The pod ends: release everything."""

    def blocks(self) -> tuple[int, int]:
        """KV blocks free and in all; (0, 0) without a KV pool."""
        return 0, 0
