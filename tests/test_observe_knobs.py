"""Trial 26: no knob is accepted and ignored. Each key of the configuration moves something that the metrics show.

Keys whose effect is not a number of a pod name the test that sees it.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from graftree import config as configuration
from graftree.config import RouterConfig, SpeculatorConfig, VerifierConfig
from graftree.errors import GraftreeError
from graftree.models.runner import TreeRunner
from graftree.observe.histogram import Histogram
from graftree.pod import Pod
from graftree.v1 import common_pb2, speculation_pb2, speculation_pb2_grpc
from speculator_service.pod import SpeculatorPod
from tests.fakes import FakeSpeculator, FakeVerifier, chain
from tests.router_harness import PROMPT, Harness, harness, until
from tests.store_redis import client, server
from tests.test_verifier_service import connection, opening, pod, stepping
from tests.verifier_harness import LLAMA
from verifier_service.pod import VerifierPod

ROOT = Path(__file__).parent.parent
Readings = dict[str, Any]


@pytest.fixture(autouse=True)
async def _an_empty_registry() -> None:
    """Pods of one test do not have to fit those of another."""
    async with client("valkey"):
        pass


def readings(running: Pod[Any]) -> Readings:
    """Name -> value now; one per labels where a metric has some, the number of observations of a histogram."""
    found = {}
    for export in running.exports():
        value = export.read(running)
        found[export.name] = value.count if isinstance(value, Histogram) else value
    return found


# Routers.


async def sixteen_tokens(running: Harness, *_: Any) -> None:
    """One request of 16 tokens."""
    await running.client.generate(token_ids=PROMPT, max_new_tokens=16, ignore_eos=True)


async def no_length(running: Harness, *_: Any) -> None:
    """A request that does not say how long."""
    await running.client.generate(token_ids=PROMPT, ignore_eos=True)


async def a_text(running: Harness, *_: Any) -> None:
    """A prompt of 40 bytes."""
    with suppress(GraftreeError):
        await running.client.generate("x" * 40, max_new_tokens=1)


async def two_at_once(running: Harness, verifier: FakeVerifier, _: FakeSpeculator) -> None:
    """A second request while the first one is not through."""
    verifier.holding = True
    first = asyncio.ensure_future(running.client.generate(token_ids=PROMPT, max_new_tokens=1))
    await verifier.until(lambda: len(verifier.held) == 1)
    second = asyncio.ensure_future(running.client.generate(token_ids=PROMPT, max_new_tokens=1))
    await until(lambda: running.metrics.refused > 0 or len(verifier.held) == 2)
    verifier.release()
    await asyncio.gather(first, second, return_exceptions=True)


async def the_same_again(running: Harness, *_: Any) -> None:
    """A request that has been answered is sent once more."""
    for _ in range(2):
        await running.client.generate(
            token_ids=PROMPT, max_new_tokens=2, request_id="0c6d3f7e-54a5-4a0e-9a6b-0c3e5f6d7a81"
        )


async def a_verifier_that_hangs(running: Harness, verifier: FakeVerifier, _: FakeSpeculator) -> None:
    """A step that nobody answers for half a second."""
    verifier.holding = True
    request = asyncio.ensure_future(running.client.generate(token_ids=PROMPT, max_new_tokens=1))
    await asyncio.sleep(0.5)
    verifier.holding = False
    verifier.release()
    await request


async def a_pod_that_says_nothing(running: Harness, *_: Any) -> None:
    """A pod that takes connections and sends no hello, for half a second."""
    mute = FakeSpeculator("mute")
    mute.silent = True
    try:
        await mute.start()
        await running.router.registry.register(mute.record())
        await asyncio.sleep(0.6)
    finally:
        await mute.stop()


async def garbage(running: Harness, _: FakeVerifier, speculator: FakeSpeculator) -> None:
    """A speculator that sends nonsense whenever it is asked, for half a second."""
    speculator.script = lambda delta: speculation_pb2.TreeDelta(session_id=delta.session_id, token_ids=[1])
    for _ in range(5):
        await running.client.generate(token_ids=PROMPT, max_new_tokens=4, ignore_eos=True)
        await asyncio.sleep(0.1)


async def half_a_second(*_: Any) -> None:
    """Nothing but time."""
    await asyncio.sleep(0.5)


def drafts(after: Readings) -> float:
    return float(after["graftree_spec_decode_num_draft_tokens_total"])


def depth(after: Readings) -> int:
    return len(after["graftree_spec_decode_num_accepted_tokens_per_pos_total"])


def outcome(name: str) -> Callable[[Readings], float]:
    return lambda after: float(after["graftree_router_rounds_total"][(name,)])


def plain(name: str) -> Callable[[Readings], Any]:
    return lambda after: after[name]


def label(index: int) -> Callable[[Readings], str]:
    return lambda after: next(iter(after["graftree_pod_info"]))[index]


def errors(after: Readings) -> int:
    return sum(after["graftree_router_errors_total"].values())


FIXED = {"adaptive": False, "draft_wait_ms": 1000.0}

# key: (other value, what else is set in both runs, what happens, what must differ)
ROUTER: dict[str, tuple[Any, dict[str, Any], Callable[..., Any], Callable[[Readings], Any]]] = {
    "tree_budget": (0, FIXED, sixteen_tokens, drafts),
    "tree_depth": (1, FIXED, sixteen_tokens, depth),
    "adaptive": (False, {}, sixteen_tokens, plain("graftree_router_tree_budget")),
    "draft_wait_ms": (0.0, {"adaptive": False}, sixteen_tokens, plain("graftree_router_draft_waits_total")),
    "speculators_per_session": (0, FIXED, sixteen_tokens, outcome("alone")),
    "default_max_new_tokens": (3, {}, no_length, plain("graftree_generation_tokens_total")),
    "max_prompt_bytes": (39, {}, a_text, errors),
    "max_requests": (1, {}, two_at_once, plain("graftree_router_refused_total")),
    "replay_seconds": (0, {}, the_same_again, plain("graftree_router_attached_total")),
    "step_timeout_seconds": (0.1, {}, a_verifier_that_hangs, plain("graftree_router_failovers_total")),
    "connect_timeout_seconds": (0.1, {}, a_pod_that_says_nothing, plain("graftree_router_unreachable_total")),
    "quarantine_seconds": (0.01, {}, garbage, lambda after: after["graftree_router_quarantines_total"] > 1),
    "lease_seconds": (0.3, {}, half_a_second, lambda after: after["graftree_pod_lease_renewals_total"] > 1),
    "pod_id": ("somebody", {}, half_a_second, label(0)),
    "port": (None, {}, half_a_second, label(3)),
    "advertise": ("elsewhere:1", {}, half_a_second, label(3)),
    "host": ("127.0.0.2", {}, half_a_second, label(3)),
}


async def router_readings(values: dict[str, Any], happens: Callable[..., Any]) -> Readings:
    verifier, speculator = FakeVerifier("v"), FakeSpeculator("s", draft=chain(4))
    options = {key: value for key, value in values.items() if value is not None}
    async with harness(verifier, speculator, **options) as running:
        if "advertise" not in options:
            await happens(running, verifier, speculator)
        return readings(running.router)


@pytest.mark.parametrize("key", ROUTER)
async def test_a_knob_of_the_router_moves_a_metric(key: str) -> None:
    """The same happens with the default and with another value, and the metric is another."""
    value, common, happens, metric = ROUTER[key]
    before = metric(await router_readings(common, happens))
    after = metric(await router_readings(common | {key: value}, happens))
    assert before != after, f"{key}: {before} either way"


# Verifiers.


async def a_long_prompt_twice(running: VerifierPod) -> Readings:
    """Two sessions of one prompt, one after the other, a step each."""
    prompt = [3 + i % 200 for i in range(64)]
    async with connection(running) as link:
        for name in ("a", "b"):
            await link.send(opens=[opening(name, prompt)])
            await link.send(steps=[stepping(name, 1, prompt)])
            await link.until(lambda: bool(link.verdicts or link.failures))
            link.verdicts.clear()
            await link.send(closes=[name])
    return readings(running)


async def two_sessions(running: VerifierPod) -> Readings:
    """Two sessions that stay open."""
    async with connection(running) as link:
        await link.send(opens=[opening("a", [1, 2, 3]), opening("b", [1, 2, 3])])
        await link.send(steps=[stepping(name, 1, [1, 2, 3]) for name in ("a", "b")])
        await link.until(lambda: len(link.verdicts) + len(link.failures) >= 2)
        return readings(running)


async def nothing(running: VerifierPod) -> Readings:
    """It starts."""
    return readings(running)


async def threads_of_a_forward(_: VerifierPod) -> Readings:
    """torch keeps the number for threads that begin later, and the engine's is one."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return {"threads": found[0]}


