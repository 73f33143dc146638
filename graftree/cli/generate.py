"""`graftree generate`: one answer, streamed to stdout, with a line about it on stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, get_args

from graftree.cli.access import add_option, client_options, content
from graftree.cli.stack import add_options, refuse_with_target, stack_arguments
from graftree.client import Client, Stream
from graftree.errors import InvalidArgument
from graftree.sdk.options import GenerateOptions, Mode, SpeculationOptions, StructuredOutput
from graftree.sdk.results import Result


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="generate from a prompt",
        description="Generate from a prompt and stream the text. Without --target and GRAFTREE_TARGET a private "
        "stack is started for this one answer.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", help="text to continue; - reads it from stdin")
    parser.add_argument(
        "--target",
        metavar="HOST:PORT[,...]",
        default=os.environ.get("GRAFTREE_TARGET") or None,
        help="a running router, or several that can go on for one another (default: $GRAFTREE_TARGET)",
    )
    add_option(parser)
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; implies --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding")
    parser.add_argument(
        "--mode",
        choices=[mode.replace("_", "-") for mode in get_args(Mode)],
        help="how drafts are accepted (default: target-only)",
    )
    parser.add_argument("--max-nodes", type=int, metavar="N", help="most tree nodes per verify step")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="longest time for the answer")
    sampling = parser.add_argument_group("sampling and stopping")
    sampling.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="most tokens of the answer (default: the router's, 256)"
    )
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 = greedy (default)")
    sampling.add_argument("--seed", type=int, metavar="S")
    sampling.add_argument("--top-k", type=int, metavar="K")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--min-p", type=float, metavar="P")
    sampling.add_argument("--repetition-penalty", type=float, metavar="R")
    sampling.add_argument("--presence-penalty", type=float, metavar="P")
    sampling.add_argument("--frequency-penalty", type=float, metavar="F")
    sampling.add_argument("--bad-word", action="append", metavar="TEXT", help="never say this; repeatable")
    sampling.add_argument("--min-new-tokens", type=int, metavar="N")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the model's end")
    shape = parser.add_argument_group("structured output, at most one")
    shape.add_argument("--json-schema", metavar="FILE", help="the output satisfies the JSON Schema in this file")
    shape.add_argument("--json-object", action="store_true", help="the output is a JSON object")
    shape.add_argument("--regex", metavar="R", help="the whole output matches")
    shape.add_argument("--grammar", metavar="FILE", help="the output is derived from the Lark grammar in this file")
    shape.add_argument("--choice", action="append", metavar="TEXT", help="the output is one of these; repeatable")
    add_options(parser.add_argument_group("the private stack"))
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Generate; an interrupt cancels the generation before it is passed on."""
    prompt = sys.stdin.read() if chosen.prompt == "-" else chosen.prompt
    access = client_options(chosen)
    with _target(chosen, access) as target, Client(target, **access) as client:
        text, options = _request(prompt, chosen)
        with client.stream(text, **options) as stream:
            try:
                _show(stream, as_json=chosen.json)
            except BrokenPipeError:  # whoever read the text has had enough
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())
                return 1
    return 0


@contextlib.contextmanager
def _target(chosen: argparse.Namespace, access: dict[str, Any]) -> Iterator[str]:
    if chosen.target is not None:
        refuse_with_target(chosen)
        yield chosen.target
        return
    from graftree.local_stack import LocalStack

    with LocalStack(**stack_arguments(chosen), client_options=access) as stack:
        yield stack.target


def _request(prompt: str, chosen: argparse.Namespace) -> tuple[str | None, GenerateOptions]:
    options: GenerateOptions = {
        "max_new_tokens": chosen.max_new_tokens,
        "temperature": chosen.temperature,
        "seed": chosen.seed,
        "top_k": chosen.top_k,
        "top_p": chosen.top_p,
        "min_p": chosen.min_p,
        "repetition_penalty": chosen.repetition_penalty,
        "presence_penalty": chosen.presence_penalty,
        "frequency_penalty": chosen.frequency_penalty,
        "bad_words": chosen.bad_word,
        "min_new_tokens": chosen.min_new_tokens,
        "stop": chosen.stop,
        "ignore_eos": chosen.ignore_eos,
        "timeout": chosen.timeout,
    }
    if chosen.no_speculation or chosen.max_nodes is not None or chosen.mode is not None:
        mode = None if chosen.mode is None else chosen.mode.replace("-", "_")
        options["speculation"] = SpeculationOptions(off=chosen.no_speculation, max_nodes=chosen.max_nodes, mode=mode)
    structured = StructuredOutput(
        json_schema=_content("--json-schema", chosen.json_schema),
        json_object=chosen.json_object,
        regex=chosen.regex,
        grammar=_content("--grammar", chosen.grammar),
        choice=chosen.choice,
    )
    if structured != StructuredOutput():
        options["structured_output"] = structured
    if not chosen.chat and chosen.system is None:
        return prompt, options
    system = [] if chosen.system is None else [{"role": "system", "content": chosen.system}]
    options["chat"] = [*system, {"role": "user", "content": prompt}]
    return None, options


def _content(flag: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return content(flag, path).decode()
    except UnicodeError:
        raise InvalidArgument(flag, path, "a text file") from None


def _show(stream: Stream, *, as_json: bool) -> None:
    for chunk in stream:
        if not as_json:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    if as_json:
        print(json.dumps(as_object(stream.result), ensure_ascii=False), flush=True)
    else:
        print(flush=True)
        print(summary(stream.result), file=sys.stderr, flush=True)


def as_object(result: Result) -> dict[str, Any]:
    """What --json prints."""
    wanted = ("request_id", "model", "seed", "text", "token_ids", "finish_reason", "usage", "speculation", "timings")
    everything = dataclasses.asdict(result)
    return {name: everything[name] for name in wanted}


def summary(result: Result) -> str:
    """One line about how an answer came to be."""
    usage, speculation, timings = result.usage, result.speculation, result.timings
    rate = usage.completion_tokens / (timings.total_ns / 1e9) if timings.total_ns else 0.0
    return (
        f"{usage.completion_tokens} tokens in {timings.total_ns / 1e9:.2f} s ({rate:.1f}/s), "
        f"{speculation.num_spec_steps} verify steps, "
        f"mean acceptance length {speculation.mean_acceptance_length:.2f}, "
        f"finish: {result.finish_reason}, seed: {result.seed}"
    )
