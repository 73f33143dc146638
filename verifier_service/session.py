"""`Session`: one sequence on this verifier, what is committed, what is cached, which step waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from graftree.acceptance import ROOT, Acceptance, Rule
from graftree.codec import tree_from_proto
from graftree.errors import ContextTooLong, InvalidArgument, InvalidTree
from graftree.grammar import Grammars
from graftree.models.runner import Rows
from graftree.models.spec import ModelSpec
from graftree.observe.tracing import NO_SPAN, Span
from graftree.sampling import GREEDY, SamplingContext, SamplingParams
from graftree.tree import MAX_TREE_NODES, TokenTree, node_id, root_id
from graftree.v1 import common_pb2, verification_pb2
from kernels import chain_masks
from verifier_service.proposals import Offer, StepProposals, check_offers

if TYPE_CHECKING:
    from verifier_service.kv_exchange import Load

MAX_ALTERNATIVES = 20
MAX_ID_LENGTH = 128
MAX_PRIORITY = 100

Answer: TypeAlias = verification_pb2.Verdict | common_pb2.SessionFailure


@dataclass(eq=False)
class Stream:
    """One router's connection: sessions are known by (stream, session id) and end with it.

    Attributes:
        sink: takes answers; called on the engine's thread and must not block.
    """

    sink: Callable[[Sequence[Answer]], None]
    sessions: dict[str, Session] = field(default_factory=dict)
    closed: bool = False


@dataclass
class Step:
    """A verify step that waits or runs.

    Attributes:
        number: the session's count, repeated in the verdict.
        tree: what runs: valid, cut to what the session and one forward can hold.
        kept: (N,) index in the tree as it was sent of each node of `tree`.
        proposals: what was proposed at root and nodes; none where the session's rule tests no draws.
        tree_error: why tree and proposals were left out; empty if they were not.
        arrived_ns: monotonic clock.
    """

    number: int
    tree: TokenTree
    kept: Sequence[int]
    proposals: StepProposals
    tree_error: str
    arrived_ns: int


@dataclass(eq=False)
class Session:
    """State of one session; only the engine's thread touches it.

    Invariant between forwards: the cache holds rows of token_ids[:cached], cached < len(token_ids). The last
    token is the root; its row is computed together with the tree behind it.
    """

    session_id: str
    stream: Stream
    rule: Rule
    params: SamplingParams
    context: SamplingContext
    token_ids: list[int]
    root_id: int
    max_length: int
    max_nodes: int
    log_probs: bool
    alternatives: int
    processed_log_probs: bool
    blocks: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)  # of its first full blocks; filled as they are needed
    tenant: str = ""  # whose it is: rows are shared among its own sessions only
    span: Span = NO_SPAN
    published: int = 0  # full blocks that other sessions may find
    cached: int = 0
    step: Step | None = None
    source: Session | None = None  # whose first `shared` rows this session waits for
    shared: int = 0
    load: Load | None = None  # what it waits for from the KV Redis
    offered: int = 0  # full blocks that the KV Redis was told of
    priority: int = 0
    arrival: int = 0  # counts the sessions that were given KV blocks
    parked: bool = False  # it was preempted: it has no blocks until there is room again

    @classmethod
    def open(
        cls, message: verification_pb2.VerifyOpen, stream: Stream, spec: ModelSpec, grammars: Grammars
    ) -> Session:
        """Check everything the message says.

        Args:
            grammars: of the model's vocabulary.

        Raises:
            InvalidArgument: names the field, the value and the limit.
            ContextTooLong: more tokens than the model's context or the session's own limit.
        """
        tokens, vocab_size, limit = list(message.token_ids), spec.vocab_size, message.max_length
        _check(
            "session_id", len(message.session_id), 0 < len(message.session_id) <= MAX_ID_LENGTH, "1 to 128 characters"
        )
        _check("token_ids", 0, bool(tokens), "at least one token")
        _check("tenant", len(message.tenant), len(message.tenant) <= MAX_ID_LENGTH, "at most 128 characters")
        if limit > spec.max_context:
            raise ContextTooLong("max_length", limit, f"the model's context is {spec.max_context} tokens")
        if len(tokens) >= limit:
            raise ContextTooLong(
                "token_ids", len(tokens), f"fewer than max_length {limit}: one token must fit behind"
            )
        if max(tokens) >= vocab_size:
            index = next(index for index, token in enumerate(tokens) if token >= vocab_size)
            raise InvalidArgument(f"token_ids[{index}]", tokens[index], f"token < {vocab_size}")
        prompt = message.prompt_tokens
        _check("priority", message.priority, abs(message.priority) <= MAX_PRIORITY, "-100 to 100")
        _check("prompt_tokens", prompt, prompt <= len(tokens), f"at most the {len(tokens)} token_ids")
        _check("max_nodes", message.max_nodes, message.max_nodes <= MAX_TREE_NODES, f"at most {MAX_TREE_NODES}")
        _check("alternatives", message.alternatives, message.alternatives <= MAX_ALTERNATIVES, "at most 20")
        params = SamplingParams.from_proto(message.sampling) if message.HasField("sampling") else GREEDY
        params.validate(vocab_size=vocab_size, token_count=spec.token_count)
        limit_words = "bad_words_token_ids: a verifier does not tokenize"
        _check("sampling.bad_words", len(params.bad_words), not params.bad_words, limit_words)
        mode = message.log_probs_mode
        _check("log_probs_mode", mode, mode in common_pb2.LogProbsMode.values(), "a known mode")
        rule = Rule.from_proto(message.mode).at(params)
        if not params.greedy and params.seed is None:
            raise InvalidArgument("sampling.seed", None, "set where temperature > 0: the router draws it")
        stops = {token for token in message.stop_token_ids if token < vocab_size}
        token_count = spec.token_count or vocab_size
        if message.min_new_tokens and not params.leaves_a_token(token_count, stops):
            raise InvalidArgument("stop_token_ids", len(stops), "min_new_tokens leaves at least one token to choose")
        constraint = None
        if message.HasField("structured_output"):
            constraint = grammars.constrain(
                message.structured_output, vocab_size=vocab_size, stop_token_ids=stops, output_ids=tokens[prompt:]
            )
        return cls(
            session_id=message.session_id,
            stream=stream,
            rule=rule,
            params=params,
            context=SamplingContext(
                tokens[:prompt],
                tokens[prompt:],
                vocab_size=vocab_size,
                min_new_tokens=message.min_new_tokens,
                stop_token_ids=stops,
                constraint=constraint,
                token_count=token_count,
            ),
            token_ids=tokens,
            root_id=root_id(message.salt, tokens),
            max_length=limit,
            max_nodes=message.max_nodes,
            log_probs=message.log_probs,
            alternatives=message.alternatives,
            tenant=message.tenant,
            priority=message.priority,
            processed_log_probs=mode == common_pb2.LOG_PROBS_MODE_PROCESSED,
        )

    @property
    def rank(self) -> tuple[int, int]:
        """Who comes first where KV is short: the lowest, so the highest priority, of equals the one there longest."""
        return -self.priority, self.arrival

    def rows_wanted(self, reserve: float) -> int:
        """Cache rows for text, tree and this share of what may still be generated; at 1 all it can ever need."""
        length = len(self.token_ids)
        return length + math.ceil(reserve * (self.max_length - length)) + self.max_nodes + 1

    def is_stale(self, message: verification_pb2.VerifyStep) -> bool:
        """Whether a step hangs on another root than the session's."""
        other_root = message.HasField("tree") and message.tree.root_id != self.root_id
        return other_root or message.committed_length != len(self.token_ids)

    def queue(self, message: verification_pb2.VerifyStep, *, vocab_size: int, max_rows: int, now_ns: int) -> None:
        """Take a step that is not stale. A tree that breaks an invariant is left out, and the step says why.

        Args:
            message: the step.
            vocab_size: the LLM's.
            max_rows: most rows of one forward.
            now_ns: monotonic clock.
        """
        length, offers, error = len(self.token_ids), dict[int, list[Offer]](), ""
        tree = tree_from_proto(message.tree) if message.HasField("tree") else TokenTree(self.root_id)
        try:
            tree.validate(vocab_size=vocab_size, max_nodes=self.max_nodes)
            if self.rule.tests_draws:
                offers = check_offers(message.proposals, nodes=len(tree), vocab_size=vocab_size)
        except InvalidTree as invalid:
            tree, error = TokenTree(self.root_id), str(invalid)
        # Deeper nodes could only yield tokens at or behind max_length; the last place is the bonus token's.
        tree, kept = _cut(tree, max_depth=self.max_length - length - 1, max_nodes=max_rows - 1)
        # A node that was cut takes its own proposals along; its parent keeps the draw that led to it.
        offers = {new: offers[old] for new, old in (*enumerate(kept), (ROOT, ROOT)) if old in offers}
        proposals = StepProposals(offers, rule=self.rule, params=self.params, tree=tree, committed_length=length)
        self.step = Step(message.step, tree, kept, proposals, error, now_ns)

    def share(self, budget: int) -> Share | None:
        """The most that can be run for this session within `budget` rows.

        All of it with the waiting step's tree if that fits, else a prefill chunk. None: nothing to do, or not
        enough rows to begin.
        """
        if self.waits:
            return None
        missing = len(self.token_ids) - self.cached
        if self.step is not None and missing + len(self.step.tree) <= budget:
            return Share(self, missing, self.step)
        chunk = min(missing - 1, budget)
        return Share(self, chunk, None) if chunk > 0 else None

    def wait_for(self, source: Session) -> None:
        """Compute nothing until the rows of what both texts have in common are in `source`'s cache."""
        own, other = self.token_ids[:-1], source.token_ids
        differing = (index for index, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
        self.source, self.shared = source, next(differing, min(len(own), len(other)))

    @property
    def can_join(self) -> bool:
        """Whether the rows that were waited for are there."""
        return self.source is not None and self.source.cached >= self.shared

    @property
    def prefilled(self) -> bool:
        """Whether only the root is missing in the cache."""
        return self.cached == len(self.token_ids) - 1

    @property
    def waits(self) -> bool:
        """Whether nothing may be run for it now: its rows are about to come from elsewhere, or it has no blocks."""
        return self.source is not None or self.load is not None or self.parked

    @property
    def has_work(self) -> bool:
        """Whether there is anything to run: a step, or committed tokens before the root that are not cached."""
        return not self.waits and (self.step is not None or not self.prefilled)

    def commit(self, acceptance: Acceptance) -> None:
        """Append a step's tokens; the last one is the new root."""
        for token in acceptance.token_ids:
            self.root_id = node_id(self.root_id, token)
        self.token_ids.extend(acceptance.token_ids)
        self.context.extend(acceptance.token_ids)
        self.step = None


@dataclass(frozen=True)
class Share:
    """One session's part in a forward: a chain of committed tokens, and a step's tree behind the root.

    Attributes:
        session: whose.
        chain: committed tokens, from the first one that is not cached.
        step: the step that ends here; None for a prefill chunk, whose logits nobody needs.
    """

    session: Session
    chain: int
    step: Step | None

    def __len__(self) -> int:
        """Rows of the forward."""
        return self.chain + (len(self.step.tree) if self.step else 0)

    def rows(self) -> Rows:
        """What the runner is given: row `chain - 1` is the root, row `chain + i` is node i."""
        session, first = self.session, self.session.cached
        token_ids = session.token_ids[first : first + self.chain]
        positions = list(range(first, first + self.chain))
        masks = chain_masks(self.chain)
        if self.step is not None:
            tree, root = self.step.tree, self.chain - 1
            token_ids += tree.token_ids
            positions += [len(session.token_ids) - 1 + depth for depth in tree.depths]
            for index, parent in enumerate(tree.parents):
                masks.append(masks[root if parent < 0 else self.chain + parent] | 1 << (self.chain + index))
        return Rows(
            blocks=session.blocks,
            context_len=first,
            tree_len=0,
            token_ids=token_ids,
            positions=positions,
            masks=masks,
            logits=range(self.chain - 1, len(self)) if self.step is not None else (),
        )


def _cut(tree: TokenTree, *, max_depth: int, max_nodes: int) -> tuple[TokenTree, Sequence[int]]:
    """The tree's first `max_nodes` nodes that are at most `max_depth` deep, and their indices in it."""
    kept = [index for index, depth in enumerate(tree.depths) if depth <= max_depth][:max_nodes]
    if len(kept) == len(tree):
        return tree, range(len(tree))
    new = {old: index for index, old in enumerate(kept)} | {-1: -1}
    return (
        TokenTree(
            tree.root_id,
            tuple(tree.token_ids[old] for old in kept),
            tuple(new[tree.parents[old]] for old in kept),
            tuple(tree.log_probs[old] for old in kept),
        ),
        kept,
    )


def _check(field_name: str, value: object, holds: bool, limit: str) -> None:
    if not holds:
        raise InvalidArgument(field_name, value, limit)
