"""That a whole step on the device is right: against ordinary forwards, against steps that are not replayed, and the
device's sampling against the host's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench import report
from bench.gpu_clock import seconds
from bench.gpu_lab import LARGE, TINY, as_it_is, random_model, release, step
from graftree.device_sampling import Choice, DeviceSampler
from graftree.models.rows import Rows, chain_rows
from graftree.models.runner import TreeRunner
from graftree.sampling import SamplingContext, SamplingParams, choose
from graftree.tree import TokenTree

# |got - expected| / |expected| over all logits. float32: sums in another order. bfloat16: a sum in another order is
# rounded to the next number, 2^-8 away, now and then, at ten places in each of 32 layers; what one row too many or
# too few is seen changes by far more.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 6e-2}

KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 1},
    "top-k 50, top-p 0.95": {"seed": 2, "top_k": 50, "top_p": 0.95, "temperature": 0.8},
    "penalties": {"seed": 3, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
}


def relative(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Relative error of logits."""
    a, b = torch.cat(list(got)).double(), torch.cat(list(expected)).double()
    return float((a - b).norm() / b.norm())


def ordinary(model: Any, context: Sequence[int], rows: Rows) -> Tensor:
    """(n, V) logits of a tree's rows, one forward of the unmodified model per leaf."""
    device, count = model.device, len(rows.token_ids)
    expected = torch.zeros((count, model.config.vocab_size), device=device)
    inner = {index for mask in rows.masks for index in _bits(mask)[:-1]}
    for leaf in set(range(count)) - inner:
        path = _bits(rows.masks[leaf])
        tokens = [*context, *(rows.token_ids[index] for index in path)]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens], device=device), use_cache=False).logits[0]
        expected[path] = logits[len(context) :].float()
    return expected


def against_forwards(device: torch.device, out: report.Report) -> None:
    """A prompt and a tree through the runner, as it is and replayed, against the model's own forward, in float32."""
    shape = LARGE | {"num_hidden_layers": 2} if device.type == "cuda" else TINY
    plain, loaded = (random_model(shape, torch.float32, device, seed=5) for _ in range(2))
    context = [(17 * index + 3) % shape["vocab_size"] for index in range(100)]
    runner = TreeRunner(loaded, kv_tokens=512, graph_bytes=1 << 30)
    (rows,) = step(runner, 1, len(context), 24, seed=6)
    expected = ordinary(plain.model, context, rows)
    runner.forward([chain_rows(rows.blocks, 0, context)])
    limit = LIMITS[torch.float32]
    for name, run in (("as it is", as_it_is), ("replayed", _replayed)):
        error = relative(run(runner, [rows]), [expected])
        out.add(f"error, tree {name} against forwards", f"{error:.1e}", "", f"<= {limit:.0e}", error <= limit)


def replayed_against_as_it_is(
    runner: TreeRunner, batches: Sequence[tuple[int, int, int]], out: report.Report
) -> None:
    """Padded and replayed steps of (batch, context, nodes) against the same steps launched one by one."""
    worst, flips, rows = 0.0, 0, 0
    for batch, context, nodes in batches:
        own = step(runner, batch, context, nodes, seed=nodes)
        expected, got = as_it_is(runner, own), _replayed(runner, own)
        worst = max(worst, relative(got, expected))
        flips += sum(int((a.argmax(1) != b.argmax(1)).sum()) for a, b in zip(got, expected, strict=True))
        rows += sum(len(logits) for logits in got)
        release(runner, own)
    limit = LIMITS[runner.kv.dtype]
    out.add("error, replayed against as it is", f"{worst:.1e}", "", f"<= {limit:.0e}", worst <= limit)
    out.add("most likely tokens that differ by rounding", flips, f"of {rows}")


def sampling(vocab_size: int, nodes: int, device: torch.device, out: report.Report) -> None:
    """Tokens at all nodes of a tree: the device's against the host's, and how long the device takes."""
    draw = random.Random(0)
    parents = tuple(draw.randrange(max(-1, index - 8), index) if index else -1 for index in range(nodes))
    tree = TokenTree(0, tuple(draw.randrange(vocab_size) for _ in parents), parents, (-1.0,) * nodes)
    generator = torch.Generator(device).manual_seed(1)
    logits = 3 * torch.randn((1 + nodes, vocab_size), generator=generator, device=device)
    sampler, host, differing = DeviceSampler(vocab_size, 0, device), logits.cpu().numpy(), 0
    for name, options in KINDS.items():
        context = SamplingContext([draw.randrange(vocab_size) for _ in range(200)], vocab_size=vocab_size)
        choice = Choice(SamplingParams(**options), context, tree)  # type: ignore[arg-type]
        (got,) = sampler.pick([logits], [choice])
        wanted = [choose(row, choice.params, context, path) for row, path in zip(host, choice.paths(), strict=True)]
        differing += sum(a != b for a, b in zip(got.tolist(), wanted, strict=True))
        turns = [seconds(lambda choice=choice: sampler.pick([logits], [choice]), device) for _ in range(5)]
        out.add(f"sampling {1 + nodes} rows, {name}", median(turns) * 1e3, "ms")
    out.add("error, tokens that the device samples otherwise", differing, "", "exact", differing == 0)


def _replayed(runner: TreeRunner, batch: Sequence[Rows]) -> list[Tensor]:
    """A step that is replayed, whatever it takes to record it."""
    assert runner.graphs is not None, "steps are recorded here"
    runner.prepare(batch)
    before = runner.graphs.counts.replayed
    found = runner.forward(batch)
    if runner.graphs.counts.replayed == before:
        raise SystemExit("a step was not replayed; the log says why")
    return found


def _bits(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]
