"""Metrics: histograms, exports, the HTTP endpoint, and what a whole stack says about a run."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from graftree import Client, LocalStack
from graftree.errors import ConfigError
from graftree.observe.endpoint import MetricsEndpoint, split_address
from graftree.observe.exports import Export, counters_of
from graftree.observe.histogram import Histogram
from graftree.observe.pod_exports import EXPORTS as OF_EVERY_POD
from router.exports import EXPORTS as OF_ROUTERS
from router.metrics import Metrics, Outcome
from speculator_service.exports import EXPORTS as OF_SPECULATORS
from tests.observed import MODEL, observed_stack
from verifier_service.exports import EXPORTS as OF_VERIFIERS
from verifier_service.kv_exports import EXPORTS as OF_KV_REDIS

LISTEN = {"metrics_listen": "127.0.0.1:0"}
EXPORTS: dict[str, list[Export[Any]]] = {
    "router": OF_ROUTERS,
    "verifier": OF_VERIFIERS,
    "speculator": OF_SPECULATORS,
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def samples(text: str) -> Samples:
    """(name, sorted labels) -> value."""
    families = text_string_to_metric_families(text)
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for f in families for each in f.samples}


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


# Parts.


def test_histogram_counts_below_and_above() -> None:
    """A value on a bound belongs below it, one above all bounds to +Inf alone; counts are cumulative at the end."""
    histogram = Histogram([1.0, 2.0])
    for observed, times in ((0.5, 1), (1.0, 2), (1.5, 3), (9.0, 4)):
        histogram.observe(observed, times)
    assert histogram.counts == [3, 3, 4]
    assert histogram.count == 10
    assert histogram.sum == pytest.approx(0.5 + 2.0 + 4.5 + 36.0)
    assert histogram.cumulative() == [("1.0", 3.0), ("2.0", 6.0), ("+Inf", 10.0)]


def test_latencies_between_tokens_add_up() -> None:
    """Trial 29: one latency less than tokens, and their sum is the time from the first to the last token."""
    metrics, now, before = Metrics(), 100, 0
    for passed, tokens in ((0, 2), (30, 3), (5, 0), (10, 1), (60, 4)):
        now += passed
        metrics.tokens_left(tokens, arrived_ns=40, before_ns=before, now_ns=now)
        before = now if tokens else before
    assert (metrics.ttft.count, metrics.ttft.sum) == (1, pytest.approx(60e-9))
    assert (metrics.itl.count, metrics.itl.sum) == (9, pytest.approx(105e-9))


def test_rounds_by_outcome() -> None:
    """Each round is counted once, under what became of its tree, and positions say how deep it was right."""
    metrics = Metrics()
    metrics.count_round(drafted=0, accepted=0, delivered=1, without=Outcome.LATE)
    metrics.count_round(drafted=5, accepted=0, delivered=1, without=Outcome.LATE)
    metrics.count_round(drafted=5, accepted=1, delivered=2, without=Outcome.LATE)
    metrics.count_round(drafted=7, accepted=3, delivered=4, without=Outcome.LATE)
    assert metrics.rounds == sum(metrics.outcomes.values()) == 4
    assert (metrics.outcomes[Outcome.LATE], metrics.outcomes[Outcome.REJECTED]) == (1, 1)
    assert (metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens) == (3, 17, 4)
    assert metrics.accepted_per_position == [2, 1, 1]
    assert metrics.delivered_tokens == 8


@dataclass
class _Counters:
    """Numbers.

    Attributes:
        apples: eaten so far,
            by anybody.
        pears, plums: of the same tree.
    """

    apples: int = 0
    pears: int = 0
    plums: int = 0
    figs: int = 0
    names: str = ""


def test_counters_are_exported_by_themselves() -> None:
    """Every int of a dataclass is a counter, explained by its docstring; a new field needs no further line."""
    exports = {each.name: each for each in counters_of("graftree_x", _Counters, lambda pod: pod, leave_out=["plums"])}
    assert list(exports) == ["graftree_x_apples_total", "graftree_x_pears_total", "graftree_x_figs_total"]
    assert exports["graftree_x_apples_total"].help == "Eaten so far, by anybody."
    assert exports["graftree_x_pears_total"].help == "Of the same tree."
    assert exports["graftree_x_figs_total"].help == "Figs."
    assert exports["graftree_x_pears_total"].read(_Counters(pears=3)) == 3


def test_names_are_unique_and_explained() -> None:
    """No two metrics of a tier have one name, each says what it is, and vLLM's names are there."""
    for exports in EXPORTS.values():
        names = [export.name for export in (*OF_EVERY_POD, *exports)]
        assert len(names) == len(set(names))
        assert all(len(export.help) > 5 and export.help.endswith(".") for export in exports)
    vllm = (
        "spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total "
        "spec_decode_num_accepted_tokens_per_pos_total num_requests_running num_requests_waiting prompt_tokens_total "
        "generation_tokens_total time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds "
        "request_success_total"
    )
    assert {f"graftree_{name}" for name in vllm.split()} <= {export.name for export in OF_ROUTERS}
    assert "graftree_kv_cache_usage_perc" in {export.name for export in OF_VERIFIERS}


