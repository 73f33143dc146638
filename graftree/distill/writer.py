"""`Writer`: many streams through the LLM in lockstep, one token each per step.

All streams are equally long at every moment, so their cache is one tensor per layer and no row is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from graftree.distill.streams import Stream
from graftree.models.load import LoadedModel
from graftree.models.packed import can_pack, pack_linears
from graftree.models.support import check

ATTENTION = "graftree_lockstep"


@dataclass(frozen=True)
class Written:
    """What a batch of streams said.

    Attributes:
        token_ids: (B, T) int32.
        roles: (B, T) uint8, whose token each is (`streams.FORCED`, `USER`, `ANSWER`).
        top_ids, top_log_probs: (B, T, K) int32 and float16, the LLM's most likely tokens *after* each token and
            their natural log probabilities at temperature 1.
    """

    token_ids: Tensor
    roles: Tensor
    top_ids: Tensor
    top_log_probs: Tensor


@dataclass
class _Cache:
    """Keys and values of all layers, (layers, B, KVH, T, D) each, filled up to `length` tokens."""

    keys: Tensor
    values: Tensor
    length: int = 0


_CACHE: ContextVar[_Cache] = ContextVar("graftree_lockstep")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One new token per stream. query: (B, H, 1, D); key, value: (B, KVH, 1, D); returns (B, 1, H, D)."""
    cache, layer = _CACHE.get(), int(module.layer_idx)  # type: ignore[arg-type]
    batch, heads, _one, width = query.shape
    kv_heads = key.shape[1]
    now = cache.length
    cache.keys[layer, :, :, now] = key[:, :, 0]
    cache.values[layer, :, :, now] = value[:, :, 0]
    begin = 0 if sliding_window is None else max(0, now + 1 - sliding_window)
    keys, values = cache.keys[layer, :, :, begin : now + 1], cache.values[layer, :, :, begin : now + 1]
    folded = query.view(batch, kv_heads, heads // kv_heads, width)
    if softcap is None:
        output = scaled_dot_product_attention(folded, keys, values, scale=scaling)  # (B, KVH, G, D)
    else:
        scores = torch.matmul(folded, keys.transpose(-1, -2)).float()  # (B, KVH, G, t)
        scores *= width**-0.5 if scaling is None else scaling
        scores = torch.tanh(scores / softcap) * softcap
        output = torch.matmul(torch.softmax(scores, -1).to(query.dtype), values)
    return output.reshape(batch, 1, heads, width), None


AttentionInterface.register(ATTENTION, _attention)


class Writer:
    """The LLM as author.

    Args:
        loaded: the LLM; its attention is switched to the lockstep kind and its linear layers are packed.
        top: most likely tokens that are kept per position.

    Raises:
        Incompatible: the model does not use transformers' `AttentionInterface`.
    """

    def __init__(self, loaded: LoadedModel, *, top: int) -> None:
        self._model = loaded.model
        check(self._model)
        self._top = min(top, loaded.spec.vocab_size)
        self._known = loaded.spec.token_count or loaded.spec.vocab_size
        self._model.set_attn_implementation(ATTENTION)
        if can_pack(self._model):
            pack_linears(self._model)

    @torch.inference_mode()
    def write(self, streams: Sequence[Stream], length: int, seed: int) -> Written:
        """Let every stream say `length` tokens.

        Args:
            streams: B of them, new; each says at which temperature the LLM draws next.
            length: T.
            seed: of the draws among the `top` tokens; the same arguments give the same text.
        """
        batch, device = len(streams), self._model.device
        generator = torch.Generator().manual_seed(seed)
        written = Written(
            torch.zeros((batch, length), dtype=torch.int32),
            torch.zeros((batch, length), dtype=torch.uint8),
            torch.zeros((batch, length, self._top), dtype=torch.int32),
            torch.zeros((batch, length, self._top), dtype=torch.float16),
        )
        token = _CACHE.set(self._new_cache(batch, length))
        try:
            picks = [0] * batch
            for position in range(length):
                said = [stream.next(pick) for stream, pick in zip(streams, picks, strict=True)]
                ids = torch.tensor([token_id for token_id, _ in said])
                written.token_ids[:, position] = ids
                written.roles[:, position] = torch.tensor([role for _, role in said], dtype=torch.uint8)
                top_ids, log_probs = self._step(ids.to(device), position)
                written.top_ids[:, position] = top_ids.to(torch.int32)
                written.top_log_probs[:, position] = log_probs.to(torch.float16)
                picks = _pick(top_ids, log_probs, [stream.temperature for stream in streams], generator)
        finally:
            _CACHE.reset(token)
        return written

    def _new_cache(self, batch: int, length: int) -> _Cache:
        config = self._model.config
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = (config.num_hidden_layers, batch, kv_heads, length, width)
        dtype, device = self._model.dtype, self._model.device
        return _Cache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def _step(self, token_ids: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """(B, K) most likely next ids and their log probabilities, on the CPU."""
        cache = _CACHE.get()
        cache.length = position
        positions = torch.full((1, 1), position, device=token_ids.device)
        output = self._model(input_ids=token_ids[:, None], position_ids=positions, use_cache=False)
        logits = output.logits[:, 0, : self._known].float()
        values, ids = torch.topk(logits, self._top, dim=-1)
        return ids.cpu(), (values - torch.logsumexp(logits, -1, keepdim=True)).cpu()


def _pick(ids: Tensor, log_probs: Tensor, temperatures: Sequence[float], generator: torch.Generator) -> list[int]:
    """One of each stream's ids, drawn at its temperature by the Gumbel-max trick."""
    uniform = torch.rand(log_probs.shape, generator=generator).clamp_(1e-12, 1 - 1e-7)
    noise = -torch.log(-torch.log(uniform))
    chosen = (log_probs + torch.tensor(temperatures)[:, None] * noise).argmax(-1)
    picked: list[int] = ids.gather(1, chosen[:, None])[:, 0].tolist()
    return picked
