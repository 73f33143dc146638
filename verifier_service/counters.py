"""`Counters`: what a verifier has done since its start; vLLM's names where vLLM has one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Plain numbers that only the engine thread writes and anyone reads.

    Attributes:
        num_drafts: verify steps that had draft tokens.
        num_draft_tokens: draft tokens verified.
        num_accepted_tokens: of these, accepted.
        num_accepted_tokens_per_pos: accepted by depth, a child of the root first.
        steps: verify steps run, plain ones included.
        emitted_tokens: accepted and bonus tokens.
        stale_steps: steps that named another root; nothing was run.
        invalid_trees: trees that broke an invariant; their steps ran without them.
        dropped_steps: steps whose session was closed before they ran.
        forwards: model forwards.
        forward_ns: nanoseconds in them.
        rows: rows in them.
        prefill_rows: of these, rows of committed tokens before the root.
        loaded_rows: rows that were loaded from the KV Redis instead of being computed.
        shared_rows: rows that were taken from an open sibling instead of being computed.
        prefix_cache_queries, prefix_cache_hits: tokens before the root that sessions opened with, and of these
            those whose rows were in the pool already.
        preemptions: times a session lost its KV blocks to an older one.
        pool_faults: integrity checks of the KV pool that failed.
        sessions_opened, sessions_closed, sessions_failed: opened = closed + failed + open now.
        refused: opens and steps answered with a failure without a session of theirs.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    steps: int = 0
    emitted_tokens: int = 0
    stale_steps: int = 0
    invalid_trees: int = 0
    dropped_steps: int = 0
    forwards: int = 0
    forward_ns: int = 0
    rows: int = 0
    prefill_rows: int = 0
    loaded_rows: int = 0
    shared_rows: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    pool_faults: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    sessions_failed: int = 0
    refused: int = 0

    def count_step(self, drafted: int, accepted: int) -> None:
        """One verify step that accepted the first `accepted` levels of a tree of `drafted` nodes."""
        self.steps += 1
        self.emitted_tokens += accepted + 1
        if drafted:
            self.num_drafts += 1
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
        missing = accepted - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos.extend([0] * missing)
        for depth in range(accepted):
            self.num_accepted_tokens_per_pos[depth] += 1
