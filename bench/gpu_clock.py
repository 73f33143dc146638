"""Times of GPU work: events around replayed graphs, things to compare in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_WARM_UPS = 2


@dataclass(frozen=True)
class Timed:
    """Something that runs `count` times per turn.

    Attributes:
        run: one turn.
        graphed: whether a turn is the replay of a CUDA graph; otherwise Python's own time may show.
        call: what a turn calls; a graph needs the tensors that it holds.
    """

    run: Callable[[], object]
    count: int = 1
    graphed: bool = False
    call: Callable[[int], object] | None = None


def prepare(call: Callable[[int], object], layers: int, count: int, device: torch.device) -> Timed:
    """`count` calls, over `layers` caches in turn, as one CUDA graph where there is a GPU and the call allows it."""

    def every() -> None:
        for index in range(count):
            call(index % layers)

    if device.type != "cuda":
        call(0)
        return Timed(every, count)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            call(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            every()
    except RuntimeError:
        torch.cuda.synchronize()
        return Timed(every, count)
    return Timed(graph.replay, count, True, call)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one run, on the device's own clock."""
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def interleaved(things: Mapping[str, Timed], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of one call of each, taking turns."""
    turns: dict[str, list[float]] = {name: [] for name in things}
    for thing in things.values():
        thing.run()
    for _ in range(rounds):
        for name, thing in things.items():
            turns[name].append(seconds(thing.run, device) / thing.count)
    return {name: statistics.median(times) for name, times in turns.items()}


def copy_bandwidth(size: int, rounds: int, device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes within the device's memory."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / interleaved({"copy": Timed(lambda: target.copy_(source))}, rounds, device)["copy"]


def product_rate(size: int, rounds: int, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a matrix product of random numbers."""
    a, b = (torch.randn((size, size), device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    timed = interleaved({"mm": Timed(lambda: torch.mm(a, b, out=out))}, rounds, device)
    return 2 * float(size) ** 3 / timed["mm"]
