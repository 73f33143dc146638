"""`graftree boost`: several SSMs for an LLM, each taught what those before it do not get."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from graftree.cli.distill import add_options, parse_layers, read_prompts, settings, work_directory
from graftree.cli.stack import tell


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "boost",
        help="make several SSMs that complement each other",
        description="SpecInfer's collective boost-tuning: the first SSM learns from all of the text, each next one "
        "from what those before it do not get. Prints how often each, all merged, and one SSM of the same total size "
        "have the LLM's next token among as many children.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument(
        "--ssm", action="append", metavar="A,B", required=True, help="layers of the LLM that one begins as; repeat"
    )
    parser.add_argument("--single", metavar="A,B,C", help="also train one SSM that begins as these layers")
    parser.add_argument(
        "--run-length", type=int, default=1, metavar="N", help="tokens in a row that count as got (%(default)s)"
    )
    parser.add_argument(
        "out", type=Path, metavar="DIR", help="where the packages go: DIR/ssm-1, DIR/ssm-2, DIR/single"
    )
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Train them, print the report."""
    from graftree.distill.boost import boost

    report = boost(
        settings(chosen, ()),
        [parse_layers(text) for text in chosen.ssm],
        parse_layers(chosen.single),
        chosen.out,
        work_directory(chosen),
        run=chosen.run_length,
        prompts=read_prompts(chosen.prompts),
        quiet=chosen.quiet,
        say=tell,
    )
    print("\n".join(report.lines()))
    return 0