async def sizes_of_steps(running: VerifierPod) -> Readings:
    """How many rows a forward may have."""
    assert isinstance(running.runner, TreeRunner)
    return {"sizes": running.runner.sizes}


VERIFIER: dict[str, tuple[Any, Callable[[VerifierPod], Awaitable[Readings]], Callable[[Readings], Any]]] = {
    "model": (LLAMA.replace("seed=0", "seed=1"), nothing, label(2)),
    "dtype": ("bfloat16", nothing, label(4)),
    "max_sessions": (1, two_sessions, plain("graftree_verifier_refused_total")),
    "kv_tokens": (2048, nothing, plain("graftree_verifier_kv_blocks")),
    "block_size": (32, nothing, plain("graftree_verifier_kv_blocks")),
    "step_tokens": (8, a_long_prompt_twice, plain("graftree_verifier_forwards_total")),
    "prefix_cache": (False, a_long_prompt_twice, plain("graftree_prefix_cache_hits_total")),
    "kv_reserve": (0.0, two_sessions, plain("graftree_kv_cache_usage_perc")),
    "cuda_graphs": ("on", a_long_prompt_twice, plain("graftree_verifier_replayed_steps_total")),
    "deterministic": (True, sizes_of_steps, plain("sizes")),
    "step_time_seconds": (0, nothing, lambda after: bool(after["graftree_verifier_step_seconds"])),
    "threads": (2, threads_of_a_forward, plain("threads")),
}


