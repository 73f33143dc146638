"""Recorded steps: padded and run from memory that is used again, they say what steps say as they are.

On a CPU a replay is the same function on the same memory, so everything but the recording itself is seen here.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftree.models.graphs import MAX_GRAPHS, CudaRecorder, attention_for
from graftree.models.load import load
from graftree.models.rows import Rows, chain_rows
from graftree.models.runner import TreeRunner
from graftree.models.tiers import Tier, Tiers
from tests.runner_models import FAMILIES, Tree
from tests.runner_models import runner as plain_runner
from tests.test_runner_exact import difference, random_tree

SMALL = Tiers(sequences=(1, 2, 4), rows=(1, 2, 4, 8, 12, 16, 24), lengths=(64, 256))
TOLERANCE = 1e-4


@lru_cache
def recording(uri: str, tiers: Tiers = SMALL, record_at: int = 1) -> TreeRunner:
    """A runner whose steps are recorded when they are first asked for."""
    run = TreeRunner(load(uri), kv_tokens=4096, graph_bytes=1)
    assert run.graphs is not None
    run.graphs.tiers, run.graphs.record_at = tiers, record_at
    return run


def step_in(run: TreeRunner, trees: Sequence[Tree]) -> list[torch.Tensor]:
    """Logits of some trees in one step, behind contexts that were prefilled."""
    size = run.kv.block_size
    blocks = [run.pool.allocate(-(-(len(tree.context) + len(tree.token_ids)) // size)) for tree in trees]
    run.forward([chain_rows(own, 0, tree.context) for own, tree in zip(blocks, trees, strict=True)])
    found = run.forward([tree.rows(own) for own, tree in zip(blocks, trees, strict=True)])
    for own in blocks:
        run.pool.free(own)
    run.pool.check()
    return found


def trees_for(tier: Tier, tiers: Tiers, seed: int) -> list[Tree]:
    """Trees that no smaller tier holds, with room left over at random."""
    rng = random.Random(seed)
    below = {
        name: max([0, *(size for size in sizes if size < wanted)])
        for name, sizes, wanted in zip(Tier._fields, (tiers.sequences, tiers.rows, tiers.lengths), tier, strict=True)
    }
    count = rng.randint(below["sequences"] + 1, tier.sequences)
    rows = max(rng.randint(below["rows"] + 1, tier.rows), count)
    sizes = [1 + (rows - count) // count] * count
    sizes[0] += rows - sum(sizes)
    longest = rng.randint(max(below["length"], rows) + 1, tier.length)
    contexts = [longest - sizes[0], *(rng.randint(0, min(60, longest - rows)) for _ in sizes[1:])]
    return [random_tree(seed + n, c, s) for n, (c, s) in enumerate(zip(contexts, sizes, strict=True))]


ALL = [
    Tier(sequences, rows, length)
    for sequences in SMALL.sequences
    for rows in SMALL.rows
    for length in SMALL.lengths
    if rows >= sequences
]


@pytest.mark.parametrize("tier", ALL, ids=lambda tier: "-".join(map(str, tier)))
def test_every_tier_equals_steps_as_they_are(tier: Tier) -> None:
    """In each tier, padded and from memory that other steps have used, logits are those of a runner that records
    nothing; twice, so that the second step finds what the first left."""
    uri = FAMILIES["llama"]
    run = recording(uri)
    assert run.graphs is not None
    for seed in (sum(tier), 1000 + sum(tier)):
        trees = trees_for(tier, SMALL, seed)
        before = run.graphs.counts.replayed
        got = step_in(run, trees)
        assert run.graphs.counts.replayed == before + 1
        assert tier in run.graphs.recorded
        for logits, expected in zip(got, step_in(plain_runner(uri), trees), strict=True):
            assert difference(logits, expected) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_against_ordinary_forwards(family: str) -> None:
    """Windows, learned positions, biases: a node's logits are those of transformers' own forward along its path."""
    uri = FAMILIES[family]
    run = recording(uri)
    for trees in ([random_tree(1, 40, 9), random_tree(2, 5, 3)], [random_tree(3, 0, 2)], [random_tree(4, 200, 24)]):
        for tree, logits in zip(trees, step_in(run, trees), strict=True):
            assert difference(logits, tree.expected(uri)) < TOLERANCE
    assert run.graphs is not None
    assert run.graphs.counts.replayed >= 3


@pytest.mark.parametrize("rows", Tiers().rows)
def test_the_real_table(rows: int) -> None:
    """Each number of rows of the table that is used, one sequence."""
    uri = FAMILIES["llama"]
    run = recording(uri, Tiers())
    tree = random_tree(rows, 7, rows if rows < 4 else rows - 1)
    (got,), (expected,) = step_in(run, [tree]), step_in(plain_runner(uri), [tree])
    assert difference(got, expected) < TOLERANCE
    assert run.graphs is not None
    assert Tier(1, rows, 1024) in run.graphs.recorded


def test_what_a_graph_was_left_with_does_not_matter() -> None:
    """Its inputs overwritten with nonsense, the cache with NaN where nobody's rows are: the same bits."""
    run = recording(FAMILIES["mistral-window"])
    trees = [random_tree(5, 33, 5), random_tree(6, 2, 2)]
    first = step_in(run, trees)
    assert run.graphs is not None
    with torch.inference_mode():
        for graph in run.graphs._graphs.values():
            for tensor in graph.inputs.tensors.values():
                tensor.fill_(-(1 << 30))
            for plan in graph.layout.plans.values():
                for tensor in filter(torch.is_tensor, vars(plan).values()):
                    tensor.fill_(113)
        for layer in run.kv.keys + run.kv.values:
            layer.fill_(torch.nan)
    for again, before in zip(step_in(run, trees), first, strict=True):
        assert torch.equal(again, before)


