"""`Generations`: every generation of this router by request id; admission, joining, replay and the end of all."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

from graftree.config import RouterConfig
from graftree.errors import ResourceExhausted, Unavailable
from graftree.grammar import Grammars
from graftree.store.sessions import SessionStore
from graftree.text.tokenizer import Tokenizer
from graftree.v1.generation_pb2 import GenerateRequest
from router import request as requests
from router.admission import Admission
from router.caller import NOBODY, Caller
from router.generation import Generation
from router.records import Records
from router.tools import Tools

MAX_REPLAYS = 1024  # finished generations kept, whatever replay_seconds says


class Generations:
    """Used on one event loop.

    Args:
        identifiers: where ids of requests without one are drawn from.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        tokenizer: Tokenizer,
        grammars: Grammars,
        store: SessionStore,
        tools: Tools,
        identifiers: Random,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._records = Records(store, tools)
        self._tools = tools
        self._identifiers = identifiers
        self.admission = Admission(
            tools.metrics,
            tools.pods.verifiers,
            longest_wait=config.connect_timeout_seconds,
            clock=lambda: tools.clock_ns() / 1e9,
        )
        self._running: dict[str, Generation] = {}
        self._replays: dict[str, Generation] = {}
        self._leaving: dict[asyncio.Task[None], str] = {}
        self.draining = False

    def __len__(self) -> int:
        """Generations under way."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Of these, the ones without a verifier so far."""
        return sum(generation.waits for generation in self._running.values())

    @property
    def running(self) -> int:
        """Of these, the ones with one."""
        return len(self) - self.waiting

    @property
    def queue_age_seconds(self) -> float:
        """How long the longest of those that wait has waited; 0 without one."""
        arrived = [generation.arrived_ns for generation in self._running.values() if generation.waits]
        return (self._tools.clock_ns() - min(arrived)) / 1e9 if arrived else 0.0

    def start(
        self, message: GenerateRequest, caller: Caller = NOBODY, *, remaining: float | None = None
    ) -> Generation:
        """A new generation, or the caller's one under this request id.

        Args:
            remaining: seconds until nobody wants the answer any more; None = no deadline.

        Raises:
            InvalidArgument: names the field that is out of range.
            AlreadyExists: the id is in use for a different request.
            ResourceExhausted: max_requests are under way, or the answer would come too late.
            Unavailable: the router is going away.
        """
        metrics = self._tools.metrics
        metrics.requests += 1
        identifier = caller.scoped(requests.request_id(message, self._identifiers))
        requests.check(message, self._config)
        caller.check_priority(message.priority)
        known = self._running.get(identifier) or self._replays.get(identifier)
        if known is not None:
            known.check_same(message)
            metrics.attached += 1
            return known
        if self.draining:
            raise Unavailable("this router is going away; ask another")
        if len(self._running) >= self._config.max_requests:
            metrics.refused += 1
            retry = self.admission.retry_after()
            raise ResourceExhausted(f"{len(self._running)} requests are under way, the most this router takes", retry)
        if not message.resume_after:
            self._admit(message, remaining)
        generation = Generation(
            identifier,
            message,
            tokenizer=self._tokenizer,
            grammars=self._grammars,
            records=self._records,
            tools=self._tools,
            over=self._over,
            caller=caller,
            after=[task for task, name in self._leaving.items() if name == identifier],
            admit=partial(self._admit, message, remaining, counted=1) if message.resume_after else None,
        )
        self._running[identifier] = generation
        return generation

    def _admit(self, message: GenerateRequest, remaining: float | None, counted: int = 0) -> None:
        """Raises ResourceExhausted; `counted` generations are this request's own."""
        self.admission.check(
            message.stopping.max_new_tokens or self._config.default_max_new_tokens,
            remaining,
            running=len(self._running) - counted,
            waiting=self.waiting - counted,
            samples=max(1, message.n),
        )

    async def drain(self) -> None:
        """Take no new requests; wait for those under way."""
        self.draining = True
        while tasks := [generation.task for generation in self._running.values()]:
            await asyncio.wait(tasks)
        await self._all_left()

    async def close(self) -> None:
        """End what still runs."""
        self.draining = True
        for generation in list(self._running.values()):
            generation.cancel(Unavailable("this router is going away; ask another"))
        await self._all_left()
        self._replays.clear()

    async def _all_left(self) -> None:
        if self._leaving:
            await asyncio.wait(self._leaving)

    def _over(self, generation: Generation) -> None:
        self._running.pop(generation.identifier, None)
        # Its record is given back by the task, which may still be on its way out.
        self._leaving[generation.task] = generation.identifier
        generation.task.add_done_callback(lambda task: self._leaving.pop(task, None))
        metrics = self._tools.metrics
        metrics.latency.observe((self._tools.clock_ns() - generation.arrived_ns) / 1e9)
        if not generation.finished:
            metrics.failed += 1
            return
        metrics.finished += 1
        if self._config.replay_seconds > 0:
            while len(self._replays) >= MAX_REPLAYS:
                self._replays.pop(next(iter(self._replays)))
            self._replays[generation.identifier] = generation
            asyncio.get_running_loop().call_later(self._config.replay_seconds, self._expire, generation)

    def _expire(self, generation: Generation) -> None:
        if self._replays.get(generation.identifier) is generation:
            del self._replays[generation.identifier]
