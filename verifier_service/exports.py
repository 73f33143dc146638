"""The verifier's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftree.observe.exports import Export, counters_of
from verifier_service import kv_exports
from verifier_service.counters import Counters

if TYPE_CHECKING:
    from verifier_service.pod import VerifierPod


def _kv_usage(pod: VerifierPod) -> float:
    pool = pod.runner.pool
    return 1 - pool.free_blocks / pool.num_blocks if pool.num_blocks else 0.0


def _accepted_per_position(pod: VerifierPod) -> dict[tuple[str, ...], float]:
    return {(str(depth),): count for depth, count in enumerate(list(pod.counters.num_accepted_tokens_per_pos))}


def _step_seconds(pod: VerifierPod) -> dict[tuple[str, ...], float]:
    latest = pod.step_times.latest
    return {} if latest is None else {(str(rows),): latest.seconds(rows) for rows in (1, 8, 32, 128)}


def _replayed(pod: VerifierPod) -> float:
    graphs = getattr(pod.runner, "graphs", None)
    return 0 if graphs is None else int(graphs.counts.replayed)


_APART = ("forward_ns", "prefix_cache_queries", "prefix_cache_hits")

EXPORTS: list[Export[VerifierPod]] = [
    *counters_of("graftree_verifier", Counters, lambda pod: pod.counters, leave_out=_APART),
    Export(
        "graftree_prefix_cache_queries_total",
        "counter",
        "Tokens before the root that sessions opened with.",
        lambda pod: pod.counters.prefix_cache_queries,
    ),
    Export(
        "graftree_prefix_cache_hits_total",
        "counter",
        "Of these, the ones whose KV rows were in the pool already.",
        lambda pod: pod.counters.prefix_cache_hits,
    ),
    Export(
        "graftree_verifier_accepted_tokens_per_pos_total",
        "counter",
        "Draft tokens accepted by depth in the tree; position 0 is a child of the root.",
        _accepted_per_position,
        labels=("position",),
    ),
    Export(
        "graftree_verifier_forward_seconds_total",
        "counter",
        "Time in model forwards; its rate is the share of time in which the model is busy.",
        lambda pod: pod.counters.forward_ns / 1e9,
    ),
    Export(
        "graftree_verifier_step_tokens",
        "gauge",
        "Most rows of one forward; rows over forwards, divided by this, is how full steps are.",
        lambda pod: pod.config.step_tokens,
    ),
    Export("graftree_kv_cache_usage_perc", "gauge", "KV blocks in use, 1 = all of them.", _kv_usage),
    Export(
        "graftree_verifier_step_seconds",
        "gauge",
        "What a step of so many rows takes, as routers are told; measured at the start, followed since.",
        _step_seconds,
        labels=("rows",),
    ),
    Export(
        "graftree_verifier_replayed_steps_total",
        "counter",
        "Forwards that were replayed from a CUDA graph; over forwards, the share that Python did not launch.",
        _replayed,
    ),
    Export("graftree_verifier_kv_blocks", "gauge", "KV blocks in all.", lambda pod: pod.runner.pool.num_blocks),
    Export(
        "graftree_verifier_sessions_ready",
        "gauge",
        "Sessions with something to run when the last forward was planned.",
        lambda pod: pod.scheduler.waiting,
    ),
    Export(
        "graftree_verifier_sessions_waiting",
        "gauge",
        "Of these, the ones that got no row in it.",
        lambda pod: pod.scheduler.left_out,
    ),
    *kv_exports.EXPORTS,
]