def test_with_the_kernel_that_a_gpu_runs() -> None:
    """Triton's attention on reserved layouts that are filled again and again, in its interpreter, window and all."""
    uri = FAMILIES["mistral-window"]
    run = TreeRunner(load(uri), kv_tokens=512, implementation="triton", graph_bytes=1)
    assert run.graphs is not None
    run.graphs.tiers, run.graphs.record_at = Tiers((2,), (8,), (64,)), 1
    for trees in ([random_tree(2, 9, 4), random_tree(3, 20, 3)], [random_tree(5, 1, 8)]):
        for tree, logits in zip(trees, step_in(run, trees), strict=True):
            assert difference(logits, tree.expected(uri)) < TOLERANCE
    assert (run.graphs.counts.replayed, len(run.graphs.recorded)) == (2, 1)


def test_logits_stay_when_the_next_step_runs() -> None:
    """What a step gave is the caller's: a later replay of the same graph does not change it."""
    run = recording(FAMILIES["llama"])
    (first,) = step_in(run, [random_tree(7, 20, 4)])
    kept = first.clone()
    step_in(run, [random_tree(8, 20, 4)])
    assert torch.equal(first, kept)


def test_rows_of_nobody_write_to_the_scrap_block_alone() -> None:
    """A padded step changes its own rows of the cache and the scrap block, nothing else."""
    run = recording(FAMILIES["llama"])
    tree = random_tree(9, 0, 5)
    run.kv.clear(range(run.pool.num_blocks))  # NaN, if it were there, would differ from itself
    blocks = run.pool.allocate(1)
    before = [layer.clone() for layer in run.kv.keys + run.kv.values]
    run.forward([tree.rows(blocks)])
    for now, then in zip(run.kv.keys + run.kv.values, before, strict=True):
        changed = {(int(block), int(row)) for block, row, _, _ in (now != then).nonzero()}
        mine = {(blocks[0], row) for row in range(5)}
        assert mine <= changed
        assert {block for block, _ in changed - mine} <= {run.kv.num_blocks - 1}
    assert run.kv.num_blocks == run.pool.num_blocks + 1
    run.pool.free(blocks)


def test_a_growing_tree() -> None:
    """A tree run in two steps, its first rows read from the cache, in recorded steps."""
    uri = FAMILIES["llama"]
    run = recording(uri)
    tree = random_tree(10, 21, 14)
    blocks = run.pool.allocate(3)
    run.forward([chain_rows(blocks, 0, tree.context)])
    parts = [run.forward([tree.rows(blocks, start, stop)])[0] for start, stop in ((0, 5), (5, 14))]
    run.pool.free(blocks)
    assert difference(torch.cat(parts), tree.expected(uri)) < TOLERANCE