async def verifier_readings(
    values: dict[str, Any], happens: Callable[[VerifierPod], Awaitable[Readings]]
) -> Readings:
    async with pod(**({"step_time_seconds": 0.05, "threads": 1} | values)) as running:
        return await happens(running)


@pytest.mark.parametrize("key", VERIFIER)
async def test_a_knob_of_the_verifier_moves_a_metric(key: str) -> None:
    """As for the router."""
    value, happens, metric = VERIFIER[key]
    before = metric(await verifier_readings({}, happens))
    after = metric(await verifier_readings({key: value}, happens))
    assert before != after, f"{key}: {before} either way"


# Speculators.

SSM = "model:random:llama?layers=1&seed=3"

SPECULATOR: dict[str, tuple[Any, dict[str, Any], Callable[[Readings], Any]]] = {
    "drafter": ("ngram", {}, label(2)),
    "dtype": ("float16", {}, label(4)),
    "max_sessions": (1, {}, plain("graftree_speculator_sessions_failed_total")),
    "max_nodes": (3, {}, plain("graftree_speculator_nodes_total")),
    "max_depth": (1, {}, plain("graftree_speculator_nodes_total")),
    "branching": (1, {"max_depth": 2}, plain("graftree_speculator_nodes_total")),
    "tree": ("static:1,1", {}, plain("graftree_speculator_nodes_total")),
    "batch_leaves": (1, {}, plain("graftree_speculator_steps_total")),
    "kv_tokens": (1024, {}, plain("graftree_speculator_kv_blocks")),
}


@asynccontextmanager
async def speculator(values: dict[str, Any]) -> AsyncIterator[SpeculatorPod]:
    options = {"drafter": SSM, "redis": server("valkey").url, "device": "cpu", "kv_tokens": 4096, "threads": 1}
    running = SpeculatorPod(configuration.build(SpeculatorConfig, options | values))
    try:
        await running.start()
        yield running
    finally:
        await running.stop(0)


async def speculator_readings(values: dict[str, Any]) -> Readings:
    """Two sessions open until their trees are complete, or one is refused."""
    async with speculator(values) as running, grpc.aio.insecure_channel(running.address) as channel:
        call = speculation_pb2_grpc.SpeculationServiceStub(channel).Speculate()
        hello = common_pb2.StreamHello(revision=1, pod_id="router")
        opens = [
            speculation_pb2.DraftOpen(
                session_id=name, token_ids=[5, 6, 7, 5, 6], prompt_tokens=5, vocab_size=512, max_length=200
            )
            for name in ("a", "b")
        ]
        await call.write(speculation_pb2.SpeculateRequest(hello=hello, opens=opens, credits=1000))
        over: set[str] = set()
        async with asyncio.timeout(60):
            while len(over) < 2:
                message = await call.read()
                over |= {delta.session_id for delta in message.deltas if delta.complete}
                over |= {failure.session_id for failure in message.failures}
        found = readings(running)
        call.cancel()
        return found


