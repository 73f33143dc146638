"""`TreeRunner`: one ragged forward of an unmodified transformers model over many sequences' trees.

The rows of all sequences are packed into one [1, N] batch with explicit positions. Attention is ours
(`graftree.models.attention`); layers of a known form are swapped for fused ones, linear layers for packed ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graftree.errors import GraftreeError, Incompatible, InvalidArgument
from graftree.models.attention import ATTENTION, STEP, Step, attend
from graftree.models.fused import PlainLinear, fuse_layers
from graftree.models.packed import PackedLinear, can_pack, pack_linears
from graftree.models.paged import BlockPool, PagedKV
from graftree.models.rows import Rows as Rows
from graftree.models.rows import chain_rows as chain_rows
from graftree.models.steady import Steady, agreeing, spare_blocks
from graftree.models.support import TESTED_FAMILIES, check, window_of
from kernels import IMPLEMENTATIONS, TreeLayout

if TYPE_CHECKING:
    from graftree.models.load import LoadedModel

log = logging.getLogger(__name__)


class TreeRunner:
    """A model, its paged cache, and the step that runs both.

    Args:
        loaded: the model; its attention is switched to ours, and on the CPU in float32 its linear layers are
            packed for oneDNN (`graftree.models.packed`).
        kv_tokens: capacity of the cache in tokens, rounded down to whole blocks.
        block_size: tokens per block.
        implementation: of `kernels.tree_attention`.
        deterministic: a row's logits get the same bits whatever shares the step (`graftree.models.steady`); attention
            is then the one made for that.

    Raises:
        Incompatible: the model cannot be run exactly this way; the message says why.
        InvalidArgument: kv_tokens, block_size or implementation out of range.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_tokens: int,
        block_size: int = 16,
        implementation: str = "auto",
        deterministic: bool = False,
    ) -> None:
        if implementation not in IMPLEMENTATIONS:
            raise InvalidArgument("implementation", implementation, f"one of {', '.join(IMPLEMENTATIONS)}")
        if block_size < 1:
            raise InvalidArgument("block_size", block_size, "at least 1")
        if kv_tokens < block_size:
            raise InvalidArgument("kv_tokens", kv_tokens, f"at least one block of {block_size}")
        self.spec = loaded.spec
        self.rows_computed = 0
        self.implementation = "invariant" if deterministic else implementation
        self._model = loaded.model
        check(self._model)
        self._device = self._model.device
        config = self._model.config
        known = config.model_type in TESTED_FAMILIES or config._attn_implementation == ATTENTION
        expected = None if known else _ordinary_logits(self._model)
        self._model.set_attn_implementation(ATTENTION)
        if config._attn_implementation != ATTENTION:
            raise Incompatible(f"{type(self._model).__name__} does not use transformers' AttentionInterface")
        num_blocks = kv_tokens // block_size
        heads = config.num_attention_heads
        self.kv = PagedKV(
            layers=config.num_hidden_layers,
            num_blocks=num_blocks + (spare_blocks(block_size) if deterministic else 0),
            block_size=block_size,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=self._model.dtype,
            device=self._device,
        )
        self.pool = BlockPool(num_blocks)
        if expected is not None:
            self._self_check(expected)
        self._fuse()
        if can_pack(self._model):
            pack_linears(self._model)
        self._steady: Steady | None = None
        if deterministic:
            sizes = agreeing(self._forward, self.kv, self.spec)
            self._steady = Steady(self._forward, sizes, range(num_blocks, self.kv.num_blocks))
            log.info("steps have fixed sizes: %s rows", sizes)

    @property
    def sizes(self) -> Sequence[int]:
        """The rows that a forward may have; empty = any number."""
        return self._steady.sizes if self._steady else ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes."""
        return self.kv.bytes_per_token

    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Run one step: the rows' keys and values go into the cache, the wanted rows' logits come back.

        Args:
            batch: one entry per sequence; an entry may have no rows.

        Returns:
            Per sequence (len(rows.logits), vocab_size) float32 on the model's device, the model's own logits
            (with its scaling or softcap, before any sampling processor).

        Raises:
            InvalidArgument: rows that do not fit the sequence's blocks or the model's context.
        """
        for rows in batch:
            self._check(rows)
        if not any(rows.token_ids for rows in batch):
            return [self._no_logits() for _ in batch]
        logits = self._steady.forward(batch) if self._steady else self._forward(batch)
        self.rows_computed += sum(len(rows.token_ids) for rows in batch)
        return list(logits.split([len(rows.logits) for rows in batch]))

    def _forward(self, batch: Sequence[Rows], wanted: int = 0, kv: PagedKV | None = None) -> Tensor:
        """One forward; at least `wanted` rows of logits, the first packed row's where fewer are asked for."""
        step = self._step(batch)
        token_ids, positions, rows = self._inputs(batch)
        rows = torch.nn.functional.pad(rows, (0, max(0, wanted - len(rows))))
        return self._run(step if kv is None else replace(step, kv=kv), token_ids, positions, rows)

    @torch.inference_mode()
    def _run(self, step: Step, token_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        token = STEP.set(step)
        try:
            output = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted
            )
        finally:
            STEP.reset(token)
        return output.logits[0].float()

    def _step(self, batch: Sequence[Rows]) -> Step:
        size = self.kv.block_size
        widest = max(len(rows.blocks) for rows in batch)
        tables = np.zeros((len(batch), widest), np.int32)
        slots = []
        for index, rows in enumerate(batch):
            tables[index, : len(rows.blocks)] = rows.blocks
            start = rows.context_len + rows.tree_len
            logical = np.arange(start, start + len(rows.token_ids))
            slots.append(tables[index, logical // size].astype(np.int64) * size + logical % size)
        return Step(
            kv=self.kv,
            layout=TreeLayout.of([(rows.tree_len, rows.masks) for rows in batch]),
            slots=torch.from_numpy(np.concatenate(slots)).to(self._device),
            block_tables=torch.from_numpy(tables).to(self._device),
            context_lens=torch.tensor([rows.context_len for rows in batch], dtype=torch.int32, device=self._device),
            implementation=self.implementation,
        )

    def _inputs(self, batch: Sequence[Rows]) -> tuple[Tensor, Tensor, Tensor]:
        """Packed token ids and positions, and the packed rows whose logits are wanted."""
        wanted: list[int] = []
        start = 0
        for rows in batch:
            wanted.extend(start + index for index in rows.logits)
            start += len(rows.token_ids)
        return (
            torch.tensor([token for rows in batch for token in rows.token_ids], device=self._device),
            torch.tensor([position for rows in batch for position in rows.positions], device=self._device),
            torch.tensor(wanted, dtype=torch.int64, device=self._device),
        )

    def _no_logits(self) -> Tensor:
        return torch.empty((0, self._model.config.vocab_size), device=self._device)

    def _check(self, rows: Rows) -> None:
        count = len(rows.token_ids)
        for name in ("positions", "masks"):
            if len(getattr(rows, name)) != count:
                raise InvalidArgument(f"rows.{name}", len(getattr(rows, name)), f"one per token, {count}")
        total, room = rows.context_len + rows.tree_len + count, len(rows.blocks) * self.kv.block_size
        if total > room:
            raise InvalidArgument("rows.token_ids", total, f"at most {room} rows in the sequence's blocks")
        limit = self.spec.max_context
        if count and limit and max(rows.positions) >= limit:
            raise InvalidArgument("rows.positions", max(rows.positions), f"below {limit}")
        if any(not 0 <= index < count for index in rows.logits):
            raise InvalidArgument("rows.logits", list(rows.logits), f"indices of {count} rows")

    @torch.inference_mode()
    def _fuse(self) -> None:
        """Swap layers of a known form for faster ones that compute the same."""
        blocks = range(-(-len(_PROBE.token_ids) // self.kv.block_size))
        # Its own cache: the smallest that can be asked for does not hold the probe.
        cache = PagedKV.like(self.kv, num_blocks=len(blocks))
        rows = replace(_PROBE, blocks=blocks, token_ids=[t % self.spec.vocab_size for t in _PROBE.token_ids])
        step = replace(self._step([rows]), kv=cache)
        token = STEP.set(step)
        try:
            fuse_layers(
                self._model,
                windows=step.windows,
                attend=attend,
                make_linear=PackedLinear if can_pack(self._model) else PlainLinear,
                probe=lambda: self._run(step, *self._inputs([rows])),
            )
        finally:
            STEP.reset(token)

    def _self_check(self, expected: Tensor) -> None:
        """Compare a small tree with what the model said with its own attention."""
        name, layers = type(self._model).__name__, len(self.kv.keys)
        blocks = self.pool.allocate(-(-len(_PROBE.token_ids) // self.kv.block_size))
        rows = replace(_PROBE, blocks=blocks)
        step = self._step([rows])
        try:
            got = self._run(step, *self._inputs([rows]))
        except GraftreeError:
            raise
        except Exception as error:
            raise Incompatible(f"{name} failed its self-check: {error}") from error
        finally:
            self.pool.free(blocks)
        if set(step.windows) != set(range(layers)):
            raise Incompatible(f"{name}: {len(step.windows)} of {layers} layers use transformers' AttentionInterface")
        tolerance = 1e-3 if self._model.dtype == torch.float32 else 0.1
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
            raise Incompatible(f"{name} computes otherwise with tree attention: its positions or masks are its own")
        for layer, window in step.windows.items():
            if window != window_of(self._model.config, layer):
                raise Incompatible(f"{name} does not tell its attention the sliding window of layer {layer}")


# The self-check's tree, two branches behind a chain, and its paths as (tokens, rows).
_PROBE = Rows(
    blocks=(),
    context_len=0,
    tree_len=0,
    token_ids=(1, 2, 3, 4, 5),
    positions=(0, 1, 2, 2, 3),
    masks=(0b1, 0b11, 0b111, 0b1011, 0b11011),
    logits=range(5),
)
_PROBE_PATHS = (((1, 2, 3), (0, 1, 2)), ((1, 2, 4, 5), (0, 1, 3, 4)))


@torch.inference_mode()
def _ordinary_logits(model: Any) -> Tensor:
    """(5, vocab) logits of `_PROBE` by ordinary forwards, one per path."""
    expected = torch.zeros((len(_PROBE.token_ids), model.config.vocab_size), device=model.device)
    for tokens, rows in _PROBE_PATHS:
        try:
            logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
        except Exception as error:
            raise Incompatible(f"{type(model).__name__} failed an ordinary forward: {error}") from error
        expected[list(rows)] = logits[0].float()
    return expected
