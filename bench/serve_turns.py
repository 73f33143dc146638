"""`Service`: batches of requests to a stack, so many at once, and what came of them."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from bench import report
from bench.recording import Prompt
from graftree import AsyncClient, LocalStack
from graftree.cli.stack import tell
from graftree.config import DEFAULT_MODEL, DEFAULT_SPECULATORS
from graftree.sdk.options import SpeculationOptions
from graftree.sdk.results import ModelInfo, Result

T = TypeVar("T")

WARM_UP = "Name three rivers, and say of each where it begins and where it ends."


def flags(description: str, *, concurrency: Sequence[int], max_new_tokens: int) -> argparse.ArgumentParser:
    """Of what is measured through the services.

    Args:
        concurrency, max_new_tokens: defaults.
    """
    arguments = report.parser(description)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument(
        "--speculator", action="append", metavar="SPEC", help=f"default: {', '.join(DEFAULT_SPECULATORS)}"
    )
    arguments.add_argument("--concurrency", type=int, nargs="+", default=concurrency, help="requests at once")
    arguments.add_argument("--turns", type=int, default=2, help="batches of each kind")
    arguments.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    arguments.add_argument(
        "--threads", type=int, help="CPU threads of each pod with a model; default: the cores, shared out"
    )
    arguments.add_argument("--prompts", type=Path, default=report.PROMPTS)
    return arguments


def given(options: argparse.Namespace) -> list[str]:
    """The speculators that are to be used."""
    return options.speculator or list(DEFAULT_SPECULATORS)


@contextmanager
def serving(
    options: argparse.Namespace, *, in_process: bool, **verifier_options: Any
) -> Iterator[tuple[LocalStack, Service]]:
    """A running stack, and a connection to it.

    Args:
        options: of `flags`.
        in_process: the stack runs in this process, for tests.
    """
    stack = LocalStack(
        options.model,
        given(options),
        threads=options.threads,
        in_process=in_process,
        verifier_options=verifier_options,
        notify=tell,
    )
    with stack, Service(stack, options.max_new_tokens) as service:
        yield stack, service


@dataclass(frozen=True)
class Turn:
    """One batch.

    Attributes:
        seconds: from the first request to the last answer.
        results: in the order of the prompts.
    """

    seconds: float
    results: tuple[Result, ...]

    @property
    def tokens(self) -> int:
        """Generated."""
        return sum(result.usage.completion_tokens for result in self.results)

    @property
    def rate(self) -> float:
        """Tokens per second, prompts included."""
        return self.tokens / self.seconds


class Service:
    """A connection of its own event loop.

    Args:
        stack: a running one.
        max_new_tokens: of every request.
    """

    def __init__(self, stack: LocalStack, max_new_tokens: int) -> None:
        self._max_new_tokens = max_new_tokens
        self._runner = asyncio.Runner()
        self._client = AsyncClient(stack.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def call(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        """What becomes of something else that is done with the connection."""
        return self._runner.run(work(self._client))

    def info(self) -> ModelInfo:
        """What is served."""
        return self._runner.run(self._client.model_info())

    def warm_up(self) -> None:
        """One request each way, so that no measured one is the first."""
        for off in (True, False):
            self._runner.run(
                self._client.generate(
                    WARM_UP, max_new_tokens=self._max_new_tokens, speculation=SpeculationOptions(off=off)
                )
            )

    def batch(self, prompts: Sequence[Prompt], at_once: int, *, off: bool) -> Turn:
        """Answer all of them, `at_once` at a time: whoever has finished takes the next prompt.

        Args:
            off: without speculation.
        """
        return self._runner.run(self._batch(prompts, at_once, off))

    def plainly(self, prompt: Prompt, alternatives: int) -> Result:
        """One answer without speculation, with log probabilities as the LLM gave them."""
        return self._runner.run(
            self._client.generate(
                token_ids=list(prompt.token_ids),
                max_new_tokens=self._max_new_tokens,
                speculation=SpeculationOptions(off=True),
                log_probs=True,
                alternatives=alternatives,
            )
        )

    async def _batch(self, prompts: Sequence[Prompt], at_once: int, off: bool) -> Turn:
        results: list[Result | None] = [None] * len(prompts)
        waiting = iter(range(len(prompts)))

        async def work() -> None:
            for index in waiting:
                results[index] = await self._client.generate(
                    token_ids=list(prompts[index].token_ids),
                    max_new_tokens=self._max_new_tokens,
                    speculation=SpeculationOptions(off=off),
                )

        begun = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(at_once)))
        seconds = time.perf_counter() - begun
        return Turn(seconds, tuple(result for result in results if result is not None))
