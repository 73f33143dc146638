"""`StepGraphs`: a verify step recorded once per size and replayed with one call, so that Python launches nothing.

A step of a large model is hundreds of kernels, each of which takes a GPU less time than Python takes to launch it. A
CUDA graph holds the launches; it always reads the same memory, so a step's inputs are written there first, and it
always has the same size, so steps are padded up to a *tier* (`graftree.models.tiers`).

Padding rows belong to no sequence: their keys go to a scrap block that no sequence has, they see nothing, and nobody
sees them. What attention knows of a step beside the inputs stands in a reserved layout (`kernels.static`,
`kernels.triton_plan`), which is refilled for each step.

What is recorded: steps all of whose rows' logits are wanted, as a tree's and a single token's are. Prefill chunks and
what no tier holds run as they are. Those are bound by arithmetic, and Python keeps ahead of them.

What a session alone asks for is recorded at start-up, other tiers when they are asked for the second time, while
fewer than `MAX_GRAPHS` are and they take less than the memory planned for them. All of one model share one pool of
memory and one place for logits, as they never run at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from graftree.models.bundle import Bundle
from graftree.models.rows import Rows
from graftree.models.step_inputs import Arrays, padded_arrays, step_layout
from graftree.models.tiers import Tier, Tiers
from kernels import TreeLayout

log = logging.getLogger(__name__)

MAX_GRAPHS = 96
RECORD_AT = 2  # a tier asked for once may never be again

Replay: TypeAlias = Callable[[], Tensor]


class Attention(Protocol):
    """What is needed of an implementation in `kernels` whose launches can be recorded."""

    def reserve(
        self, tree: TreeLayout, *, rows: int, sequences: int, sequence_rows: int, tree_rows: int
    ) -> TreeLayout:
        """A layout like this one whose plans have room for other steps."""

    def refill(self, static: TreeLayout, tree: TreeLayout) -> None:
        """Put a step into its plans, which are there after its first use."""


class Recorder(Protocol):
    """Turns launches into something that can be replayed. `used_bytes`: what all recordings take."""

    @property
    def used_bytes(self) -> int: ...

    def record(self, run: Replay) -> Replay:
        """`run`, which reads and writes the same memory each time it is called, as one call."""


class NoRecorder:
    """On a CPU there is nothing to record: a replay runs the same function on the same memory."""

    used_bytes = 0

    def record(self, run: Replay) -> Replay:
        return run


class CudaRecorder:
    """CUDA graphs. Used on one thread; other threads may use the device meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.used_bytes = 0
        self._device = device
        self._pool: Any = None  # torch names no type for it
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Replay) -> Replay:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.mem_get_info(self._device)[0]
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # libraries choose and compile what they run, which cannot be recorded
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        self._pool = self._pool or graph.pool()
        torch.cuda.synchronize(self._device)
        self.used_bytes += max(0, before - torch.cuda.mem_get_info(self._device)[0])

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


# What a step's model and attention need: inputs as tensors, and the layout that was bound to them -> (N, V) logits.
Run: TypeAlias = Callable[[Mapping[str, Tensor], TreeLayout], Tensor]


@dataclass(frozen=True)
class _Graph:
    inputs: Bundle
    layout: TreeLayout
    replay: Replay


@dataclass
class GraphCounts:
    """Steps since the start: replayed, and run without a graph: they fitted no tier, or one that was not recorded."""

    replayed: int = 0
    unfit: int = 0
    unrecorded: int = 0


