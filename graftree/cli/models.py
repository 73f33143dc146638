"""`graftree models`: what is in the cache, and getting more into it."""

from __future__ import annotations

import argparse
from typing import Any

from graftree.config import DEFAULT_MODEL
from graftree.models.pull import cached, pull


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
    pulling.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="default: %(default)s")
    pulling.add_argument("--quiet", action="store_true", help="no progress bar")
    pulling.set_defaults(run=_pull)
    listing = actions.add_parser("list", help="list the cached models", allow_abbrev=False)
    listing.set_defaults(run=_list)


def _pull(chosen: argparse.Namespace) -> int:
    print(pull(chosen.model, progress=not chosen.quiet))
    return 0


def _list(_: argparse.Namespace) -> int:
    for model in cached():
        print(f"{model.uri}\t{model.size / 1e6:.1f} MB\t{model.path}")
    return 0
