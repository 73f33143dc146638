"""`graftree keys new`: an API key, and its entry for the file that `api_keys` names."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from graftree.errors import InvalidArgument


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("keys", help="API keys of the router's edge", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    new = actions.add_parser(
        "new",
        help="make a key",
        description="Print a new key on stderr, once, and its entry for the file of api_keys on stdout.",
        allow_abbrev=False,
    )
    new.add_argument("name", help="of the key, for the audit log")
    new.add_argument("--tenant", metavar="T", help="whose it is (default: the key's name)")
    new.add_argument("--requests-per-second", type=float, default=0.0, metavar="N", help="0 = any number (default)")
    new.add_argument("--concurrent", type=int, default=0, metavar="N", help="requests at once; 0 = any (default)")
    new.add_argument("--tokens-per-minute", type=float, default=0.0, metavar="N", help="0 = any number (default)")
    new.add_argument("--max-priority", type=int, default=0, metavar="N", help="of its requests (default: 0)")
    new.add_argument("--admin", action="store_true", help="may see the pods and their addresses")
    new.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Make a key; only its digest is for keeping.

    Raises:
        InvalidArgument: an option out of its range.
    """
    from pydantic import ValidationError

    from graftree.security.keys import ApiKey, digest, new_key

    key = new_key()
    try:
        entry = ApiKey(
            name=chosen.name,
            tenant=chosen.tenant or chosen.name,
            sha256=digest(key),
            requests_per_second=chosen.requests_per_second,
            concurrent=chosen.concurrent,
            tokens_per_minute=chosen.tokens_per_minute,
            max_priority=chosen.max_priority,
            admin=chosen.admin,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(str(first["loc"][0]), first["input"], first["msg"]) from None
    print(f"the key, which is shown this once: {key}", file=sys.stderr)
    print(entry.model_dump_json(exclude_defaults=True))
    return 0
