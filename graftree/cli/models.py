"""`graftree models`: what is in the cache, and getting more into it."""

from __future__ import annotations

import argparse
from typing import Any

from graftree.config import DEFAULT_MODEL
from graftree.models.commands import list_models, pull_models


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand and its two."""
    parser = commands.add_parser("models", help="download and list models", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    pulling = actions.add_parser(
        "pull",
        help="download a model and convert it, once",
        description="Download a model, check its digest and convert it into the cache ($GRAFTREE_CACHE, else "
        "~/.cache/graftree), with a progress bar. Prints its directory.",
        allow_abbrev=False,
    )
    pulling.add_argument("model", nargs="*", default=[DEFAULT_MODEL], help=f"default: {DEFAULT_MODEL}")
    pulling.add_argument("--quiet", action="store_true", help="no progress bar")
    pulling.set_defaults(run=lambda chosen: pull_models(chosen.model, progress=not chosen.quiet))
    listing = actions.add_parser("list", help="list the cached models", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="print a JSON array")
    listing.set_defaults(run=lambda chosen: list_models(as_json=chosen.json))