@pytest.mark.parametrize("key", SPECULATOR)
async def test_a_knob_of_the_speculator_moves_a_metric(key: str) -> None:
    """As for the router."""
    value, common, metric = SPECULATOR[key]
    before = metric(await speculator_readings(common))
    after = metric(await speculator_readings(common | {key: value}))
    assert before != after, f"{key}: {before} either way"


# All of them.

ELSEWHERE = {
    "model": "test_router_faults.py::test_wrong_vocabulary_is_refused_with_the_reason",
    "redis": "test_security_redis.py::test_the_documented_rights_are_enough",
    "redis_username": "test_security_redis.py::test_the_documented_rights_are_enough",
    "redis_password_file": "test_security_redis.py::test_the_password_is_read_at_each_connection",
    "kv_redis": "test_verifier_kv_cache.py::test_a_second_verifier_loads_what_the_first_computed",
    "kv_redis_username": "test_verifier_kv_cache.py::test_user_and_password",
    "kv_redis_password_file": "test_verifier_kv_cache.py::test_user_and_password",
    "kv_packing": "test_verifier_kv_cache.py::test_int8_is_small_and_its_own",
    "kv_ttl_seconds": "test_verifier_kv_cache.py::test_blocks_have_an_end",
    "kv_queue_blocks": "test_verifier_kv_cache.py::test_a_full_queue_drops",
    "kv_wait_seconds": "test_verifier_kv_cache.py::test_a_redis_that_stands_still",
    "kv_load_tokens": "test_verifier_kv_cache.py::test_a_length_from_which_loading_is_worth_it",
    "drain_seconds": "test_local_stack_processes.py",
    "device": "test_verifier_model.py::test_a_wrong_value_names_its_field",
    "log_level": "test_observe_logs.py::test_a_line",
    "log_format": "test_observe_logs.py::test_for_people",
    "metrics_listen": "test_observe_metrics.py::test_no_endpoint_unless_asked_for",
    "trace_endpoint": "test_observe_tracing.py::test_to_a_file",
    "trace_sample_ratio": "test_observe_tracing.py::test_sampling",
    "tls_certificate": "test_security_tls.py::test_answers_come_through",
    "tls_key": "test_security_tls.py::test_a_stack_says_which_key",
    "tls_client_ca": "test_security_tls.py::test_pods_let_in_who_shows_a_certificate",
    "health_listen": "test_security_tls.py::test_probes_have_a_port_of_their_own",
    "peer_ca": "test_security_tls.py::test_rotation",
    "peer_certificate": "test_security_tls.py::test_rotation",
    "peer_key": "test_security_tls.py::test_rotation",
    "peer_name": "test_security_tls.py::test_a_name_in_the_certificates",
    "api_keys": "test_security_keys.py::test_nobody_asks_without_a_key",
    "audit_log": "test_security_keys.py::test_audit",
    "resume_seconds": "test_router_resume.py::test_records_expire",
    "threads": "test_speculator_model.py",
    "weights": "test_int8.py::test_the_fingerprint_is_another",
}


@pytest.mark.parametrize(
    ("config", "seen"), [(RouterConfig, ROUTER), (VerifierConfig, VERIFIER), (SpeculatorConfig, SPECULATOR)]
)
def test_no_key_is_left_out(config: type[Any], seen: dict[str, Any]) -> None:
    """A key that is added needs an entry in one of the tables here, or the name of the test that sees its effect."""
    of_every_pod = set(ROUTER) & set(configuration.PodConfig.model_fields)
    known = set(seen) | of_every_pod | set(ELSEWHERE)
    assert set(config.model_fields) - known == set()


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_are_named_exist(test: str) -> None:
    """A renamed test must not take its key's proof with it."""
    name, _, function = test.partition("::")
    text = (ROOT / "tests" / name).read_text()
    assert not function or re.search(rf"def {function}\b", text)
