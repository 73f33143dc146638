"""Attention over a paged cache, under the name `ATTENTION` of transformers' `AttentionInterface`.

It stores a step's keys and values in the cache and calls `kernels.tree_attention`. transformers builds no mask for a
name it has no mask function for.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from graftree.errors import Incompatible
from graftree.models.paged import PagedKV
from kernels import TreeLayout, tree_attention

ATTENTION = "graftree_tree"


@dataclass(frozen=True)
class Step:
    """What the attention of every layer needs of the step under way.

    Attributes:
        kv: where the rows go.
        layout: who sees whom.
        slots: (N,) int64 physical rows of the step's rows.
        block_tables, context_lens, implementation: of `kernels.tree_attention`.
        windows: the sliding window that each layer has named.
    """

    kv: PagedKV
    layout: TreeLayout
    slots: Tensor
    block_tables: Tensor
    context_lens: Tensor
    implementation: str
    windows: dict[int, int | None] = field(default_factory=dict)


# A context variable rather than a keyword argument through the model: it reaches attention in every body, also in
# those that pass no keyword arguments on.
STEP: ContextVar[Step] = ContextVar("graftree_step")

# What attention layers pass that says nothing about the result here: the mask and positions are ours.
_UNSUPPORTED = {"s_aux": "attention sinks", "position_bias": "a position bias", "head_mask": "a head mask"}


def attend(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Store one layer's rows and attend. query: (N, H, D); key, value: (N, KVH, D); returns (N, H, D)."""
    step = STEP.get()
    step.kv.write(layer, step.slots, key, value)
    return tree_attention(
        query,
        step.kv.keys[layer],
        step.kv.values[layer],
        step.block_tables,
        step.context_lens,
        step.layout,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        implementation=step.implementation,
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function. query: (1, H, N, D); key, value: (1, KVH, N, D); returns (1, N, H, D)."""
    for name, what in _UNSUPPORTED.items():
        if extra.get(name) is not None:
            raise Incompatible(f"the model's attention uses {what}")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    STEP.get().windows[layer] = sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(layer, query, key, value, scale, sliding_window, softcap)[None], None


AttentionInterface.register(ATTENTION, _attention)
