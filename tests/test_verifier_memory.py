"""What is planned of a GPU's memory: plain sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftree.device_sampling import SCRATCH_BYTES
from graftree.models.load import load
from verifier_service import capacity

GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_what_is_left_is_cache() -> None:
    """Free memory less the margin, a step and recorded steps; never below nothing."""
    total = 80 * GIB
    margin = int(total * capacity.GPU_MARGIN)
    room = capacity.gpu_room(free=64 * GIB, total=total, step_bytes=2 * GIB, graph_bytes=3 * GIB)
    assert room == 59 * GIB - margin
    assert capacity.gpu_room(free=2 * GIB, total=total, step_bytes=GIB, graph_bytes=GIB) == 0


@pytest.mark.parametrize(
    ("key", "device", "expected"),
    [
        ("off", CUDA, 0),
        ("auto", CUDA, 80 * GIB // 32),
        ("on", CUDA, 80 * GIB // 32),
        ("auto", CPU, 0),
        ("off", CPU, 0),
        ("on", CPU, 1),
    ],
)
def test_recorded_steps_have_a_share_of_a_gpu(
    key: str, device: torch.device, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the key and the device; on a CPU there is nothing to plan, but `on` is on."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    assert capacity.graph_bytes(key, device) == expected


def test_tokens_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left over the bytes of a token, or what all sessions can need."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    asked: dict[str, Any] = {
        "bytes_per_token": 1 << 17,
        "device": CUDA,
        "max_context": 8192,
        "step_bytes": GIB,
        "graph_bytes": GIB,
    }
    room = 58 * GIB - int(80 * GIB * capacity.GPU_MARGIN)
    assert capacity.kv_tokens(max_sessions=256, **asked) == room // (1 << 17)
    assert capacity.kv_tokens(max_sessions=2, **asked) == 2 * 8192


def test_a_step_of_an_8b_model() -> None:
    """By hand, for 512 rows in bfloat16: states of one layer, logits in three copies, and what sampling works on."""
    model: Any = type("Model", (), {})()
    model.dtype = torch.bfloat16
    model.config = type("Config", (), {})()
    vars(model.config).update(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128_256,
    )
    states, logits = (9 * 4096 + 3 * 14336) * 2, 128_256 * (2 + 4 + 4)
    assert capacity.step_bytes(model, 512) == 512 * (states + logits) + SCRATCH_BYTES
    assert capacity.bytes_per_token(model) == 131_072


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_step_of_every_kind_of_model(family: str) -> None:
    """Configurations that name things otherwise give a sum too, and it grows with the rows."""
    model = load(f"random:{family}?layers=1&hidden=32&heads=2&vocab=300&context=64").model
    assert capacity.step_bytes(model, 2) - capacity.step_bytes(model, 1) > 300 * 12
