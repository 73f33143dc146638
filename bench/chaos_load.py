"""Load for `bench.chaos`: requests whose undisturbed answers are known, and what became of each under trouble."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from graftree.client import AsyncClient, Client
from graftree.errors import GraftreeError
from graftree.sdk.options import SpeculationOptions, StructuredOutput
from graftree.sdk.reconnect import Reconnect
from graftree.sdk.results import Result

# Long enough for a pod that has to be started anew.
PATIENCE = Reconnect(attempts=200, first_pause=0.02, longest_pause=0.5)
STALL_SECONDS = 0.8
PROMPT_TOKENS = 24
LOWEST, HIGHEST = 5, 250  # token ids of prompts, in every model's vocabulary


@dataclass(frozen=True)
class Case:
    """A request and its undisturbed answer, decoded without speculation."""

    options: dict[str, Any]
    answer: Result

    def agrees(self, result: Result) -> bool:
        """Whether tokens, text, end and usage of every sample are the undisturbed ones, log probabilities nearly so
        (they are rounded differently in other company)."""
        pairs = zip(self.answer.samples, result.samples, strict=False)
        return len(self.answer.samples) == len(result.samples) and all(_same(one, other) for one, other in pairs)


@dataclass
class Stream:
    """One request under trouble.

    Attributes:
        times: when each chunk came, the start first, by time.monotonic.
        error: why it failed; empty = it did not.
        exact: whether its answer is the undisturbed one.
        reconnects: calls beyond the first.
    """

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""
    exact: bool = False
    reconnects: int = 0
    done: bool = False

    def stall(self, begun: float, over: float) -> float | None:
        """The longest time, in seconds, without a chunk of which a part lies between two moments.

        None where the stream did not run then. The time before its first chunk counts; the time after its last one
        does not.
        """
        if not self.times or self.times[-1] < begun or self.times[0] > over:
            return None
        gaps = [later - earlier for earlier, later in pairwise(self.times) if earlier <= over and later >= begun]
        return max(gaps, default=None)


def requests(count: int, tokens: int, rng: Random, *, greedy: bool = False) -> list[dict[str, Any]]:
    """Requests of every kind: greedy, sampled, with log probabilities, two samples, structured, with a stop string.

    Args:
        count: how many.
        tokens: most of an answer.
        greedy: only the first kind, for a stand-in model.
    """
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.1, "top_k": 40, "seed": 8, "log_probs": True, "alternatives": 2},
        {"temperature": 0.8, "seed": 9, "n": 2},
        {
            "temperature": 0.9,
            "seed": 10,
            "structured_output": StructuredOutput(regex="[a-z]{300}"),
            "ignore_eos": False,
        },
        {"temperature": 0.7, "seed": 11, "stop": ["zz", "qx"], "presence_penalty": 0.5},
    ]
    chosen = kinds[:1] if greedy else kinds
    found = []
    for index in range(count):
        prompt = [rng.randrange(LOWEST, HIGHEST) for _ in range(PROMPT_TOKENS)]
        common = {"token_ids": prompt, "max_new_tokens": tokens, "ignore_eos": True}
        found.append({**common, **chosen[index % len(chosen)]})
    return found


def undisturbed(target: str, wanted: Sequence[dict[str, Any]]) -> list[Case]:
    """The requests with their answers, decoded plainly one after the other."""
    with Client(target) as client:
        return [Case(each, client.generate(**each, speculation=SpeculationOptions(off=True))) for each in wanted]


class Load:
    """So many clients, each with one stream after the other.

    Args:
        targets: of the routers.
        cases: drawn from at random.
        clients: at once.
        rng: of everything that is drawn.

    Attributes:
        streams: all that were begun.
    """

    def __init__(self, targets: Sequence[str], cases: Sequence[Case], clients: int, rng: Random) -> None:
        self.streams: list[Stream] = []
        self._targets, self._cases, self._clients, self._rng = list(targets), list(cases), clients, rng
        self._over = asyncio.Event()

    def stop(self) -> None:
        """Let each client finish the stream that it has, and begin no other."""
        self._over.set()

    async def run(self) -> None:
        """Until `stop`, and until the last stream has ended."""
        seeds = [self._rng.getrandbits(64) for _ in range(self._clients)]
        await asyncio.gather(*(self._serve(Random(seed)) for seed in seeds))

    async def _serve(self, rng: Random) -> None:
        async with AsyncClient(
            self._targets, reconnect=PATIENCE, stall_seconds=STALL_SECONDS, rng=Random(rng.getrandbits(64))
        ) as client:
            while not self._over.is_set():
                await self._one(client, rng.choice(self._cases))

    async def _one(self, client: AsyncClient, case: Case) -> None:
        stream = Stream([time.monotonic()])
        self.streams.append(stream)
        call = client.stream(**case.options)
        try:
            async for chunk in call:
                stream.times.append(time.monotonic())
                stream.tokens += len(chunk.token_ids)
            stream.exact = case.agrees(call.result)
        except GraftreeError as error:
            stream.error = f"{type(error).__name__}: {error}"
            call.cancel()
        stream.reconnects = call.reconnects
        stream.done = True


def _same(one: Result, other: Result) -> bool:
    if _exact(one) != _exact(other):
        return False
    pairs = list(zip(one.log_probs, other.log_probs, strict=False))
    return len(one.log_probs) == len(other.log_probs) and all(
        a.token_id == b.token_id and abs(a.log_prob - b.log_prob) < 2e-3 for a, b in pairs
    )


def _exact(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.usage, result.stop_string
