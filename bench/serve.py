"""Serving on this machine: speculation at 1, 4 and 16 requests at once, and one request against other engines.

    python -m bench.serve [--sections speculation rivals] [--rival-python PYTHON] [--json FILE]

Real pods with the default speculators. Each batch of prompts is answered twice in a row, with speculation and
without, the two in turn first; each prompt is put to every engine in turn. What else the machine does then meets all
alike, and ratios stay. Rates are of whole requests, prompts included; the verifier's prefix cache is off, since a
prompt comes more than once. docs/benchmarks.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench import report, serve_cells, serve_rivals
from bench.recording import Prompt, prompts
from bench.rival_worker import Setup
from bench.rivals import Rival
from bench.serve_turns import WARM_UP, Service, flags, given, serving
from graftree.text.tokenizer import Tokenizer

SECTIONS = ("speculation", "rivals")
RIVALS = {"transformers": "transformers", "llama.cpp": "llama_cpp", "OpenVINO GenAI": "openvino"}
FOLDER = Path(__file__).parent / ".cache"
MOST_PROMPTS = 40  # of a category
CONTEXT = 4096


def parser() -> argparse.ArgumentParser:
    arguments = flags(__doc__.splitlines()[0], concurrency=[1, 4, 16], max_new_tokens=96)
    arguments.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    arguments.add_argument("--categories", nargs="+", help="of the prompts; default: all")
    arguments.add_argument("--per-category", type=int, default=3, help="prompts for the other engines")
    arguments.add_argument("--rivals", nargs="+", choices=RIVALS.values(), default=list(RIVALS.values()))
    arguments.add_argument(
        "--rival-python",
        default=sys.executable,
        help="interpreter that has llama.cpp (see docs/benchmarks.md) and openvino-genai",
    )
    arguments.add_argument("--gguf", default="", help="file of the model for engines that read GGUF")
    arguments.add_argument("--lookup-tokens", type=int, default=10, help="of transformers' prompt look-up")
    return arguments


def rivals(options: argparse.Namespace, setup: Setup) -> dict[str, Callable[[], Rival]]:
    """Name -> what starts it."""
    ours = {"transformers"}  # needs what the service needs, and is there
    return {
        name: partial(Rival, name, kind, setup, sys.executable if kind in ours else options.rival_python)
        for name, kind in RIVALS.items()
        if kind in options.rivals
    }


def setup(
    options: argparse.Namespace, speculators: Sequence[str], eos: tuple[int, ...], warm_up: Sequence[int]
) -> Setup:
    """What other engines are told; their SSM is the first model among our speculators."""
    FOLDER.mkdir(exist_ok=True)
    models = [drafter.removeprefix("model:") for drafter in speculators if drafter.startswith("model:")]
    return Setup(
        model=options.model,
        ssm=models[0] if models else "",
        gguf=os.path.abspath(options.gguf) if options.gguf else "",
        eos=eos,
        context=CONTEXT,
        lookup_tokens=options.lookup_tokens,
        warm_up=tuple(warm_up),
        folder=str(FOLDER),
    )


def chosen(options: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    """Prompts by category."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts(report.prompts(options.prompts, sys.maxsize), tokenizer, MOST_PROMPTS):
        if not options.categories or prompt.category in options.categories:
            by_category.setdefault(prompt.category, []).append(prompt)
    if not by_category:
        raise SystemExit(f"no prompt of the categories {', '.join(options.categories or ())}")
    return by_category


def measure(
    service: Service,
    options: argparse.Namespace,
    speculators: Sequence[str],
    tokenizer: Tokenizer,
    by_category: dict[str, list[Prompt]],
    out: report.Report,
) -> None:
    """The sections that are wanted."""
    service.warm_up()
    if "speculation" in options.sections:
        cells = serve_cells.measure(service, by_category, options.concurrency, turns=options.turns)
        serve_cells.summary(cells, out)
    if "rivals" in options.sections:
        told = setup(options, speculators, service.info().eos_token_ids, tokenizer.encode(WARM_UP))
        count = options.per_category
        few = [own[index * len(own) // count] for index in range(count) for own in by_category.values()]
        serve_rivals.run(service, rivals(options, told), few, options.max_new_tokens, out)


def main(arguments: Sequence[str] | None = None, *, in_process: bool = False) -> int:
    """Args: `in_process` runs the stack in this process, for tests."""
    options = parser().parse_args(arguments)
    if options.quick:
        options.turns, options.per_category, options.max_new_tokens = 1, 1, min(options.max_new_tokens, 8)
        options.concurrency = [1, 4]
        options.categories = options.categories or ["translation", "qa"]
    out, speculators = report.Report("serve"), given(options)
    tokenizer = Tokenizer.load(options.model)
    by_category = chosen(options, tokenizer)
    with serving(options, in_process=in_process, prefix_cache=False) as (_, service):
        measure(service, options, speculators, tokenizer, by_category, out)
    out.details["speculators"] = speculators
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
