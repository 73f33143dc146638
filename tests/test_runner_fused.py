"""Fused decoder layers: the same function in fewer operators, and the original where it is not the same."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from graftree.models.fused import FAMILIES as FUSED
from graftree.models.fused import TOLERANCES, FusedLayer, can_fuse
from graftree.models.load import load
from graftree.models.runner import TreeRunner, chain_rows
from tests.runner_models import FAMILIES

PROMPT = [7, 3, 250, 9, 11, 42, 42, 1, 199, 0, 5]


def logits_of(runner: TreeRunner, token_ids: list[int]) -> torch.Tensor:
    blocks = runner.pool.allocate(-(-len(token_ids) // runner.kv.block_size))
    (logits,) = runner.forward([chain_rows(blocks, 0, token_ids, logits=range(len(token_ids)))])
    runner.pool.free(blocks)
    return logits


def fused_layers(model: Any) -> int:
    return sum(isinstance(module, FusedLayer) for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fused_equals_unfused(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without fusing a runner gives the same logits; only known families are fused, and all of theirs."""
    loaded = load(FAMILIES[family], dtype=dtype)
    known = loaded.model.config.model_type in FUSED
    got = logits_of(TreeRunner(loaded, kv_tokens=64), PROMPT)
    assert fused_layers(loaded.model) == (2 if known else 0)
    monkeypatch.setattr(TreeRunner, "_fuse", lambda *_: None)
    expected = logits_of(TreeRunner(load(FAMILIES[family], dtype=dtype), kv_tokens=64), PROMPT)
    error = float((got - expected).abs().max() / expected.abs().max())
    assert error <= TOLERANCES[loaded.model.dtype]


def test_biases_of_some_products() -> None:
    """Biases on query, key and value, and none on the output, go where they belong."""
    loaded, plain = load(FAMILIES["qwen2"]), load(FAMILIES["qwen2"])
    for model in (loaded.model, plain.model):
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=generator)
    got = logits_of(TreeRunner(loaded, kv_tokens=64), PROMPT)
    assert fused_layers(loaded.model) == 2
    with torch.inference_mode():
        torch.testing.assert_close(got, plain.model(torch.tensor([PROMPT])).logits[0], rtol=1e-4, atol=1e-5)


def test_a_layer_that_computes_otherwise_stays() -> None:
    """A layer of the right form with another formula is found out by comparing and run as it is."""
    uri = FAMILIES["llama"]
    loaded, plain = load(uri), load(uri)

    class Damped(type(plain.model.model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
            return super().forward(hidden_states, **named) * 0.999

    for model in (loaded.model, plain.model):
        model.model.layers[1].__class__ = Damped
    got = logits_of(TreeRunner(loaded, kv_tokens=64), PROMPT)
    assert [isinstance(layer, FusedLayer) for layer in loaded.model.model.layers] == [True, False]
    with torch.inference_mode():
        torch.testing.assert_close(got, plain.model(torch.tensor([PROMPT])).logits[0], rtol=1e-4, atol=1e-5)


def test_a_layer_with_another_part_is_not_touched() -> None:
    """Something between the known parts, whatever it does, keeps a layer from being fused."""
    model = load(FAMILIES["llama"]).model
    first, second = model.model.layers
    assert can_fuse(first)
    first.self_attn.gate = torch.nn.Identity()
    assert not can_fuse(first)
    second.mlp.up_proj = torch.nn.Identity()
    assert not can_fuse(second)


def test_weights_are_not_held_twice() -> None:
    """Behind a runner the original layers' weights are gone."""
    loaded = load(FAMILIES["llama"])
    layer = loaded.model.model.layers[0]
    weights = [weakref.ref(layer.self_attn.k_proj.weight), weakref.ref(layer.mlp.up_proj.weight)]
    del layer
    runner = TreeRunner(loaded, kv_tokens=64)
    assert [weight() for weight in weights] == [None, None]
    assert runner.pool.free_blocks == runner.pool.num_blocks


def test_the_smallest_cache_is_enough() -> None:
    """Comparing the layers takes no block of the runner's own cache."""
    runner = TreeRunner(load(FAMILIES["llama"]), kv_tokens=1, block_size=1)
    assert logits_of(runner, [5]).shape == (1, 300)
