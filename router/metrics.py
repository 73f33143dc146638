"""`Metrics`: what a router has counted since it started."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Metrics:
    """Plain counters; one event loop writes them.

    Attributes:
        rounds: verify steps answered.
        draft_tokens, accepted_tokens: as vLLM counts them, over all requests.
        delivered_tokens: tokens sent to clients.
        deltas: tree deltas merged.
        stale_nodes: nodes that arrived for a root that had moved on.
        late_deltas: deltas of sessions that were closed.
        late_verdicts: verdicts nobody waits for any more.
        draft_waits: steps that waited for a first delta; draft_wins of them got one.
        failovers: sessions opened again on a verifier after their first one failed them.
        stale_steps: steps that a verifier refused as stale.
        refused_trees: steps that ran without their tree because the verifier found it invalid.
        lost_speculators: speculators that ended a session of their own.
        quarantines: pods put to rest for what they sent.
        attached: requests that joined a generation already there.
        cancelled: requests whose last client left.
    """

    requests: int = 0
    refused: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    attached: int = 0
    resumed: int = 0
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    delivered_tokens: int = 0
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
    quarantines: int = 0
    commit_failures: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
