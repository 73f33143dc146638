"""`TreeRunner`: one ragged forward of an unmodified transformers model over many sequences' trees.

The rows of all sequences are packed into one [1, N] batch with explicit positions. Attention is ours
(`graftree.models.attention`); layers of a known form are swapped for fused ones, linear layers for packed ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from graftree.errors import GraftreeError, Incompatible, InvalidArgument
from graftree.models.attention import ATTENTION, STEP, Step, attend
from graftree.models.bundle import to_device
from graftree.models.fused import MakeLinear, PlainLinear, fuse_layers
from graftree.models.graphs import StepGraphs, attention_for, recorder_for
from graftree.models.int8 import round_linears
from graftree.models.packed import PackedLinear, can_pack, pack_linears
from graftree.models.paged import BlockPool, PagedKV
from graftree.models.rows import Rows as Rows
from graftree.models.rows import chain_rows as chain_rows
from graftree.models.spec import ModelSpec
from graftree.models.steady import Steady, agreeing, spare_blocks
from graftree.models.step_inputs import step_arrays, step_layout
from graftree.models.support import TESTED_FAMILIES, check, window_of
from kernels import IMPLEMENTATIONS, TreeLayout

log = logging.getLogger(__name__)


class Loaded(Protocol):
    """What is needed of `graftree.models.load.LoadedModel`."""

    @property
    def model(self) -> Any: ...
    @property
    def spec(self) -> ModelSpec: ...


class TreeRunner:
    """A model, its paged cache, and the step that runs both.

    Args:
        loaded: the model; its attention is switched to ours, and its linear layers are packed for oneDNN
            (`graftree.models.packed`) on a CPU that has it, or rounded to int8 where it says so.
        kv_tokens: capacity of the cache in tokens, rounded down to whole blocks.
        block_size: tokens per block.
        implementation: of `kernels.tree_attention`.
        deterministic: a row's logits get the same bits whatever shares the step (`graftree.models.steady`); attention
            is then the one made for that.
        graph_bytes: memory that recorded steps may take (`graftree.models.graphs`); 0 = none are recorded, as of a
            deterministic runner. On a CPU nothing is recorded, but steps run padded and from the same memory.

    Attributes:
        graphs: the recorded steps; None = there are none.

    Raises:
        Incompatible: the model cannot be run exactly this way; the message says why.
        InvalidArgument: kv_tokens, block_size or implementation out of range.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        kv_tokens: int,
        block_size: int = 16,
        implementation: str = "auto",
        deterministic: bool = False,
        graph_bytes: int = 0,
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
            num_blocks=num_blocks + (spare_blocks(block_size) if deterministic else bool(graph_bytes)),
            block_size=block_size,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=self._model.dtype,
            device=self._device,
        )
        self.pool = BlockPool(num_blocks)
        if expected is not None:
            self._self_check(expected)
        rounded = getattr(loaded, "weights", "full") == "int8"
        self._fuse(PackedLinear if can_pack(self._model) and not rounded else PlainLinear)
        if rounded:
            round_linears(self._model)
        elif can_pack(self._model):
            pack_linears(self._model)
        self._steady: Steady | None = None
        if deterministic:
            sizes = agreeing(self._forward, self.kv, self.spec)
            self._steady = Steady(self._forward, sizes, range(num_blocks, self.kv.num_blocks))
            log.info("steps have fixed sizes: %s rows", sizes)
        self.graphs = self._step_graphs(num_blocks, graph_bytes) if graph_bytes and not deterministic else None

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
        with torch.inference_mode():
            logits = None if self.graphs is None else self.graphs.forward(batch)
            if logits is None:
                logits = self._steady.forward(batch) if self._steady else self._forward(batch)
        self.rows_computed += sum(len(rows.token_ids) for rows in batch)
        return list(logits.split([len(rows.logits) for rows in batch]))

    def prepare(self, batch: Sequence[Rows] | None = None) -> None:
        """Record steps of a batch's size, where steps are recorded, or those that are usual; nothing of it is run."""
        if self.graphs is None:
            return
        tiers = self.graphs.tiers
        own = tiers.usual(min(self.spec.max_context, self.pool.num_blocks * self.kv.block_size))
        if batch is not None:
            own = [tier] if (tier := tiers.of(batch)) is not None else []
        with torch.inference_mode():
            self.graphs.prepare(*own)

    def _forward(self, batch: Sequence[Rows], wanted: int = 0, kv: PagedKV | None = None) -> Tensor:
        """One forward; at least `wanted` rows of logits, the first packed row's where fewer are asked for."""
        inputs = self._inputs(batch, wanted)
        return self._run(self._step(inputs, step_layout(batch), kv=kv), inputs)

    @torch.inference_mode()
    def _run(self, step: Step, inputs: Mapping[str, Tensor]) -> Tensor:
        return self._logits(step, inputs).float()

    def _logits(self, step: Step, inputs: Mapping[str, Tensor]) -> Tensor:
        """(rows, V) in the model's dtype, of the rows that `inputs` has as wanted, or of all."""
        token = STEP.set(step)
        try:
            with self._on_device():
                output = self._model(
                    input_ids=inputs["token_ids"][None],
                    position_ids=inputs["positions"][None],
                    use_cache=False,
                    logits_to_keep=inputs.get("wanted", 0),
                )
        finally:
            STEP.reset(token)
        logits: Tensor = output.logits[0]
        return logits

    def _step(
        self, inputs: Mapping[str, Tensor], layout: TreeLayout, *, kv: PagedKV | None = None, implementation: str = ""
    ) -> Step:
        return Step(
            kv=kv or self.kv,
            layout=layout,
            slots=inputs["slots"],
            block_tables=inputs["block_tables"],
            context_lens=inputs["context_lens"],
            implementation=implementation or self.implementation,
        )

    def _inputs(self, batch: Sequence[Rows], wanted: int = 0) -> dict[str, Tensor]:
        """On the device, by one copy that the host does not wait for: `step_arrays`, and the rows wanted of N."""
        rows: list[int] = []
        start = 0
        for own in batch:
            rows.extend(start + index for index in own.logits)
            start += len(own.token_ids)
        rows.extend([0] * (wanted - len(rows)))
        arrays = {**step_arrays(batch, self.kv.block_size), "wanted": np.array(rows, np.int64)}
        return to_device(arrays, self._device)

    def _step_graphs(self, scrap: int, max_bytes: int) -> StepGraphs | None:
        heads = self._model.config.num_attention_heads
        found = attention_for(self.implementation, self.kv.keys[0], heads)
        if found is None:
            return None
        name, attention = found
        self.kv.clear([scrap])

        def run(inputs: Mapping[str, Tensor], layout: TreeLayout) -> Tensor:
            return self._logits(self._step(inputs, layout, implementation=name), inputs)

        return StepGraphs(
            run=run,
            attention=attention,
            recorder=recorder_for(self._device),
            device=self._device,
            block_size=self.kv.block_size,
            scrap=scrap,
            max_bytes=max_bytes,
        )

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, whatever the tensors' is."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

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
    def _fuse(self, make_linear: MakeLinear) -> None:
        """Swap layers of a known form for faster ones that compute the same."""
        blocks = range(-(-len(_PROBE.token_ids) // self.kv.block_size))
        # Its own cache: the smallest that can be asked for does not hold the probe.
        cache = PagedKV.like(self.kv, num_blocks=len(blocks))
        rows = replace(_PROBE, blocks=blocks, token_ids=[t % self.spec.vocab_size for t in _PROBE.token_ids])
        inputs = self._inputs([rows])
        step = self._step(inputs, step_layout([rows]), kv=cache)
        token = STEP.set(step)
        try:
            fuse_layers(
                self._model,
                windows=step.windows,
                attend=attend,
                make_linear=make_linear,
                probe=lambda: self._run(step, inputs),
            )
        finally:
            STEP.reset(token)

    def _self_check(self, expected: Tensor) -> None:
        """Compare a small tree with what the model said with its own attention."""
        name, layers = type(self._model).__name__, len(self.kv.keys)
        blocks = self.pool.allocate(-(-len(_PROBE.token_ids) // self.kv.block_size))
        rows = replace(_PROBE, blocks=blocks)
        inputs = self._inputs([rows])
        step = self._step(inputs, step_layout([rows]))
        try:
            got = self._run(step, inputs)
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
