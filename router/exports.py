"""The router's metrics. What vLLM has too is called as there, behind the prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import TYPE_CHECKING

from graftree.observe.exports import Export, Reading, counters_of
from router.metrics import Metrics, Outcome

if TYPE_CHECKING:
    from router.pod import RouterPod

# Exported under the names vLLM gives them.
_AS_VLLM = ("drafts", "draft_tokens", "accepted_tokens", "delivered_tokens", "prompt_tokens")


_STATES = ("ready", "connecting", "draining", "quarantined", "refused")


def _vllm(name: str, help_: str, field: str, kind: str = "counter") -> Export[RouterPod]:
    def read(pod: RouterPod) -> Reading:
        value: Reading = getattr(pod.metrics, field)
        return value

    return Export(f"graftree_{name}", "histogram" if kind == "histogram" else "counter", help_, read)


def _gauge(name: str, help_: str, read: Callable[[RouterPod], float]) -> Export[RouterPod]:
    return Export(f"graftree_{name}", "gauge", help_, read)


def _counter(name: str, help_: str, read: Callable[[RouterPod], float]) -> Export[RouterPod]:
    return Export(f"graftree_{name}_total", "counter", help_, read)


def _pods(pod: RouterPod) -> dict[tuple[str, ...], float]:
    # Every state is there, so that an alert on none being ready has something to compare; "refused: why" is one.
    found: dict[tuple[str, ...], float] = dict.fromkeys(product(("verifier", "speculator"), _STATES), 0.0)
    for info in pod.pods.infos():
        found[info.tier, info.state.partition(":")[0]] += 1
    return found


def _by_outcome(values: Mapping[Outcome, float]) -> dict[tuple[str, ...], float]:
    return {(str(outcome),): value for outcome, value in values.items()}


EXPORTS: list[Export[RouterPod]] = [
    # Speculation.
    _vllm("spec_decode_num_drafts_total", "Verify steps with draft tokens.", "drafts"),
    _vllm("spec_decode_num_draft_tokens_total", "Draft tokens verified.", "draft_tokens"),
    _vllm("spec_decode_num_accepted_tokens_total", "Draft tokens accepted and delivered.", "accepted_tokens"),
    Export(
        "graftree_spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft tokens accepted and delivered, by depth in the tree; position 0 is a child of the root.",
        lambda pod: {(str(depth),): n for depth, n in enumerate(pod.metrics.accepted_per_position)},
        labels=("position",),
    ),
    # Requests.
    _gauge("num_requests_running", "Requests with a verifier.", lambda pod: pod.generations.running),
    _gauge("num_requests_waiting", "Requests without one so far.", lambda pod: pod.generations.waiting),
    _vllm("prompt_tokens_total", "Prompt tokens of sessions that began.", "prompt_tokens"),
    _vllm("generation_tokens_total", "Tokens sent to clients.", "delivered_tokens"),
    _vllm("time_to_first_token_seconds", "From a request's arrival to its first token.", "ttft", "histogram"),
    _vllm(
        "inter_token_latency_seconds",
        "Between a token and the next one; tokens that leave together are 0 apart.",
        "itl",
        "histogram",
    ),
    _vllm("e2e_request_latency_seconds", "From a request's arrival to its end.", "latency", "histogram"),
    Export(
        "graftree_request_success_total",
        "counter",
        "Samples that ended with stop or length; requests that ended with abort or error.",
        lambda pod: {(reason,): count for reason, count in pod.metrics.finish_reasons.items()},
        labels=("finished_reason",),
    ),
    _gauge("router_tree_budget", "Nodes of a verify step, of late.", lambda pod: pod.metrics.budget),
    # Rounds, pods, commits.
    *counters_of("graftree_router", Metrics, lambda pod: pod.metrics, leave_out=(*_AS_VLLM, "rounds")),
    Export(
        "graftree_router_rounds_total",
        "counter",
        "Verify steps by what became of their speculation: first, plain, alone, late, empty, rejected, accepted.",
        lambda pod: _by_outcome(pod.metrics.outcomes),
        labels=("outcome",),
    ),
    Export(
        "graftree_router_round_seconds_total",
        "counter",
        "Time of rounds from verdict to verdict, those with a prefill left out, by outcome.",
        lambda pod: _by_outcome(pod.metrics.round_seconds),
        labels=("outcome",),
    ),
    Export(
        "graftree_router_round_tokens_total",
        "counter",
        "Tokens delivered by these rounds; tokens over seconds, with a tree and without, is what speculation gains.",
        lambda pod: _by_outcome(pod.metrics.round_tokens),
        labels=("outcome",),
    ),
    Export(
        "graftree_router_errors_total",
        "counter",
        "Calls answered with an error, by its reason.",
        lambda pod: {(reason,): count for reason, count in pod.metrics.errors.items()},
        labels=("reason",),
    ),
    Export(
        "graftree_router_pods",
        "gauge",
        "Pods that this router knows, by tier and state.",
        _pods,
        labels=("tier", "state"),
    ),
    Export(
        "graftree_router_commit_seconds",
        "histogram",
        "From a commit's start to its answer, as rounds wait for it.",
        lambda pod: pod.metrics.commit_seconds,
    ),
    Export(
        "graftree_router_draft_seconds",
        "histogram",
        "From a commit to the first nodes that a speculator grew from it.",
        lambda pod: pod.metrics.draft_seconds,
    ),
    _gauge("redis_up", "1 while sessions are durable.", lambda pod: not pod.committer.degraded),
    _gauge(
        "router_unsaved_tokens", "Tokens that Redis has not acknowledged.", lambda pod: pod.committer.unsaved_tokens
    ),
    Export(
        "graftree_router_commits_total",
        "counter",
        "Commits by how they were answered: durable, or degraded while Redis is away.",
        lambda pod: {
            ("durable",): pod.committer.commits_durable,
            ("degraded",): pod.committer.commits_degraded,
        },
        labels=("durability",),
    ),
    _counter(
        "router_commit_conflicts",
        "Sessions that another owner had taken when they were to be written.",
        lambda pod: pod.committer.sessions_lost,
    ),
    _counter(
        "router_commit_round_trips",
        "Round trips of many commits each.",
        lambda pod: pod.committer.round_trips,
    ),
    _counter(
        "router_sessions_restored",
        "Records written again because Redis had lost them.",
        lambda pod: pod.committer.sessions_restored,
    ),
    _counter(
        "router_sessions_dropped",
        "Finished sessions given up unwritten, for want of room.",
        lambda pod: pod.committer.sessions_dropped,
    ),
    _counter(
        "router_key_reload_failures",
        "Times that a replaced file of API keys could not be read; the one before stays in force.",
        lambda pod: pod.edge.keys.files.failures if pod.edge.keys is not None else 0,
    ),
    # Scaling.
    _gauge(
        "router_drafts_demanded_per_second",
        "Rounds whose request wants a tree, per second of the last half minute.",
        lambda pod: pod.signals.now().demanded_per_second,
    ),
    _gauge(
        "router_drafts_short_ratio",
        "Share of them whose tree was missing, late, or cut because of load.",
        lambda pod: pod.signals.now().short_share,
    ),
    _gauge(
        "router_marginal_tokens_per_second",
        "What one more speculator would add (router/signals.py).",
        lambda pod: pod.signals.now().marginal_tokens_per_second,
    ),
    _gauge(
        "router_queue_age_seconds",
        "Age of the oldest request without a verifier; 0 without one.",
        lambda pod: pod.generations.queue_age_seconds,
    ),
    _gauge("router_max_requests", "Requests served at once, at most.", lambda pod: pod.config.max_requests),
]
