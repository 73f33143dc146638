"""`graftree up`: all tiers on this machine, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import shlex
import signal
import threading
from types import FrameType
from typing import Any

from graftree.cli.access import add_option, client_options
from graftree.cli.stack import add_options, stack_arguments, tell


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "up",
        help="start all tiers on this machine",
        description="Start Redis, verifiers, speculators and a router, print the endpoint, and run until Ctrl-C. "
        "A pod that ends by itself is reported and not started again; the others go on. Each pod logs to a file, "
        "TIER-N.log, in a folder graftree-logs-* of $TMPDIR (else /tmp) that is removed at the end.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="the router's (default: 8000; 0 = any)")
    parser.add_argument("--host", default="127.0.0.1", help="address the router listens on (default: %(default)s)")
    add_option(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Start, wait for a signal, drain."""
    from graftree.local_stack import LocalStack

    arguments = stack_arguments(chosen)
    arguments["router_options"] = {"host": chosen.host, **arguments["router_options"]}
    stack = LocalStack(port=chosen.port, **arguments, client_options=client_options(chosen))
    enough = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if enough.is_set() or not started:
            raise KeyboardInterrupt
        enough.set()

    started = False
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        stack.start()
        started = True
        print(f"endpoint {stack.target}")
        print(f"graftree generate --target {stack.target} {shlex.quote('The capital of France is')}", flush=True)
        enough.wait()
        tell("draining; once more to stop at once")
        stack.close()
    finally:
        enough.set()
        stack.close(drain_seconds=0)
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