@dataclass
class StepGraphs:
    """The recorded steps of one model.

    Args:
        run: the model's step on given inputs; it must not wait for the device.
        attention: the recorded implementation.
        recorder: of the device.
        device: where inputs lie.
        block_size: tokens per KV block.
        scrap: a block that no sequence has.
        max_bytes: no tier is recorded once the recordings take this.
        tiers: the sizes.
        record_at: a tier is recorded when it is asked for as often as this.
    """

    run: Run
    attention: Attention
    recorder: Recorder
    device: torch.device
    block_size: int
    scrap: int
    max_bytes: int
    tiers: Tiers = field(default_factory=Tiers)
    record_at: int = RECORD_AT
    counts: GraphCounts = field(default_factory=GraphCounts)
    _graphs: dict[Tier, _Graph] = field(default_factory=dict)
    _asked: Counter[Tier] = field(default_factory=Counter)
    _logits: Tensor | None = None
    _broken: bool = False

    @property
    def recorded(self) -> Sequence[Tier]:
        """The tiers that can be replayed."""
        return list(self._graphs)

    def forward(self, batch: Sequence[Rows]) -> Tensor | None:
        """(N, V) float32 logits of all rows of a step, the caller's own; None = the step must run without a graph."""
        tier = self.tiers.of(batch)
        if tier is None:
            self.counts.unfit += 1
            return None
        self._asked[tier] += 1
        if tier not in self._graphs and (self._asked[tier] < self.record_at or not self.prepare(tier)):
            self.counts.unrecorded += 1
            return None
        graph = self._graphs[tier]
        graph.inputs.fill(self._arrays(batch, tier))
        self.attention.refill(graph.layout, step_layout(batch))
        self.counts.replayed += 1
        count = sum(len(rows.token_ids) for rows in batch)
        return graph.replay()[:count].to(torch.float32, copy=True)

    def prepare(self, *tiers: Tier) -> bool:
        """Record tiers, as far as there is room.

        Returns:
            Whether all of them are recorded now.
        """
        for tier in tiers:
            full = len(self._graphs) >= MAX_GRAPHS or self.recorder.used_bytes >= self.max_bytes
            if tier not in self._graphs and not full and not self._broken:
                self._record(tier)
        return all(tier in self._graphs for tier in tiers)

    def _record(self, tier: Tier) -> None:
        inputs = Bundle(self._arrays((), tier), self.device)
        layout = self.attention.reserve(
            step_layout(()),
            rows=tier.rows,
            sequences=tier.sequences,
            sequence_rows=-(-tier.rows // tier.sequences),
            tree_rows=tier.tree_rows,
        )
        try:
            replay = self.recorder.record(lambda: self._shared(self.run(inputs.tensors, layout)))
            replay()  # the plans of the layout are there at last
        except RuntimeError as error:  # steps go on without graphs
            self._broken = True
            log.warning("a step of %d rows could not be recorded, steps run without graphs: %s", tier.rows, error)
            return
        self._graphs[tier] = _Graph(inputs, layout, replay)

    def _shared(self, logits: Tensor) -> Tensor:
        """In the place that all recordings have for them; the first run, which is not recorded, makes it."""
        if self._logits is None:
            self._logits = logits.new_empty((self.tiers.rows[-1], logits.shape[1]))
        return self._logits[: len(logits)].copy_(logits)

    def _arrays(self, batch: Sequence[Rows], tier: Tier) -> Arrays:
        """A step's inputs, padded: their shapes depend on the tier alone."""
        return padded_arrays(
            batch,
            self.block_size,
            rows=tier.rows,
            sequences=tier.sequences,
            width=-(-tier.length // self.block_size),
            scrap=self.scrap,
        )


def recorder_for(device: torch.device) -> Recorder:
    """What records steps on a device."""
    return CudaRecorder(device) if device.type == "cuda" else NoRecorder()


def attention_for(implementation: str, key_cache: Tensor, heads: int) -> tuple[str, Attention] | None:
    """The implementation that recorded steps run with, and its name.

    Args:
        implementation: of steps that are not recorded; one that works with reserved layouts is kept, with "auto" it
            is Triton's on a GPU.
        key_cache: (num_blocks, block_size, KVH, D), a layer's.
        heads: query heads.

    Returns:
        None: none of those that could be meant can be recorded.
    """
    if implementation == "static" or (implementation == "auto" and not key_cache.is_cuda):
        from kernels import static

        return "static", static
    if implementation in ("auto", "triton") and find_spec("triton") is not None:
        from kernels import triton_plan
        from kernels.triton_attention import refusal

        query = key_cache.new_empty((0, heads, key_cache.shape[-1]))
        return None if refusal(query, key_cache) else ("triton", triton_plan)
    return None