# The endpoint.


@pytest.mark.parametrize("address", ["127.0.0.1", ":9", "a b:1", "127.0.0.1:65536", "127.0.0.1:x"])
def test_an_address_that_is_none_names_the_key(address: str) -> None:
    """What cannot be listened on is a configuration error that names its key."""
    with pytest.raises(ConfigError, match="metrics_listen"):
        split_address("metrics_listen", address)


async def test_a_port_that_is_taken_names_the_key() -> None:
    """A second endpoint on the same port is refused, and the first goes on; after its end nobody answers."""
    first = MetricsEndpoint("127.0.0.1:0", [], None)
    with pytest.raises(ConfigError, match=r"metrics_listen.*cannot listen there"):
        MetricsEndpoint(first.address, [], None)
    assert "python_info" in await asyncio.to_thread(scrape, first.address)
    await first.close()
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(scrape, first.address)


async def test_values_are_read_when_asked_for() -> None:
    """A scrape reads the attributes as they are then, on the pod's own event loop; None leaves a metric out."""
    counters, loops = {"a": 1.0}, []

    def read(pod: dict[str, float]) -> float:
        loops.append(asyncio.get_running_loop())
        return pod["a"]

    exports = [
        Export("graftree_x", "gauge", "X.", read),
        Export("graftree_none", "gauge", "Nothing.", lambda pod: None),
        Export("graftree_by", "gauge", "By.", lambda pod: {("m", 'q"\n'): 2.0}, labels=("one", "two")),
    ]
    endpoint = MetricsEndpoint("127.0.0.1:0", exports, counters)
    try:
        assert loops == []
        counters["a"] = 7.0
        found = samples(await asyncio.to_thread(scrape, endpoint.address))
    finally:
        await endpoint.close()
    assert loops == [asyncio.get_running_loop()]
    assert value(found, "graftree_x") == 7.0
    assert value(found, "graftree_by", one="m", two='q"\n') == 2.0
    assert not any(name == "graftree_none" for name, _ in found)


# A whole stack.


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """A router, a verifier and two speculators, each with an endpoint of its own."""
    with observed_stack(LISTEN) as running:
        yield running


def metrics_of(stack: LocalStack, tier: Any) -> Samples:
    pod: Any = stack.pods(tier)[0]
    return samples(scrape(pod.instance.metrics_address))


@pytest.mark.parametrize("tier", list(EXPORTS))
def test_every_metric_of_the_list_is_served(stack: LocalStack, tier: str) -> None:
    """What is listed is served and nothing else, so that dashboards can be checked against the lists."""
    pod: Any = stack.pods(tier)[0]  # type: ignore[arg-type]
    text = scrape(pod.instance.metrics_address)
    served = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP graftree_")}
    absent = {export.name for export in OF_KV_REDIS} if tier == "verifier" else set()  # there is none
    assert served == {export.name for export in (*OF_EVERY_POD, *EXPORTS[tier])} - absent