UNFIT: dict[str, Callable[[list[int]], list[Rows]]] = {
    "prefill": lambda blocks: [chain_rows(blocks, 0, range(5))],
    "prefill beside a step": lambda blocks: [
        chain_rows(blocks[:8], 0, range(5)),
        chain_rows(blocks[8:], 0, [1], logits=[0]),
    ],
    "the last row alone": lambda blocks: [chain_rows(blocks, 0, range(5), logits=[4])],
    "too many rows": lambda blocks: [chain_rows(blocks, 0, range(25), logits=range(25))],
    "too many sequences": lambda blocks: [chain_rows(blocks[i : i + 1], 0, [i], logits=[0]) for i in range(5)],
    "too long": lambda blocks: [chain_rows(blocks, 256, [1], logits=[0])],
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_fits_no_tier_runs_as_it_is(case: str) -> None:
    """The step is right and counted, and no graph is made for it."""
    uri = FAMILIES["llama"]
    run = recording(uri)
    assert run.graphs is not None
    results = []
    before = list(run.graphs.recorded), run.graphs.counts.unfit
    for each in (run, plain_runner(uri)):
        blocks = each.pool.allocate(17)
        each.kv.clear(blocks)
        results.append(each.forward(UNFIT[case](blocks)))
        each.pool.free(blocks)
    for got, expected in zip(*results, strict=True):
        assert difference(got, expected) < TOLERANCE
    assert (list(run.graphs.recorded), run.graphs.counts.unfit) == (before[0], before[1] + 1)


def test_the_smallest_tier_that_holds_a_step() -> None:
    """Sizes are rounded up in each direction; a tree longer than a tier has room for fits none."""

    def tier(*sizes: tuple[int, int, int]) -> Tier | None:
        return Tiers().of(
            [
                Rows((), context, tree, [0] * count, [0] * count, [0] * count, range(count))
                for context, tree, count in sizes
            ]
        )

    assert tier((0, 0, 1)) == Tier(1, 1, 1024)
    assert tier((1023, 0, 1)) == Tier(1, 1, 1024)
    assert tier((1024, 0, 1)) == Tier(1, 1, 4096)
    assert tier((10, 0, 65)) == Tier(1, 65, 1024)
    assert tier((10, 0, 66)) == Tier(1, 97, 1024)
    assert tier((10, 0, 30), (0, 0, 0), (5000, 0, 4)) == Tier(4, 49, 16384)
    assert tier(*[(9, 0, 8)] * 64) == Tier(64, 513, 1024)
    assert tier(*[(9, 0, 8)] * 65) is None
    assert tier((0, 0, 514)) is None
    assert tier((1 << 18, 0, 1)) is None
    assert tier((0, 127, 1)) == Tier(1, 1, 1024)
    assert tier((0, 128, 1)) is None
    assert tier((0, 0, 0)) is None
    assert Tier(1, 16, 1024).tree_rows == 128
    assert Tier(1, 513, 1024).tree_rows == 513


def test_what_is_recorded_at_the_start() -> None:
    """All sizes of one tree, at the first two lengths that the model's context reaches."""
    usual = Tiers().usual(8192)
    assert usual[0] == Tier(1, 1, 1024)
    assert usual[-1] == Tier(1, 129, 4096)
    assert len(usual) == len(set(usual)) == 26
    assert {tier.length for tier in Tiers().usual(1024)} == {1024}
    run = with_recorder(Recorder(), record_at=9)
    run.prepare()
    assert run.graphs is not None
    assert run.graphs.recorded == SMALL.usual(512)
    tree = random_tree(1, 30, 7)
    (got,) = step_in(run, [tree])
    assert run.graphs.counts.replayed == 1
    assert difference(got, tree.expected(FAMILIES["llama"])) < TOLERANCE


class Recorder:
    """Counts, and fails where it should."""

    def __init__(self, *, takes: int = 0, fails: bool = False) -> None:
        self.used_bytes, self.times, self._takes, self._fails = 0, 0, takes, fails

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.times += 1
        self.used_bytes += self._takes
        return run


def with_recorder(recorder: Recorder, *, record_at: int = 1, max_bytes: int = 100) -> TreeRunner:
    run = TreeRunner(load(FAMILIES["llama"]), kv_tokens=512, graph_bytes=max_bytes)
    assert run.graphs is not None
    run.graphs.recorder, run.graphs.record_at, run.graphs.tiers = recorder, record_at, SMALL
    return run


def test_a_tier_is_recorded_when_it_is_asked_for_again() -> None:
    """The first step of a size runs as it is, the second is recorded, later ones replay that; `prepare` does not
    wait."""
    recorder = Recorder()
    run = with_recorder(recorder, record_at=2)
    tree, other = random_tree(1, 3, 2), random_tree(2, 3, 4)
    assert run.graphs is not None
    for _ in range(4):
        step_in(run, [tree])
    assert (recorder.times, run.graphs.counts.replayed, run.graphs.counts.unrecorded) == (1, 3, 1)
    run.prepare([other.rows([0])])
    step_in(run, [other])
    assert (recorder.times, run.graphs.counts.replayed, run.graphs.counts.unrecorded) == (2, 4, 1)


def test_no_more_is_recorded_than_there_is_memory_for() -> None:
    """Behind the planned bytes, or the largest number of graphs, other sizes run as they are, and right."""
    recorder = Recorder(takes=60)
    run = with_recorder(recorder, max_bytes=100)
    assert run.graphs is not None
    for size in (1, 2, 4, 8):
        tree = random_tree(size, 9, size)
        (got,) = step_in(run, [tree])
        assert difference(got, tree.expected(FAMILIES["llama"])) < TOLERANCE
    assert recorder.times == 2
    assert run.graphs.counts.unrecorded == 2
    step_in(run, [random_tree(1, 9, 2)])
    assert run.graphs.counts.replayed == 3
    assert len(Tiers().rows) * 3 <= MAX_GRAPHS


def test_a_step_that_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """It runs as it is, so do all others, nothing is tried again, and the log says why."""
    run = with_recorder(Recorder(fails=True))
    assert run.graphs is not None
    with caplog.at_level(logging.WARNING):
        for size in (1, 2, 2):
            tree = random_tree(size, 9, size)
            (got,) = step_in(run, [tree])
            assert difference(got, tree.expected(FAMILIES["llama"])) < TOLERANCE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "capturing" in caplog.text
    assert run.graphs.counts.replayed == 0


@pytest.mark.parametrize(
    ("implementation", "dtype", "expected"),
    [
        ("auto", torch.float32, "static"),
        ("static", torch.float64, "static"),
        ("triton", torch.bfloat16, "triton"),
        ("triton", torch.float64, None),
        ("cpu", torch.float32, None),
        ("reference", torch.float32, None),
        ("invariant", torch.float32, None),
    ],
)
def test_which_attention_is_recorded(implementation: str, dtype: torch.dtype, expected: str | None) -> None:
    """One that reads a step from tensors alone; where what was asked for does not, or cannot, there are no graphs."""
    found = attention_for(implementation, torch.empty((2, 16, 2, 32), dtype=dtype), 4)
    assert (None if found is None else found[0]) == expected


def test_a_runner_that_cannot_record() -> None:
    """It runs all the same."""
    run = TreeRunner(load(FAMILIES["llama"]), kv_tokens=512, implementation="cpu", graph_bytes=1)
    assert run.graphs is None
    tree = random_tree(1, 9, 4)
    run.prepare([tree.rows([0])])
    assert difference(step_in(run, [tree])[0], tree.expected(FAMILIES["llama"])) < TOLERANCE


class Cuda:
    """Stands where torch.cuda is: notes what is asked of it, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.free = [1000, 940, 940, 900]

    def note(self, name: str) -> Any:
        self.calls.append(name)
        return nullcontext()

    def graph(self, graph: Any, *, pool: Any, stream: str, capture_error_mode: str) -> Any:
        return self.note(f"capture into {pool} on {stream}, {capture_error_mode}")

    def mem_get_info(self, _: Any) -> tuple[int, int]:
        return self.free.pop(0), 0

    def current_stream(self, _: Any) -> Any:
        return SimpleNamespace(wait_stream=lambda stream: self.note(f"wait for {stream}"))

    def make_graph(self) -> Any:
        return SimpleNamespace(pool=lambda: "pool", replay=lambda: self.note("replay"))


class Stream(str):
    def wait_stream(self, _: Any) -> None:
        """Nothing is under way."""


def test_the_order_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs beside the current stream, then one that is captured, all graphs into one pool; memory is counted; a
    replay launches the graph and gives what was captured. torch.cuda itself is played here."""
    cuda = Cuda()
    for name, value in {
        "Stream": lambda _: Stream("side"),
        "synchronize": lambda _: cuda.note("synchronize"),
        "stream": lambda _: cuda.note("beside"),
        "CUDAGraph": cuda.make_graph,
        "graph": cuda.graph,
        "mem_get_info": cuda.mem_get_info,
        "current_stream": cuda.current_stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    recorder = CudaRecorder(torch.device("cuda", 0))
    result = torch.ones(1)

    def run() -> torch.Tensor:
        cuda.note("run")
        return result

    first = recorder.record(run)
    order = ["synchronize", "beside", "run", "run", "wait for side", "capture into None on side, thread_local", "run"]
    assert cuda.calls == [*order, "synchronize"]
    recorder.record(run)
    assert "capture into pool on side, thread_local" in cuda.calls
    assert recorder.used_bytes == 100
    cuda.calls.clear()
    assert first() is result
    assert cuda.calls == ["replay"]


def test_half_precision() -> None:
    """In bfloat16 logits come in float32 and are near those of a runner that records nothing."""
    uri, trees = FAMILIES["qwen3"], [random_tree(3, 30, 6)]
    run = TreeRunner(load(uri, dtype="bfloat16"), kv_tokens=512, graph_bytes=1)
    other = TreeRunner(load(uri, dtype="bfloat16"), kv_tokens=512)
    assert run.graphs is not None
    run.graphs.record_at = 1
    (got,), (expected,) = step_in(run, trees), step_in(other, trees)
    assert got.dtype == torch.float32
    assert run.graphs.counts.replayed == 1
    assert difference(got, expected) < 0.05 * float(expected.abs().max())
