"""How commands reach a router that asks for a key, or speaks TLS."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from graftree.errors import InvalidArgument


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --ca; the key comes from a variable, because everybody can read a command line."""
    parser.add_argument(
        "--ca",
        metavar="FILE",
        help="TLS: the router's certificate is by one of these authorities (PEM). An API key is read from "
        "$GRAFTREE_API_KEY",
    )


def client_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `Client`.

    Raises:
        InvalidArgument: the file of --ca cannot be read.
    """
    options: dict[str, Any] = {"api_key": os.environ.get("GRAFTREE_API_KEY") or None}
    if chosen.ca is not None:
        import grpc

        options["credentials"] = grpc.ssl_channel_credentials(content("--ca", chosen.ca))
    return options


def content(flag: str, path: str) -> bytes:
    """What a file holds. Raises InvalidArgument: names the flag."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(flag, path, f"a file that can be read ({type(error).__name__})") from None
