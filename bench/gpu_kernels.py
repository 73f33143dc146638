"""The Triton kernels on a GPU: right against float64, and their time against what torch offers.

    python -m bench.gpu_kernels [--device cuda] [--seconds 160] [--quick] [--json FILE]

Every cell of batch x context x nodes is a step over random trees in an 8B model's shape. Ours reads a paged cache
whose blocks lie in random order; the others get keys and values in one piece. Calls go through several caches in
turn, so that none is in L2 from its last call. Times are GPU events around replayed CUDA graphs, taken in turn.

With `--device cpu` Triton's interpreter runs the same code on tiny problems (TRITON_INTERPRET=1); no figure is a time
of interest then, and there are no targets.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import report
from bench.gpu_cases import Piece, Problem, Shape
from bench.gpu_checks import check_all
from bench.gpu_clock import Timed, copy_bandwidth, interleaved, prepare, product_rate
from bench.gpu_rivals import flex, sdpa
from bench.tables import Table

BATCHES, CONTEXTS, NODES = (1, 8, 32), (512, 4096, 32768), (1, 8, 32, 64, 128)
SHARE, FROM_CONTEXT = 0.8, 4096  # of the copy bandwidth, from this context on
COLD = 256 << 20  # bytes of caches that a turn goes through, several times an H200's 60 MB of L2
_AFTER = 60  # seconds behind the rivals' deadline, for the cells that are left
RIVALS = {"SDPA": sdpa, "FlexAttention": flex}


@dataclass(frozen=True)
class Cell:
    batch: int
    context: int
    nodes: int

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}, nodes {self.nodes}"


@dataclass
class Run:
    """Everything that is measured.

    Attributes:
        copy, product: bytes per second of a copy, operations per second of a matrix product.
        times: per cell and implementation, seconds.
        notes: per cell, what was left out and why.
    """

    device: torch.device
    shape: Shape
    rounds: int
    deadline: float
    out: report.Report
    copy: float = math.nan
    product: float = math.nan
    times: dict[Cell, dict[str, float]] = field(default_factory=dict)
    bounds: dict[Cell, tuple[float, float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def ceilings(self, size: int, width: int) -> None:
        """The two rates that everything is held against."""
        self.copy = copy_bandwidth(size, self.rounds, self.device)
        self.product = product_rate(width, self.rounds, self.shape.dtype, self.device)
        self.out.add("copy bandwidth", self.copy / 1e9, "GB/s")
        self.out.add("matrix product", self.product / 1e12, "TFLOP/s")

    def cell(self, cell: Cell) -> None:
        """Time one cell, with the rivals that fit."""
        if time.monotonic() > self.deadline + _AFTER:
            self.notes[str(cell)] = "skipped: no time left"
            return
        pieces = [Piece(cell.context, cell.nodes)] * cell.batch
        one = 2 * cell.batch * (cell.context + cell.nodes) * self.shape.kv_heads * self.shape.width * 2
        gpu = self.device.type == "cuda"
        layers = max(1, min(128, COLD // one)) if gpu else 1
        # The cache, a dense copy for each rival, and their masks.
        masks = cell.batch * self.shape.heads * cell.nodes * (cell.context + cell.nodes) * 4
        if self._short_of(one * layers * 3 + masks):
            self.notes[str(cell)] = "skipped: does not fit the memory"
            return
        problem = Problem(self.shape, pieces, self.device, layers=layers, seed=cell.nodes)
        count = max(layers, 4) if gpu else 1
        things = {"triton": prepare(problem.attend, layers, count, self.device)}
        for name, make in RIVALS.items():
            if (timed := self._rival(cell, name, make, problem, layers, count)) is not None:
                things[name] = timed
        self.times[cell] = interleaved(things, self.rounds, self.device)
        self.bounds[cell] = (problem.bytes / self.copy, problem.operations / self.product)
        if gpu and not all(thing.graphed for thing in things.values()):
            eager = [name for name, thing in things.items() if not thing.graphed]
            self.notes[str(cell)] = f"no CUDA graph, Python's time may show: {', '.join(eager)}"

    def all_cells(self, cells: Sequence[Cell], path: str | None) -> None:
        """Time them; the file is up to date before and after each, whenever the run is ended."""
        self._keep(len(cells), path)
        for cell in cells:
            self.cell(cell)
            if cell in self.times:
                self._figures(cell)
            self._keep(len(cells), path)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _keep(self, count: int, path: str | None) -> None:
        self.out.details["cells"] = {"measured": len(self.times), "of": count}
        self.out.details["notes"] = self.notes
        self.out.details["tables"] = [each.details() for each in self.tables()]
        if path:
            self.out.write(path)

    def _figures(self, cell: Cell) -> None:
        """One figure per question."""
        gpu, times = self.device.type == "cuda", self.times[cell]
        memory, arithmetic = self.bounds[cell]
        ours = times["triton"]
        self.out.add(f"{cell}: time", ours * 1e6, "us")
        bound = memory >= arithmetic
        wanted = gpu and bound and cell.context >= FROM_CONTEXT
        share = memory / ours
        self.out.add(
            f"{cell}: share of copy bandwidth",
            share,
            "",
            f">= {SHARE}" if wanted else "" if bound else "arithmetic sets the pace",
            share >= SHARE if wanted else None,
        )
        if not bound:
            self.out.add(f"{cell}: share of matrix rate", arithmetic / ours)
        for name in RIVALS:
            if name in times:
                ratio, target = times[name] / ours, "> 1" if gpu else ""
                self.out.add(f"{cell}: {name} over triton", ratio, "", target, ratio > 1 if gpu else None)

    def tables(self) -> list[Table]:
        """The same as tables, rows = batch and context, columns = nodes."""
        nodes = sorted({cell.nodes for cell in self.times})
        places = dict.fromkeys((cell.batch, cell.context) for cell in self.times)
        rows = {f"batch {batch}, context {context}": (batch, context) for batch, context in places}

        def table(title: str, value: Callable[[Cell], float]) -> Table:
            def row(name: str) -> Iterator[float]:
                for count in nodes:
                    cell = Cell(*rows[name], count)
                    yield value(cell) if cell in self.times else math.nan

            return Table.of(title, nodes, rows, row)

        made = [
            table("microseconds", lambda cell: self.times[cell]["triton"] * 1e6),
            table("share of copy bandwidth", lambda cell: self.bounds[cell][0] / self.times[cell]["triton"]),
            table("share of the roof", lambda cell: max(self.bounds[cell]) / self.times[cell]["triton"]),
        ]
        for name in RIVALS:
            made.append(table(f"{name} / triton", lambda cell, name=name: self._ratio(cell, name)))
        return made

    def _ratio(self, cell: Cell, name: str) -> float:
        return self.times[cell].get(name, math.nan) / self.times[cell]["triton"]

    def _rival(self, cell: Cell, name: str, make: Any, problem: Problem, layers: int, count: int) -> Timed | None:
        key = f"{cell}, {name}"
        if time.monotonic() > self.deadline:
            self.notes[key] = "skipped: no time left"
            return None
        try:
            return prepare(make(problem), layers, count, self.device)
        except Exception as error:  # a rival that fails is not our failure; it is told
            self.notes[key] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            return None

    def _short_of(self, size: int) -> bool:
        return self.device.type == "cuda" and size > 0.8 * torch.cuda.mem_get_info(self.device)[0]


def main(arguments: list[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--seconds", type=float, default=160.0, help="after these no rival is begun, 60 later no cell"
    )
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    run = Run(
        device=device,
        shape=_shape(device),
        rounds=3 if options.quick else 9,
        deadline=time.monotonic() + options.seconds,
        out=report.Report("gpu_kernels"),
    )
    run.out.details["device"] = _name(device)
    run.out.details["shape"] = run.shape.name
    check_all(device, run.out)
    gpu = device.type == "cuda"
    run.ceilings(4 << 30 if gpu else 1 << 20, 8192 if gpu else 64)
    run.all_cells(_cells(options, gpu), options.json)
    print("\n\n".join(map(str, run.tables())))
    for key, note in run.notes.items():
        print(f"{key}: {note}")
    return run.out.finish(options.json)


def _cells(options: argparse.Namespace, gpu: bool) -> list[Cell]:
    batches, contexts, nodes = BATCHES, CONTEXTS, NODES
    if not gpu:
        batches, contexts, nodes = (1, 2), (40,), (1, 8)
    elif options.quick:
        batches, contexts, nodes = (1, 8), (512, 4096), (1, 64)
    # By nodes first: FlexAttention is compiled anew where the number of queries changes.
    return [Cell(b, c, n) for n in nodes for c in contexts for b in batches]


def _shape(device: torch.device) -> Shape:
    return Shape() if device.type == "cuda" else Shape(heads=2, kv_heads=1, width=16, dtype=torch.float32)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"


if __name__ == "__main__":
    sys.exit(main())
