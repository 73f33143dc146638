"""What the speculators are worth in tokens per verify step, by kind of text: SpecInfer's tables.

    python -m bench.acceptance [--ssm SPEC] [--boosted SPEC SPEC --single SPEC] [--plots DIR] [--json FILE]

The LLM's answers are recorded once (`bench.recording`) and the product's own trees grown along them (`bench.replay`),
each to its full budget before it is verified. Printed are, greedy and at temperature 1:

    top-k success       how often the LLM's token is among the k most likely children of the node before (Table 1)
    width               tokens per step of the expansions <1,1,k,1,1,1,1,1> (Table 2)
    node budgets        tokens per step of trees of 4 to 64 nodes: SpecInfer's static ones, MCSD's Cartesian ones,
                        best first; drafted by n-grams, by the SSM, by both, and by two boosted SSMs

Tokens per step count the bonus token and leave out the prompt's own step. docs/benchmarks.md says how to read them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import acceptance_report, report
from bench.acceptance_plan import Plan
from bench.kept import Kept
from bench.promises import Promises
from bench.recording import Prompt, Recorder, Recording, prompts
from bench.shapes import BUDGETS
from bench.stand import Stand
from bench.tables import Tally
from graftree.config import DEFAULT_MODEL, SpeculatorConfig, build
from graftree.errors import GraftreeError
from graftree.models.load import load
from graftree.text.tokenizer import Tokenizer
from speculator_service.drafters import loader
from speculator_service.drafters.base import Drafter

ROOM = 640  # cache rows of a text for its trees, all settings' together
DEPTH = 16


def drafters(specs: dict[str, str], kv_tokens: int, branching: int) -> dict[str, Drafter]:
    """Load each drafter; models are asked once about a node."""
    found: dict[str, Drafter] = {}
    for name, spec in specs.items():
        drafter = loader.load(build(SpeculatorConfig, {"drafter": spec, "device": "cpu", "kv_tokens": kv_tokens}))
        found[name] = Kept(drafter, branching) if drafter.model_fingerprint else drafter
    return found


def groups(recordings: Sequence[Recording], kv_tokens: int) -> Iterator[list[Recording]]:
    """As many at once as the cache holds."""
    group: list[Recording] = []
    rows = 0
    for recording in recordings:
        own = len(recording.prompt.token_ids) + len(recording.output) + ROOM
        if group and rows + own > kv_tokens:
            yield group
            group, rows = [], 0
        group.append(recording)
        rows += own
    if group:
        yield group


def record(options: argparse.Namespace) -> tuple[list[Recording], int]:
    """The LLM's answers, and the size of its vocabulary."""
    lines = report.prompts(options.prompts, sys.maxsize)
    chosen: list[Prompt] = prompts(lines, Tokenizer.load(options.model), options.per_category)
    spec = load(options.model).spec
    recorder = Recorder(options.model, spec.fingerprint, options.cache, options.tokens + DEPTH)
    return recorder.record(chosen, options.temperature), spec.vocab_size


def main() -> int:
    arguments = report.parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--ssm", default="model:ssm:smollm2", metavar="SPEC", help="drafter")
    arguments.add_argument("--boosted", nargs=2, metavar="SPEC", help="drafters that were boost-tuned together")
    arguments.add_argument("--single", metavar="SPEC", help="a drafter of the size of both boosted ones")
    arguments.add_argument("--per-category", type=int, default=20, help="prompts")
    arguments.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], choices=[0.0, 1.0])
    arguments.add_argument("--tokens", type=int, default=96, help="of each answer")
    arguments.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS), choices=BUDGETS)
    arguments.add_argument("--kv-tokens", type=int, default=24_576, help="of each SSM's cache")
    arguments.add_argument("--cache", type=Path, default=Path(__file__).parent / ".cache", help="of recordings")
    arguments.add_argument("--plots", type=Path, metavar="DIR", help="write PNG files there")
    arguments.add_argument("--prompts", type=Path, default=report.PROMPTS)
    options = arguments.parse_args()
    if options.quick:
        options.per_category, options.tokens = min(options.per_category, 1), min(options.tokens, 16)
        options.budgets = options.budgets[:2]
    plan = Plan.of(options.budgets, depth=DEPTH, boosted=bool(options.boosted), single=bool(options.single))
    specs = {"ngram": "ngram", "ssm": options.ssm}
    specs |= dict(zip(("boosted-1", "boosted-2"), options.boosted or (), strict=False))
    specs |= {"single": options.single} if options.single else {}
    out, tally, promises = report.Report("acceptance"), Tally(), Promises()
    try:
        recordings, vocab_size = record(options)
        loaded = drafters(specs, options.kv_tokens, plan.branching)
        watch, done = plan.watch(tally, promises), 0
        with Stand(loaded, {"max_depth": DEPTH}, vocab_size) as stand:
            for group in groups(recordings, options.kv_tokens):
                for setting, walks in stand.replay(group, plan.settings, horizon=options.tokens, watch=watch).items():
                    tally.add(setting, walks)
                done += len(group)
                print(f"\rreplayed {done}/{len(recordings)} texts", end="", file=sys.stderr, flush=True)
    except GraftreeError as error:
        raise SystemExit(str(error)) from None
    out.details = {"speculators": specs, **acceptance_report.details(plan, tally, promises)}
    for table in acceptance_report.tables(plan, tally):
        print(f"\n{table}")
    acceptance_report.targets(out, plan, tally, promises)
    if options.plots:
        acceptance_report.plot(options.plots, plan, tally, promises)
    return out.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