def test_metrics_agree_with_the_answers(stack: LocalStack) -> None:
    """After some requests the counters have moved by exactly what the clients were told."""
    before, verified = metrics_of(stack, "router"), metrics_of(stack, "verifier")
    with Client(stack.target) as client:
        results = [
            client.generate(f"{i} to the moon, to the moon", max_new_tokens=20, ignore_eos=True) for i in range(3)
        ]
        results.append(client.generate("x", max_new_tokens=1))
    after = metrics_of(stack, "router")

    def moved(name: str, **labels: str) -> float:
        return value(after, f"graftree_{name}", **labels) - before.get(
            (f"graftree_{name}", tuple(sorted(labels.items()))), 0.0
        )

    figures = [result.speculation for result in results]
    tokens = sum(result.usage.completion_tokens for result in results)
    assert moved("generation_tokens_total") == tokens == 61
    assert moved("prompt_tokens_total") == sum(result.usage.prompt_tokens for result in results)
    assert moved("spec_decode_num_draft_tokens_total") == sum(each.num_draft_tokens for each in figures) > 0
    assert moved("spec_decode_num_accepted_tokens_total") == sum(each.num_accepted_tokens for each in figures) > 0
    rounds = sum(
        count - before.get(key, 0.0) for key, count in after.items() if key[0] == "graftree_router_rounds_total"
    )
    assert rounds == sum(each.num_spec_steps for each in figures)
    positions = [
        count
        for (name, _), count in after.items()
        if name == "graftree_spec_decode_num_accepted_tokens_per_pos_total"
    ]
    assert sum(positions) == value(after, "graftree_spec_decode_num_accepted_tokens_total")
    assert positions == sorted(positions, reverse=True)
    assert moved("time_to_first_token_seconds_count") == moved("e2e_request_latency_seconds_count") == 4
    assert moved("inter_token_latency_seconds_count") == tokens - 4
    itl = sum(result.timings.decode_ns for result in results) / 1e9
    assert moved("inter_token_latency_seconds_sum") == pytest.approx(itl)
    assert moved("request_success_total", finished_reason="length") == 4
    assert value(after, "graftree_num_requests_running") == value(after, "graftree_num_requests_waiting") == 0
    assert moved("router_commits_total", durability="durable") > 0
    assert value(after, "graftree_router_pods", tier="speculator", state="ready") == 2
    now = metrics_of(stack, "verifier")
    emitted = "graftree_verifier_emitted_tokens_total"
    assert value(now, emitted) - value(verified, emitted) >= tokens
    assert value(now, "graftree_verifier_forward_seconds_total") > 0


def test_errors_and_aborts_are_counted(stack: LocalStack) -> None:
    """A refused request counts under its reason, a cancelled one as abort."""
    before = metrics_of(stack, "router")
    with Client(stack.target) as client:
        with pytest.raises(Exception, match="max_new_tokens"):
            client.generate("x", max_new_tokens=0)
        with client.stream("Once upon a time", max_new_tokens=400, ignore_eos=True) as stream:
            next(stream)
        client.generate("x", max_new_tokens=1)  # behind the cancellation
    after = metrics_of(stack, "router")
    for name, labels in (
        ("graftree_router_errors_total", (("reason", "INVALID_ARGUMENT"),)),
        ("graftree_request_success_total", (("finished_reason", "abort"),)),
    ):
        assert after[name, labels] == before.get((name, labels), 0.0) + 1


def test_no_endpoint_unless_asked_for() -> None:
    """Empty and 0 both mean that no port is opened."""
    with LocalStack(MODEL, [], in_process=True, threads=1, verifier_options={"metrics_listen": "0"}) as plain:
        pods: list[Any] = [*plain.pods("router"), *plain.pods("verifier")]
        assert [pod.instance.metrics_address for pod in pods] == ["", ""]
