"""`Metrics`: what a router has counted since it started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial

from graftree.observe.histogram import ITL_SECONDS, REQUEST_SECONDS, TTFT_SECONDS, Histogram
from router.ema import Mean


class Outcome(StrEnum):
    """What became of a round's speculation."""

    FIRST = "first"  # behind the prompt, or on another verifier: nobody can have drafted yet
    PLAIN = "plain"  # nobody wanted a tree
    ALONE = "alone"  # wanted, but no speculator has the session
    LATE = "late"  # nothing had come, and not all of them had answered, when the step was sent
    EMPTY = "empty"  # all had answered, and nothing they said was worth a row
    REJECTED = "rejected"  # a tree was verified and none of it accepted
    ACCEPTED = "accepted"  # at least one draft token was


@dataclass
class Metrics:
    """Plain counters; one event loop writes them.

    Attributes:
        requests: Generate calls that reached this router.
        refused: requests turned away because max_requests were under way.
        shed: requests turned away because their answers would have come too late.
        finished: requests answered to the end.
        failed: requests that ended with an error.
        cancelled: requests whose last client left.
        attached: requests that joined a generation already there.
        resumed: sessions taken over from an earlier life of their request.
        prompt_tokens: tokens of the prompts of sessions that began.
        draft_tokens_demanded: tree nodes that rounds had a use for, whether or not there were so many.
        rounds: verify steps answered.
        drafts: rounds with draft tokens.
        draft_tokens, accepted_tokens: as vLLM counts them, over all requests.
        accepted_per_position: [depth] draft tokens accepted, a child of the root first.
        delivered_tokens: tokens sent to clients.
        outcomes: rounds by what became of their speculation.
        round_seconds, round_tokens: time and delivered tokens of rounds without a prefill, by the same.
        offered_nodes: tree nodes considered for a verify step; draft_tokens of them were worth a row.
        budget: nodes of a step, on average over the latest ones that had any to choose from.
        dropped_speculators: speculators put to rest in a session because they did not pay for themselves.
        readmitted_speculators: of these, the ones that did again when they were tried later.
        moved_speculators: sessions that went on with a less busy speculator of the same kind.
        cut_rounds: rounds whose tree was made smaller because other sessions load the verifier.
        deltas: tree deltas merged.
        stale_nodes: nodes that arrived for a root that had moved on.
        late_deltas: deltas of sessions that were closed.
        late_verdicts: verdicts nobody waits for any more.
        draft_waits: steps that waited for a first delta.
        draft_wins: of these, the ones that got one.
        failovers: sessions opened again on a verifier after their first one failed them.
        stale_steps: steps that a verifier refused as stale.
        refused_trees: steps that ran without their tree because the verifier found it invalid.
        lost_speculators: speculators that ended a session of their own.
        unreachable: connections to pods that failed or broke.
        quarantines: pods put to rest for what they sent.
        commit_failures: commits that Redis refused; the answers were right all the same.
        finish_reasons: samples by how they ended: stop, length; and requests: abort, error.
        errors: Generate calls answered with an error, by its reason.
        ttft, itl, latency: seconds to the first token, between tokens, of the whole request.
        length_share: tokens of an answer over what its request allows, of late.
        commit_seconds: from a commit's start to its answer, as rounds wait for it.
        draft_seconds: from a commit to the first nodes a speculator grew from it.
    """

    requests: int = 0
    refused: int = 0
    shed: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    attached: int = 0
    resumed: int = 0
    prompt_tokens: int = 0
    draft_tokens_demanded: int = 0
    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    delivered_tokens: int = 0
    offered_nodes: int = 0
    budget: float = 0.0
    dropped_speculators: int = 0
    readmitted_speculators: int = 0
    moved_speculators: int = 0
    cut_rounds: int = 0
    deltas: int = 0
    stale_nodes: int = 0
    late_deltas: int = 0
    late_verdicts: int = 0
    draft_waits: int = 0
    draft_wins: int = 0
    failovers: int = 0
    stale_steps: int = 0
    refused_trees: int = 0
    lost_speculators: int = 0
    unreachable: int = 0
    quarantines: int = 0
    commit_failures: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    round_seconds: dict[Outcome, float] = field(default_factory=lambda: dict.fromkeys(Outcome, 0.0))
    round_tokens: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    finish_reasons: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )
    errors: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=partial(Histogram, TTFT_SECONDS))
    itl: Histogram = field(default_factory=partial(Histogram, ITL_SECONDS))
    latency: Histogram = field(default_factory=partial(Histogram, REQUEST_SECONDS))
    length_share: Mean = field(default_factory=partial(Mean, 0.05, 1.0))
    commit_seconds: Histogram = field(default_factory=partial(Histogram, ITL_SECONDS))
    draft_seconds: Histogram = field(default_factory=partial(Histogram, ITL_SECONDS))

    def count_round(
        self, *, drafted: int, accepted: int, delivered: int, without: Outcome, seconds: float | None = None
    ) -> None:
        """One verify step.

        Args:
            drafted: tree nodes verified.
            accepted: draft tokens accepted and delivered.
            delivered: these and, where the answer goes on, the bonus token.
            without: what a round is that has no tree.
            seconds: from the verdict before; None where that is not what a round takes.
        """
        self.rounds += 1
        self.delivered_tokens += delivered
        outcome = without
        if drafted:
            outcome = Outcome.ACCEPTED if accepted else Outcome.REJECTED
        self.outcomes[outcome] += 1
        if seconds is not None:
            self.round_seconds[outcome] += seconds
            self.round_tokens[outcome] += delivered
        if not drafted:
            return
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_per_position.extend([0] * (accepted - len(self.accepted_per_position)))
        for depth in range(accepted):
            self.accepted_per_position[depth] += 1

    def tokens_left(self, tokens: int, *, arrived_ns: int, before_ns: int, now_ns: int) -> None:
        """Tokens of one sample left for the client together, so all but the first came right behind another.

        Args:
            arrived_ns: when its request came.
            before_ns: when its last tokens left; 0 = these are the first.
        """
        if not tokens:
            return
        if before_ns:
            self.itl.observe((now_ns - before_ns) / 1e9)
        else:
            self.ttft.observe((now_ns - arrived_ns) / 1e9)
        if tokens > 1:
            self.itl.observe(0.0, tokens - 1)

    def as_dict(self) -> dict[str, int]:
        """The plain counters."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, int)}
