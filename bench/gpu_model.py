"""A whole model's verify step on a GPU: over nodes, batch and context, replayed from a CUDA graph and as it is.

    python -m bench.gpu_model [--device cuda] [--seconds 150] [--quick] [--json FILE]

Random weights in the shape of an 8B model, bfloat16, made on the device; nothing is read from disk. A step is timed
from the call until its logits are there, Python's own time included, median of several, in turn with what it is
compared with. Whether results are right is checked first: an exit code of 1 means that they are not, or that a
target was missed; the names of figures about results begin with "error".

With `--device cpu` a tiny model runs the same code, without targets: there is nothing to record on a CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from bench import report
from bench.gpu_clock import Timed, copy_bandwidth, interleaved
from bench.gpu_exact import against_forwards, replayed_against_as_it_is, sampling
from bench.gpu_lab import LARGE, TINY, Loaded, as_it_is, machine, random_model, release, step, weight_bytes
from bench.tables import Table
from graftree.models.runner import TreeRunner
from graftree.step_time import Sample, StepTime

BATCHES, CONTEXTS, NODES = (1, 8, 32), (512, 4096), (0, 1, 8, 16, 32, 64, 128)  # 0 nodes = one token, plain
HELD_OUT = (16, 64)  # nodes that the step-time model has not seen
TARGET_NODES, TARGET = 64, 1.25
REPLAYED, AS_IT_IS = "replayed", "as it is"


@dataclass(frozen=True)
class Cell:
    batch: int
    context: int
    nodes: int

    @property
    def rows(self) -> int:
        return self.batch * (1 + self.nodes)


@dataclass
class Grid:
    """Times of all cells.

    Attributes:
        times: per cell, seconds replayed (where a tier holds it) and as it is.
        notes: what was left out, and why.
    """

    runner: TreeRunner
    device: torch.device
    rounds: int
    deadline: float
    times: dict[Cell, dict[str, float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def run(self, cell: Cell) -> None:
        """Time one cell."""
        runner, size = self.runner, self.runner.kv.block_size
        if time.monotonic() > self.deadline:
            self.notes[str(cell)] = "skipped: no time left"
            return
        if cell.batch * -(-(cell.context + 1 + cell.nodes) // size) > runner.pool.free_blocks:
            self.notes[str(cell)] = "skipped: its KV cache does not fit the memory"
            return
        batch = step(runner, cell.batch, cell.context, cell.nodes, seed=cell.nodes)
        things = {AS_IT_IS: Timed(lambda: as_it_is(runner, batch), 1, False)}
        assert runner.graphs is not None, "steps are recorded here"
        tier = runner.graphs.tiers.of(batch)
        runner.prepare(batch)
        if tier in runner.graphs.recorded:
            things[REPLAYED] = Timed(lambda: runner.forward(batch), 1, True)
        else:
            self.notes[str(cell)] = "not replayed: " + ("larger than any tier" if tier is None else "no room")
        try:
            self.times[cell] = interleaved(things, self.rounds, self.device)
        except torch.cuda.OutOfMemoryError:
            self.notes[str(cell)] = "skipped: its logits do not fit the memory"
        finally:
            release(runner, batch)

    def best(self, cell: Cell) -> float:
        """Seconds as the verifier would run it; NaN where it was not timed."""
        times = self.times.get(cell, {})
        return times.get(REPLAYED, times.get(AS_IT_IS, math.nan))

    def samples(self) -> dict[Cell, Sample]:
        return {
            cell: Sample(cell.rows, cell.batch, cell.batch * cell.context, self.best(cell)) for cell in self.times
        }


def figures(cell: Cell, grid: Grid, out: report.Report, *, targets: bool) -> None:
    """A step over a tree over a one-token step, which was timed before."""
    one = grid.best(Cell(cell.batch, cell.context, 0))
    name = f"batch {cell.batch}, context {cell.context}, {cell.nodes} nodes"
    out.add(f"{name}: step", grid.best(cell) * 1e3, "ms")
    if cell.nodes and not math.isnan(one):
        ratio, wanted = grid.best(cell) / one, targets and cell.batch == 1 and cell.nodes == TARGET_NODES
        target = {"target": f"<= {TARGET}", "met": ratio <= TARGET} if wanted else {}
        out.add(f"{name}: over a one-token step", ratio, "x", **target)  # type: ignore[arg-type]


def tables(grid: Grid, out: report.Report) -> None:
    """Rows = batch and context, columns = nodes."""
    nodes = sorted({cell.nodes for cell in grid.times})
    places = {f"batch {c.batch}, context {c.context}": (c.batch, c.context) for c in grid.times}

    def table(title: str, value: Callable[[Cell], float]) -> Table:
        def row(name: str) -> Iterator[float]:
            for count in nodes:
                cell = Cell(*places[name], count)
                yield value(cell) if cell in grid.times else math.nan

        return Table.of(title, nodes, places, row)

    made = [
        table("ms, replayed", lambda cell: grid.times[cell].get(REPLAYED, math.nan) * 1e3),
        table("ms, as it is", lambda cell: grid.times[cell][AS_IT_IS] * 1e3),
        table("over a one-token step", lambda cell: grid.best(cell) / grid.best(Cell(cell.batch, cell.context, 0))),
    ]
    out.details["tables"] = [each.details() for each in made]
    print("\n" + "\n\n".join(map(str, made)))


def step_time_model(grid: Grid, out: report.Report) -> None:
    """Fitted to all cells but those with `HELD_OUT` nodes; its error there."""
    samples = grid.samples()
    held = {cell: sample for cell, sample in samples.items() if cell.nodes in HELD_OUT}
    seen = [sample for cell, sample in samples.items() if cell not in held]
    if not held or not seen:
        return
    model = StepTime.fit(seen)
    errors = [abs(model.seconds(*sample[:3]) / sample.seconds - 1) for sample in held.values()]
    out.add("step-time model, mean error on shapes held out", sum(errors) / len(errors), "", "<= 0.1")
    out.add("step-time model, largest error", max(errors))
    out.details["held out"] = [[*sample, model.seconds(*sample[:3])] for sample in held.values()]


def kv_tokens(loaded: Loaded, options: argparse.Namespace, device: torch.device) -> int:
    """For the largest cell, as far as the memory goes."""
    wanted = max(options.batches) * (max(options.contexts) + 1 + max(NODES) + 16)
    if device.type == "cpu":
        return max(wanted, 4096)
    config = loaded.model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    return min(wanted, int(0.6 * torch.cuda.mem_get_info(device)[0]) // per_token)


def measure(options: argparse.Namespace, device: torch.device, out: report.Report) -> None:
    gpu = device.type == "cuda"
    loaded = random_model(LARGE if gpu else TINY, torch.bfloat16 if gpu else torch.float32, device)
    read = weight_bytes(loaded)
    runner = TreeRunner(loaded, kv_tokens=kv_tokens(loaded, options, device), graph_bytes=8 << 30)
    if runner.graphs is None:
        raise SystemExit("steps cannot be recorded here: is Triton installed?")
    for cache in (*runner.kv.keys, *runner.kv.values):
        cache.normal_()
    replayed_against_as_it_is(runner, [(1, 512, 0), (1, 512, 40), (8, 100, 8), (2, 700, 60)], out)
    sampling(runner.spec.vocab_size, 64 if gpu else 9, device, out)
    grid = Grid(runner, device, 3 if options.quick else 9, time.monotonic() + options.seconds)
    cells = [Cell(*each) for each in product(options.batches, options.contexts, sorted(options.nodes))]
    for cell in cells:
        grid.run(cell)
        if cell in grid.times:
            figures(cell, grid, out, targets=gpu)
        out.details["cells"] = {"measured": len(grid.times), "of": len(cells)}
        out.details["notes"] = grid.notes
        if options.json:  # whenever the run is ended, the file has what there is
            out.write(options.json)
    tables(grid, out)
    one = Cell(1, options.contexts[0], 0)
    if gpu and one in grid.times:
        torch.cuda.empty_cache()
        bandwidth = copy_bandwidth(min(4 << 30, torch.cuda.mem_get_info(device)[0] // 4), 5, device)
        out.add("copy bandwidth", bandwidth / 1e9, "GB/s")
        out.add("one-token step, share of it for weights and cache", _share(runner, read, one, bandwidth, grid))
    step_time_model(grid, out)
    out.add("recorded steps", len(runner.graphs.recorded))
    out.add("memory they take", runner.graphs.recorder.used_bytes / 1e6, "MB")
    for key, note in grid.notes.items():
        print(f"{key}: {note}")


def _share(runner: TreeRunner, read: int, cell: Cell, bandwidth: float, grid: Grid) -> float:
    return (read + runner.bytes_per_token * cell.batch * cell.context) / bandwidth / grid.best(cell)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=150.0, help="after these no further size is timed")
    options = parser.parse_args(arguments)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    options.batches, options.contexts, options.nodes = BATCHES, CONTEXTS, NODES
    if options.quick:
        options.batches, options.contexts, options.nodes = (1, 8), (512,), (0, 1, 16, 64)
    if device.type == "cpu":
        options.batches, options.contexts, options.nodes = (1, 2), (40,), (0, 1, 4, 16)
    out = report.Report("gpu_model")
    out.details["machine"] = machine(device)
    against_forwards(device, out)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    measure(options, device, out)
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
