"""From a verifier's configuration to its runner: cache capacity, and start-up errors that name the key (trial 25)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graftree import config as configuration
from graftree.config import VerifierConfig
from graftree.errors import ConfigError, InvalidArgument
from graftree.models.load import load
from tests.verifier_harness import LLAMA, Router, greedy
from verifier_service import capacity
from verifier_service.engine import Engine
from verifier_service.model import load_runner

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen2", "qwen3", "opt", "gpt2", "mistral"]


def build(**values: Any) -> VerifierConfig:
    return configuration.build(VerifierConfig, {"model": LLAMA, "device": "cpu"} | values)


def test_kv_tokens_is_what_was_asked_for() -> None:
    """Whole blocks of kv_tokens; the warm-up gives its blocks back and the runner then answers right."""
    runner = load_runner(build(kv_tokens=100, block_size=16))
    assert runner.pool.num_blocks == runner.pool.free_blocks == 6
    router = Router(Engine(runner, max_sessions=4, step_tokens=64))
    assert router.open("a", [1, 2, 3], max_length=40, max_nodes=4).generate(8) == greedy([1, 2, 3], 8)


def test_zero_kv_tokens_means_room_for_every_session() -> None:
    """The documented meaning of 0: max_sessions of full context, where the memory is there."""
    runner = load_runner(build(max_sessions=5))
    assert runner.pool.num_blocks == 5 * 256 // 16


def test_capacity_is_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of what is free, and never more than the limit."""
    asked = {"device": CPU, "max_sessions": 1000, "max_context": 8192}
    monkeypatch.setattr(capacity, "free_memory", lambda: 4 << 20)
    assert capacity.kv_tokens(bytes_per_token=1024, **asked) == 1024
    monkeypatch.setattr(capacity, "free_memory", lambda: 1 << 50)
    assert capacity.kv_tokens(bytes_per_token=1 << 20, **asked) == capacity.CPU_LIMIT_BYTES >> 20
    assert capacity.kv_tokens(bytes_per_token=1, **asked) == 1000 * 8192


def test_short_memory_is_a_start_up_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache of no blocks: the error names the key."""
    monkeypatch.setattr(capacity, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="kv_tokens"):
        load_runner(build())


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_per_token_is_the_caches(family: str) -> None:
    """The estimate made before the cache exists is what the cache then takes."""
    uri = f"random:{family}?context=64"
    runner: Any = load_runner(build(model=uri, kv_tokens=64))
    assert capacity.bytes_per_token(load(uri).model) == runner.kv.bytes_per_token


def test_a_control_group_bounds_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container the limit counts, not the machine; `max` is no limit."""
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    machine = capacity.free_memory()
    assert machine > 1 << 20
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert capacity.free_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert capacity.free_memory() > 2000


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("device", {"device": "warp"}),
        ("model", {"model": "random:nothing"}),
        ("model", {"model": "standin:?speed=3"}),
    ],
)
def test_a_wrong_value_names_its_field(field: str, values: dict[str, Any]) -> None:
    """Trial 25: start-up ends with an error that says what would have been accepted."""
    with pytest.raises(InvalidArgument) as caught:
        load_runner(build(**values))
    assert caught.value.field == field
