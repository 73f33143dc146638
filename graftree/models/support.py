"""Which transformers models `TreeRunner` can run exactly."""

from __future__ import annotations

import inspect
from typing import Any

from graftree.errors import Incompatible

# Families whose logits the tests compare with ordinary forwards. Others are compared when they are loaded.
TESTED_FAMILIES = frozenset({"llama", "qwen2", "qwen3", "opt", "gpt2", "mistral"})


def window_of(config: Any, layer: int) -> int | None:
    """Sliding window of a layer, in positions, as its configuration says; None = it sees all."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None


def check(model: Any) -> None:
    """Refuse what its class and configuration show cannot work.

    Raises:
        Incompatible: says what stands against it.
    """
    config, name = model.config, type(model).__name__
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise Incompatible(f"{name} attends to an encoder")
    if getattr(config, "alibi", False):
        raise Incompatible(f"{name} uses ALiBi position biases")
    if config.get_text_config() is not config:
        raise Incompatible(f"{name} is not a text-only model")
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise Incompatible(f"{name} has layers of other kinds: {', '.join(sorted(map(str, others)))}")
    if not getattr(model, "_supports_attention_backend", False):
        raise Incompatible(f"{name} does not use transformers' AttentionInterface")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(rope.get("rope_type", "default"))} | {
        str(value.get("rope_type", "default")) for value in rope.values() if isinstance(value, dict)
    }
    if unstable := kinds & {"dynamic", "longrope"}:
        raise Incompatible(f"{name}: {unstable.pop()} RoPE depends on the longest sequence of a batch")
    parameters = inspect.signature(model.forward).parameters
    for parameter in ("position_ids", "logits_to_keep"):
        if parameter not in parameters:
            raise Incompatible(f"{name}.forward takes no {parameter}")
    layers = {m.layer_idx for m in model.modules() if hasattr(m, "layer_idx")}
    if layers != set(range(config.num_hidden_layers)):
        raise Incompatible(f"{name}: layers are numbered {sorted(layers)}, not 0..{config.num_hidden_layers - 1}")
