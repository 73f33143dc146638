"""`FusedLayer`: a decoder layer of the Llama kind in a dozen operators instead of fifty.

A verify step of a small model spends as long in small operators and in Python as in reading weights. Query, key and
value share one product, gate and up projection another; the rotary embedding turns queries and keys together.
What a layer computes is the same, up to the rounding of sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

log = logging.getLogger(__name__)  # structlog is not needed to run a model

# transformers' model types whose layers have this form. A layer is compared with the original before it is used.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

# (layer, query (N, H, D), key (N, KVH, D), value (N, KVH, D), scale, sliding window) -> (N, H, D)
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, float, int | None], Tensor]
# (weight (out, in), bias (out,) or None) -> a module x (..., in) -> (..., out)
MakeLinear: TypeAlias = Callable[[Tensor, Tensor | None], nn.Module]

# Largest difference to the original layer, relative to its largest output.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.01}

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class PlainLinear(nn.Module):
    """x @ weight.T + bias; inference only.

    Args:
        weight: (out, in); kept.
        bias: (out,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out)."""
        return linear(x, self.weight, self.bias)


class Rotation:
    """Rotary embedding (RoFormer, arXiv 2104.09864), halves of D paired as transformers does; shared by all layers.

    What depends on the step alone is worked out once for each pair of cosines and sines that the layers are given.
    """

    def __init__(self) -> None:
        self._sin: Tensor | None = None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (N, heads, D); cos, sin: (1, N, D); returns (N, heads, D)."""
        half = x.shape[-1] // 2
        if self._sin is not sin:
            self._sin, self._cosines = sin, cos.transpose(0, 1)
            self._sines = torch.cat([-sin[..., :half], sin[..., half:]], -1).transpose(0, 1)
        return torch.addcmul(x * self._cosines, x.roll(half, -1), self._sines)


class FusedLayer(nn.Module):
    """Stands where a transformers decoder layer was.

    Args:
        layer: the original, one that `can_fuse` accepts.
        window: its sliding window; None = it sees all.
        rotate: the model's.
        attend: attention over the cache.
        make_linear: makes the products.
    """

    def __init__(
        self, layer: Any, window: int | None, rotate: Rotation, attend: Attend, make_linear: MakeLinear
    ) -> None:
        super().__init__()
        self._rotate = rotate
        attention, mlp = layer.self_attn, layer.mlp
        self._window, self._scale = window, float(attention.scaling)
        self._attend, self.layer_idx = attend, int(attention.layer_idx)
        self._width = int(attention.head_dim)
        self._heads = attention.q_proj.out_features // self._width
        self._kv_heads = attention.k_proj.out_features // self._width
        self._inner = mlp.gate_proj.out_features
        self._norms = [_norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)]
        self._head_norms = [_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
        self._qkv = make_linear(*_stacked([attention.q_proj, attention.k_proj, attention.v_proj]))
        self._out = make_linear(*_stacked([attention.o_proj]))
        self._gate_up = make_linear(*_stacked([mlp.gate_proj, mlp.up_proj]))
        self._down = make_linear(*_stacked([mlp.down_proj]))
        # Read by the bodies of some transformers versions.
        self.attention_type = getattr(layer, "attention_type", "full_attention")

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
    ) -> Tensor:
        """hidden_states: (1, N, hidden) -> the same; position_embeddings: cosines and sines, (1, N, D)."""
        x = hidden_states[0]
        heads, kv_heads, width = self._heads, self._kv_heads, self._width
        packed = self._qkv(_normed(x, self._norms[0])).view(-1, heads + 2 * kv_heads, width)
        turned = packed[:, : heads + kv_heads]
        if self._head_norms[0] is not None:
            query, key = turned[:, :heads], turned[:, heads:]
            turned = torch.cat([_normed(query, self._head_norms[0]), _normed(key, self._head_norms[1])], 1)
        turned = self._rotate(turned, *position_embeddings)
        query, key, value = turned[:, :heads], turned[:, heads:], packed[:, heads + kv_heads :]
        seen = self._attend(self.layer_idx, query, key, value, self._scale, self._window)
        x = self._out(seen.reshape(-1, heads * width)).add_(x)
        gate_up = self._gate_up(_normed(x, self._norms[1]))
        inner = silu(gate_up[:, : self._inner]).mul_(gate_up[:, self._inner :])
        return self._down(inner).add_(x)[None]


def can_fuse(layer: Any) -> bool:
    """Whether a decoder layer has the parts, and no others, that `FusedLayer` knows."""
    parts = {name: set(dict(layer.named_children())) for name, layer in layer.named_modules() if name.count(".") < 1}
    head_norms = {"q_norm", "k_norm"}
    attention = parts.get("self_attn", set())
    return (
        parts.get("") == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and attention - head_norms == set(_ATTENTION)
        and attention & head_norms in (set(), head_norms)
        and parts.get("mlp") == {*_MLP, "act_fn"}
        and all(type(getattr(layer.self_attn, name)) is nn.Linear for name in _ATTENTION)
        and all(type(getattr(layer.mlp, name)) is nn.Linear for name in _MLP)
        and layer.mlp.act_fn.__class__.__name__ in ("SiLU", "SiLUActivation")
    )


def fuse_layers(
    model: Any,
    *,
    windows: Mapping[int, int | None],
    attend: Attend,
    make_linear: MakeLinear,
    probe: Callable[[], object],
) -> int:
    """Swap a model's decoder layers for fused ones, in place, where they compute the same.

    A layer's weights are dropped as soon as it is swapped, so that no more than one is held twice.

    Args:
        model: of transformers, its attention switched to the one that `attend` is.
        windows: each layer's sliding window; filled by `probe` at the latest.
        probe: runs the model on a few rows. The layers see the same rows again while they are compared.

    Returns:
        How many were swapped.
    """
    stack = getattr(getattr(model, "model", None), "layers", None)
    if model.config.model_type not in FAMILIES or stack is None or not all(map(can_fuse, stack)):
        return 0
    seen: dict[int, tuple[Any, Any, Tensor]] = {}

    def record(index: int, _: nn.Module, inputs: Any, named: Any, output: Tensor) -> None:
        seen[index] = (inputs, named, output)

    hooks = [
        layer.register_forward_hook(partial(record, index), with_kwargs=True) for index, layer in enumerate(stack)
    ]
    probe()
    for hook in hooks:
        hook.remove()
    swapped, rotate = 0, Rotation()
    for index, layer in enumerate(stack):
        inputs, named, expected = seen[index]
        fused = FusedLayer(layer, windows[layer.self_attn.layer_idx], rotate, attend, make_linear)
        got = fused(*inputs, **named)
        error = float((got - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCES.get(expected.dtype, 0.0):  # NaN too
            log.warning("decoder layer %d is run as it is: fused, it is off by %.3g", index, error)
            continue
        stack[index] = fused
        swapped += 1
    return swapped


def _norm(module: Any) -> tuple[Tensor, float] | None:
    """An RMS norm's weight and epsilon."""
    return None if module is None else (module.weight.detach(), float(module.variance_epsilon))


def _normed(x: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    assert norm is not None
    weight, epsilon = norm
    return rms_norm(x, weight.shape, weight, epsilon)


def _stacked(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """(sum of out, in) weight and bias of linear layers on the same input."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
    return weight, torch.cat(biases)
