"""`Figures`: what one request cost and gained, told at its end. Only delivered tokens count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from graftree.v1.generation_pb2 import RequestTimings, SpeculationStats, Usage
from graftree.v1.verification_pb2 import Verdict


@dataclass
class Figures:
    """Counts of one request, with vLLM's names.

    Attributes:
        clock: nanoseconds, monotonic.
        arrived_ns: when the request came.
        restored_tokens: delivered ones that an earlier life of the request verified.
        draft_wait_ns: waiting for a first draft.
        branch_hits: steps below whose root a branch had survived.
        histogram, drafts: [n] steps with n draft tokens accepted, and verified.
    """

    clock: Callable[[], int]
    arrived_ns: int
    first_ns: int = 0
    last_ns: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    completion_tokens: int = 0
    restored_tokens: int = 0
    commit_ns: int = 0
    draft_wait_ns: int = 0
    branch_hits: int = 0
    histogram: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    verify: RequestTimings = field(default_factory=RequestTimings)

    def step(self, verdict: Verdict, *, drafted: int, delivered: int) -> int:
        """Count one verify step of which the first `delivered` tokens reach the client.

        Returns:
            Accepted draft tokens among them; the run's last token, the bonus token, is none.
        """
        accepted = min(delivered, len(verdict.accepted_nodes))
        self.steps += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.completion_tokens += delivered
        for histogram, count in ((self.histogram, accepted), (self.drafts, drafted)):
            histogram.extend([0] * (count + 1 - len(histogram)))
            histogram[count] += 1
        timings = verdict.timings
        self.verify.verify_queue_ns += timings.queue_ns
        self.verify.verify_forward_ns += timings.forward_ns
        self.verify.verify_sample_ns += timings.sample_ns
        self.verify.verify_total_ns += timings.total_ns
        return accepted

    def restore(self, tokens: int) -> None:
        """Count tokens that no step of this life gave."""
        self.completion_tokens += tokens
        self.restored_tokens += tokens

    def departed(self) -> None:
        """Tokens left for the client."""
        self.last_ns = self.clock()
        self.first_ns = self.first_ns or self.last_ns

    def usage(self, prompt_tokens: int) -> Usage:
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=self.completion_tokens)

    def speculation(self, *, stale_nodes: int, speculators: int) -> SpeculationStats:
        verified = self.completion_tokens - self.restored_tokens
        return SpeculationStats(
            num_spec_steps=self.steps,
            num_draft_tokens=self.draft_tokens,
            num_accepted_tokens=self.accepted_tokens,
            mean_acceptance_length=verified / self.steps if self.steps else 0.0,
            draft_acceptance_rate=self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0,
            acceptance_histogram=self.histogram,
            num_stale_nodes=stale_nodes,
            num_speculators=speculators,
            draft_histogram=self.drafts,
            num_branch_hits=self.branch_hits,
        )

    def timings(self) -> RequestTimings:
        timings = RequestTimings(
            ttft_ns=self.first_ns - self.arrived_ns,
            decode_ns=self.last_ns - self.first_ns,
            total_ns=self.clock() - self.arrived_ns,
            commit_ns=self.commit_ns,
            draft_wait_ns=self.draft_wait_ns,
        )
        timings.MergeFrom(self.verify)
        return timings
