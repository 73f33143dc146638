"""The speculator's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftree.observe.exports import Export, counters_of
from speculator_service.counters import Counters

if TYPE_CHECKING:
    from speculator_service.pod import SpeculatorPod


def _kv_usage(pod: SpeculatorPod) -> float:
    free, total = pod.drafter.blocks()
    return 1 - free / total if total else 0.0


EXPORTS: list[Export[SpeculatorPod]] = [
    *counters_of("graftree_speculator", Counters, lambda pod: pod.counters),
    Export("graftree_speculator_steps_total", "counter", "Calls of the drafter.", lambda pod: pod.engine.steps),
    Export(
        "graftree_speculator_leaves_expanded_total",
        "counter",
        "Tree nodes that were given children.",
        lambda pod: pod.engine.leaves_expanded,
    ),
    Export(
        "graftree_speculator_foreseen_tokens_total",
        "counter",
        "Committed tokens that this pod had sent as drafts before, in one piece from the root on.",
        lambda pod: pod.engine.foreseen,
    ),
    Export(
        "graftree_speculator_faults_total",
        "counter",
        "Sessions that the drafter failed, by kind.",
        lambda pod: {(kind,): count for kind, count in dict(pod.engine.faults).items()},
        labels=("kind",),
    ),
    Export(
        "graftree_speculator_drafting_seconds_total",
        "counter",
        "Time in the drafter; its rate is the share of time in which it is busy.",
        lambda pod: pod.engine.drafting_ns / 1e9,
    ),
    Export(
        "graftree_speculator_queue_seconds",
        "histogram",
        "From an open's or a commit's arrival to the first step for it.",
        lambda pod: pod.engine.waits,
    ),
    Export(
        "graftree_speculator_queue",
        "gauge",
        "Opens, commits and closes that wait for the drafter's step to end.",
        lambda pod: pod.engine.queued,
    ),
    Export(
        "graftree_speculator_kv_blocks",
        "gauge",
        "KV blocks in all; 0 where the drafter keeps none.",
        lambda pod: pod.drafter.blocks()[1],
    ),
    Export("graftree_speculator_kv_cache_usage_perc", "gauge", "KV blocks in use, 1 = all of them.", _kv_usage),
]
