"""Load for `bench.soak`: requests of every kind, good and bad, finished and given up, from many clients at once."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from graftree.client import AsyncClient
from graftree.errors import Cancelled, DeadlineExceeded, GraftreeError, InvalidArgument, ResourceExhausted
from graftree.sdk.options import StructuredOutput

PROMPT_TOKENS = (2, 120)
LOWEST, HIGHEST = 5, 250  # token ids of prompts, in every model's vocabulary
SHORT, LONG = (1, 16), (100, 250)  # tokens of an answer
SHARED = [17] * 48  # what every third prompt begins with
BAD: tuple[dict[str, Any], ...] = (
    {"token_ids": [1 << 30], "max_new_tokens": 4},
    {"token_ids": [1], "top_p": 0.0},
    {"token_ids": [1], "temperature": -1.0},
    {"token_ids": [7] * 20_000, "max_new_tokens": 4},  # longer than either model's context
    {"token_ids": [1], "stop": ["x" * 100_000]},
    {"token_ids": [1], "structured_output": StructuredOutput(regex="(")},
    {"prompt": "", "request_id": "no-uuid"},
)


class Unexpected(Exception):
    """An outcome that a request of its kind must not have."""


class Mix:
    """So many clients, each with one request after the other, drawn at random.

    Args:
        targets: of the routers.
        greedy: leave out what a stand-in model cannot say.

    Attributes:
        counts: requests by kind.
        unexpected: kind and outcome of those that did not go as they should.
    """

    def __init__(self, targets: Sequence[str], clients: int, rng: Random, *, greedy: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self._targets, self._clients, self._rng = list(targets), clients, rng
        self._over = False
        kinds: dict[str, tuple[int, Callable[[AsyncClient, Random], Awaitable[None]]]] = {
            "short": (8, self._short),
            "long": (3, self._long),
            "given up": (4, self._given_up),
            "late": (2, self._late),
            "bad": (3, self._bad),
            "told again": (2, self._again),
            "stranger": (1, self._stranger),
        }
        if not greedy:
            kinds |= {"samples": (2, self._samples), "structured": (1, self._structured), "text": (2, self._text)}
        self._names = list(kinds)
        self._weights = [weight for weight, _ in kinds.values()]
        self._kinds = {name: ask for name, (_, ask) in kinds.items()}

    def stop(self) -> None:
        """Let each client finish what it has begun."""
        self._over = True

    async def run(self) -> None:
        """Until `stop`."""
        await asyncio.gather(*(self._serve(Random(self._rng.getrandbits(64))) for _ in range(self._clients)))

    async def _serve(self, rng: Random) -> None:
        async with AsyncClient(self._targets, rng=Random(rng.getrandbits(64))) as client:
            while not self._over:
                kind = rng.choices(self._names, self._weights)[0]
                self.counts[kind] += 1
                try:
                    await self._kinds[kind](client, rng)
                except (GraftreeError, Unexpected) as error:
                    self.unexpected.append(f"{kind}: {type(error).__name__}: {str(error)[:200]}")

    # The kinds.

    async def _short(self, client: AsyncClient, rng: Random) -> None:
        await _answered(client, rng, SHORT)

    async def _long(self, client: AsyncClient, rng: Random) -> None:
        await _answered(client, rng, LONG)

    async def _samples(self, client: AsyncClient, rng: Random) -> None:
        await _answered(client, rng, SHORT, n=3, temperature=0.9, seed=rng.getrandbits(32), log_probs=True)

    async def _structured(self, client: AsyncClient, rng: Random) -> None:
        wanted = StructuredOutput(regex="[a-z]{300}")
        await _answered(client, rng, SHORT, structured_output=wanted, ignore_eos=False)

    async def _text(self, client: AsyncClient, rng: Random) -> None:
        """A text that nobody has asked before, told until a letter comes; most tokens of a random model have none."""
        words = (f"{rng.getrandbits(32):x}" for _ in range(rng.randint(1, 20)))
        result = await client.generate(" ".join(words), max_new_tokens=rng.randint(*SHORT), stop=["e"])
        if "e" in result.text:
            raise Unexpected("it goes on behind its end")

    async def _given_up(self, client: AsyncClient, rng: Random) -> None:
        """A stream that is left after some chunks."""
        async with client.stream(**_options(rng, LONG)) as stream:
            for _ in range(rng.randrange(6)):
                await anext(stream, None)

    async def _late(self, client: AsyncClient, rng: Random) -> None:
        """A deadline that may or may not be kept, or is refused."""
        try:
            await client.generate(**_options(rng, LONG), timeout=rng.uniform(0.01, 1.0))
        except (DeadlineExceeded, ResourceExhausted, Cancelled):
            return

    async def _bad(self, client: AsyncClient, rng: Random) -> None:
        """What must be refused by name."""
        try:
            await client.generate(**rng.choice(BAD))
        except InvalidArgument:
            return
        raise Unexpected("it was not refused")

    async def _again(self, client: AsyncClient, rng: Random) -> None:
        """A finished request, told a second time."""
        options = _options(rng, SHORT) | {"request_id": str(uuid.UUID(int=rng.getrandbits(128), version=4))}
        first, second = await client.generate(**options), await client.generate(**options)
        if first.token_ids != second.token_ids:
            raise Unexpected("another answer the second time")

    async def _stranger(self, _: AsyncClient, rng: Random) -> None:
        """One request of a client that comes and goes."""
        async with AsyncClient(self._targets, rng=Random(rng.getrandbits(64))) as client:
            await _answered(client, rng, SHORT)


def _options(rng: Random, tokens: tuple[int, int]) -> dict[str, Any]:
    prompt = [rng.randint(LOWEST, HIGHEST) for _ in range(rng.randint(*PROMPT_TOKENS))]
    shared = SHARED if rng.random() < 0.33 else []
    return {"token_ids": shared + prompt, "max_new_tokens": rng.randint(*tokens), "ignore_eos": True}


async def _answered(client: AsyncClient, rng: Random, tokens: tuple[int, int], **more: Any) -> None:
    options = _options(rng, tokens) | more
    result = await client.generate(**options)
    for sample in result.samples:
        if len(sample.token_ids) != options["max_new_tokens"]:
            raise Unexpected(f"{len(sample.token_ids)} tokens, not {options['max_new_tokens']}")
