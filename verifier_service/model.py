"""From a verifier's configuration to a runner that has run once."""

from __future__ import annotations

import time

import structlog

from graftree.config import VerifierConfig
from graftree.errors import ConfigError, Incompatible
from graftree.models.load import llm_identity, load
from graftree.models.runner import TreeRunner, chain_rows
from graftree.models.threads import use_threads
from graftree.models.uri import ModelUri
from graftree.step_time import StepTime
from verifier_service import capacity, step_times
from verifier_service.engine import Runner
from verifier_service.standin import StandInRunner

log = structlog.get_logger(__name__)

_WARM_UP_ROWS = (1, 2, 8, 32)


def load_runner(config: VerifierConfig) -> Runner:
    """Load the model, reserve its cache, run it once for each common size of a step.

    Raises:
        InvalidArgument, Incompatible: the model or device, or a model that cannot be run exactly.
        ConfigError: not enough memory for the cache.
    """
    use_threads(config.threads)
    uri = ModelUri.parse(config.model)
    if uri.kind == "standin":
        return StandInRunner.load(uri, kv_tokens=config.kv_tokens, block_size=config.block_size)
    loaded = load(uri, dtype=config.dtype, device=config.device, weights=config.weights)
    if not loaded.spec.max_context:
        raise Incompatible(f"{uri}: its configuration names no context length")
    graph_bytes = 0 if config.deterministic else capacity.graph_bytes(config.cuda_graphs, loaded.model.device)
    tokens = config.kv_tokens or capacity.kv_tokens(
        bytes_per_token=capacity.bytes_per_token(loaded.model),
        device=loaded.model.device,
        max_sessions=config.max_sessions,
        max_context=loaded.spec.max_context,
        step_bytes=capacity.step_bytes(loaded.model, config.step_tokens),
        graph_bytes=graph_bytes,
    )
    if tokens < config.block_size:
        raise ConfigError("kv_tokens", tokens, f"at least one block of {config.block_size} tokens; is memory short?")
    runner = TreeRunner(
        loaded,
        kv_tokens=tokens,
        block_size=config.block_size,
        deterministic=config.deterministic,
        graph_bytes=graph_bytes,
    )
    _warm_up(runner, config)
    return runner


def identity(config: VerifierConfig) -> str:
    """`llm_identity` of the LLM, for SSMs that were made for it; "" = not known."""
    return "" if ModelUri.parse(config.model).kind == "standin" else llm_identity(config.model)


def step_time(runner: Runner, config: VerifierConfig) -> StepTime | None:
    """What the runner's steps take before any has run; None = not known."""
    if isinstance(runner, StandInRunner):
        return runner.step_time
    if not isinstance(runner, TreeRunner) or not config.step_time_seconds:
        return None
    return step_times.measure(runner, seconds=config.step_time_seconds, step_tokens=config.step_tokens)


def _warm_up(runner: TreeRunner, config: VerifierConfig) -> None:
    limit = min(runner.spec.max_context, config.step_tokens, runner.pool.num_blocks * config.block_size)
    recorded = runner.graphs is not None
    blocks = runner.pool.allocate(-(-(limit if recorded else min(limit, max(_WARM_UP_ROWS))) // config.block_size))
    begun = time.monotonic()
    runner.prepare()
    for count in _WARM_UP_ROWS:
        if count <= limit:
            runner.forward([chain_rows(blocks, 0, [0] * count, logits=range(count))])
    if recorded:  # the steps above were replayed; what prompts run is compiled now, too
        runner.forward([chain_rows(blocks, 0, [0] * limit)])
    runner.pool.free(blocks)
    log.info("warmed up", milliseconds=round((time.monotonic() - begun) * 1000))
