"""`graftree distill`: an SSM for an LLM, from nothing but the LLM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from graftree.cli.stack import tell
from graftree.config import DEFAULT_MODEL
from graftree.errors import InvalidArgument

MAX_PROMPT_FILE = 1 << 30


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "distill",
        help="make an SSM for an LLM",
        description="The LLM writes dialogues, a small model learns to say the same, and a package that "
        "`--speculator model:DIR` loads comes out. A run that was killed goes on when it is started again.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument("--layers", metavar="A,B,C", help="layers of the LLM to begin as (default: first two, last)")
    parser.add_argument("out", type=Path, metavar="DIR", help="where the package goes")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that `boost` has too."""
    parser.add_argument("--model", metavar="M", default=DEFAULT_MODEL, help="the LLM (default: %(default)s)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="corpus and checkpoints (default: DIR.work)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="user turns, one per line or JSON string")
    parser.add_argument("--head-size", type=int, metavar="N", default=12_288, help="tokens it drafts (%(default)s)")
    parser.add_argument("--tokens", type=int, metavar="N", default=1_000_000, help="the LLM writes (%(default)s)")
    parser.add_argument("--streams", type=int, metavar="N", default=128, help="dialogues at once (%(default)s)")
    parser.add_argument("--length", type=int, metavar="N", default=512, help="tokens of each (%(default)s)")
    parser.add_argument("--top", type=int, metavar="K", default=48, help="log probabilities kept (%(default)s)")
    parser.add_argument("--epochs", type=int, metavar="N", default=6, help="passes over the corpus (%(default)s)")
    parser.add_argument("--minutes", type=float, metavar="M", default=0.0, help="train no longer (0 = all epochs)")
    parser.add_argument("--batch", type=int, metavar="N", default=16, help="sequences per step (%(default)s)")
    parser.add_argument("--micro", type=int, metavar="N", default=4, help="of them at a time (%(default)s)")
    parser.add_argument("--learning-rate", type=float, metavar="R", default=0.01, help="of matrices (%(default)s)")
    parser.add_argument("--adam-rate", type=float, metavar="R", default=1e-3, help="of the rest (%(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of everything drawn (%(default)s)")
    parser.add_argument("--device", metavar="D", default="auto", help="auto, cpu or cuda (%(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", default=0, help="CPU threads (0 = torch's choice)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def run(chosen: argparse.Namespace) -> int:
    """Write, train, package."""
    from graftree.distill.run import distill

    distill(
        settings(chosen, parse_layers(chosen.layers)),
        chosen.out,
        work_directory(chosen),
        prompts=read_prompts(chosen.prompts),
        quiet=chosen.quiet,
        say=tell,
    )
    return 0


def work_directory(chosen: argparse.Namespace) -> Path:
    """Where the corpus and the checkpoints go: beside DIR unless --work says where."""
    out: Path = chosen.out
    if chosen.work is not None:
        return Path(chosen.work)
    if out.name in ("", ".."):
        raise InvalidArgument("DIR", str(out), "a directory with a name of its own, or --work")
    return out.with_name(out.name + ".work")


def settings(chosen: argparse.Namespace, layers: tuple[int, ...]) -> Any:
    """`DistillSettings` of parsed options."""
    from graftree.distill.corpus import CorpusSettings
    from graftree.distill.run import DistillSettings
    from graftree.distill.trainer import TrainSettings

    return DistillSettings(
        llm=chosen.model,
        layers=layers,
        head_size=chosen.head_size,
        tokens=chosen.tokens,
        device=chosen.device,
        threads=chosen.threads,
        corpus=CorpusSettings(streams=chosen.streams, length=chosen.length, top=chosen.top, seed=chosen.seed),
        train=TrainSettings(
            epochs=chosen.epochs,
            batch=chosen.batch,
            micro=chosen.micro,
            learning_rate=chosen.learning_rate,
            adam_rate=chosen.adam_rate,
            seed=chosen.seed,
            minutes=chosen.minutes,
        ),
    )


def read_prompts(path: Path | None) -> list[str]:
    """One prompt per line; a line that is a JSON string may hold line breaks.

    Raises:
        InvalidArgument: the file cannot be read, is too large, holds no prompt, or a line is no text.
    """
    import json

    if path is None:
        return []
    try:
        if path.stat().st_size > MAX_PROMPT_FILE:
            raise InvalidArgument("prompts", str(path), f"at most {MAX_PROMPT_FILE} bytes")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("prompts", str(path), f"a readable text file: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line) if line.startswith('"') else line
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument("prompts", f"line {number}", "text that is valid Unicode") from error
        except ValueError as error:
            raise InvalidArgument(
                "prompts", f"line {number}", "a JSON string where it begins with a quote"
            ) from error
        prompts.append(prompt)
    if not prompts:
        raise InvalidArgument("prompts", str(path), "a file with at least one prompt")
    return prompts


def parse_layers(text: str | None) -> tuple[int, ...]:
    """Layer numbers from `0,1,29`; () for None."""
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidArgument("layers", text, "layer numbers from 0, e.g. 0,1,29")
    return tuple(int(part) for part in parts)
