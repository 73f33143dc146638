"""The verifier's metrics of the KV Redis; none of them has a value where none is configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from graftree.observe.exports import Export

if TYPE_CHECKING:
    from verifier_service.kv_cache import KvCache
    from verifier_service.pod import VerifierPod

Value = float | Mapping[tuple[str, ...], float] | None


def _counter(name: str, words: str, read: Callable[[KvCache], Value], *labels: str) -> Export[VerifierPod]:
    return Export(f"graftree_kv_{name}_total", "counter", words, _of(read), labels=labels)


def _gauge(name: str, words: str, read: Callable[[KvCache], Value]) -> Export[VerifierPod]:
    return Export(f"graftree_kv_{name}", "gauge", words, _of(read))


def _of(read: Callable[[KvCache], Value]) -> Callable[[VerifierPod], Value]:
    return lambda pod: None if pod.kv_cache is None else read(pod.kv_cache)


def _by(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(str(name),): count for name, count in dict(counts).items()}


EXPORTS: list[Export[VerifierPod]] = [
    _gauge("redis_up", "1 while the KV Redis answers; without it everything is computed.", lambda kv: kv.link.up),
    _counter("redis_outages", "Times that the KV Redis went away.", lambda kv: kv.link.outages),
    _counter(
        "redis_emptied",
        "Times that its content was gone, and what open sessions need was written again.",
        lambda kv: kv.counters.emptied,
    ),
    _counter(
        "loads",
        "Sessions whose text was not wholly in the pool, by what became of the rest: loaded, part of it, miss, "
        "refused, late, failed, prefill or short (computing is quicker), away, left.",
        lambda kv: _by(kv.counters.loads),
        "outcome",
    ),
    _counter("blocks_looked_up", "Blocks that the KV Redis was asked for.", lambda kv: kv.counters.blocks_looked_up),
    _counter("blocks_loaded", "Blocks that sessions got from it.", lambda kv: kv.counters.blocks_loaded),
    _counter(
        "blocks_refused",
        "Blocks that came from it and were not used, by reason.",
        lambda kv: _by(kv.counters.refused),
        "reason",
    ),
    _counter("blocks_written", "Blocks that it took.", lambda kv: kv.counters.blocks_written),
    _counter("blocks_kept", "Blocks that it had when they were to be written.", lambda kv: kv.counters.blocks_kept),
    _counter(
        "blocks_dropped", "Blocks that were not written, by reason.", lambda kv: _by(kv.counters.dropped), "reason"
    ),
    _counter("bytes_loaded", "Bytes of loaded blocks.", lambda kv: kv.counters.bytes_loaded),
    _counter("bytes_written", "Bytes of written blocks.", lambda kv: kv.counters.bytes_written),
    _counter("load_seconds", "Time that sessions waited for blocks.", lambda kv: kv.counters.load_ns / 1e9),
    _counter("write_seconds", "Time of writing, in the background.", lambda kv: kv.counters.write_ns / 1e9),
    _gauge("blocks_waiting", "Blocks that wait to be written.", lambda kv: kv.writer.waiting),
    _gauge(
        "load_from_tokens",
        "Shortest text whose KV is loaded rather than computed, by what both take now.",
        lambda kv: kv.choice.break_even_tokens,
    ),
]
