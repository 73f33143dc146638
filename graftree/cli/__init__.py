"""The `graftree` command.

    graftree up          all tiers on this machine, until Ctrl-C
    graftree generate    one answer, streamed; from a running router or from a private stack
    graftree models      pull, list
    graftree distill     an SSM for an LLM
    graftree boost       several that complement each other
    graftree version

Exit codes: 0 done, 1 failed, 2 the request or an option is wrong, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from graftree import __version__
from graftree.cli import boost, distill, generate, keys, models, up
from graftree.errors import ConfigError, GraftreeError, InvalidArgument

INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: by default those of the command line.

    Returns:
        The exit code.
    """
    chosen = parser().parse_args(arguments)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _terminated)
    try:
        return int(chosen.run(chosen))
    except (InvalidArgument, ConfigError) as error:
        return _complain(error, 2)
    except GraftreeError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    """A private stack is taken down with its folders, as after Ctrl-C."""
    sys.exit(128 + number)


def _complain(error: GraftreeError, code: int) -> int:
    print(f"graftree: {error}", file=sys.stderr, flush=True)
    return code


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = _Parser(
        prog="graftree",
        description="An LLM's own answers, sooner, by token trees.",
        epilog="Exit codes: 0 done, 1 failed, 2 an option or the request is wrong, 130 interrupted, 143 terminated.",
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"graftree {__version__}", help="print the version")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (up, generate, models, distill, boost, keys):
        command.add_parser(commands)
    version = commands.add_parser("version", help="print the version", allow_abbrev=False)
    version.set_defaults(run=_version)
    return root


def _version(_: argparse.Namespace) -> int:
    print(f"graftree {__version__}")
    return 0
