"""Options that describe a stack, shared by `up` and a `generate` without a target."""

from __future__ import annotations

import argparse
import sys
from typing import Any, get_args

from graftree.config import DEFAULT_MODEL, default_speculators
from graftree.errors import ConfigError
from graftree.local.pod import Tier


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add the options to a parser or a group of one."""
    parser.add_argument("--model", metavar="M", help=f"the LLM (default: {DEFAULT_MODEL})")
    parser.add_argument(
        "--speculator",
        action="append",
        metavar="SPEC",
        help="ngram, model:<uri> or package.module:Class; once per pod (default: ngram, and the LLM's shipped SSM)",
    )
    parser.add_argument("--no-speculators", action="store_true", help="start no speculator: plain decoding")
    parser.add_argument("--verifiers", type=int, metavar="N", help="verifier pods (default: 1)")
    parser.add_argument("--redis", metavar="URL", help="a Redis to use instead of an embedded one")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TIER.KEY=VALUE",
        help="one more configuration field of all pods of a tier, e.g. verifier.dtype=bfloat16",
    )


def stack_arguments(chosen: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LocalStack` for parsed options."""
    if chosen.no_speculators and chosen.speculator:
        raise ConfigError("--speculator", ", ".join(chosen.speculator), "not together with --no-speculators")
    model = DEFAULT_MODEL if chosen.model is None else chosen.model
    speculators = [] if chosen.no_speculators else chosen.speculator or list(default_speculators(model))
    return {
        "model": model,
        "speculators": speculators,
        "verifiers": 1 if chosen.verifiers is None else chosen.verifiers,
        "redis": chosen.redis,
        "notify": tell,
        **_settings(chosen.set),
    }


def refuse_with_target(chosen: argparse.Namespace) -> None:
    """A stack that runs already cannot be described anew.

    Raises:
        ConfigError: names the first such option.
    """
    for name in ("model", "speculator", "no_speculators", "verifiers", "redis", "set"):
        if value := getattr(chosen, name):
            raise ConfigError(
                "--" + name.replace("_", "-"), value, f"only without a target, which is {chosen.target}"
            )


def _settings(settings: list[str]) -> dict[str, dict[str, str]]:
    options: dict[str, dict[str, str]] = {f"{tier}_options": {} for tier in get_args(Tier)}
    for setting in settings:
        path, equals, value = setting.partition("=")
        tier, dot, key = path.partition(".")
        if not equals or not dot or f"{tier}_options" not in options:
            raise ConfigError("--set", setting, f"TIER.KEY=VALUE with a tier of {', '.join(get_args(Tier))}")
        options[f"{tier}_options"][key.replace("-", "_")] = value
    return options


def tell(line: str) -> None:
    """Say something on stderr, at once."""
    print(f"graftree: {line}", file=sys.stderr, flush=True)
