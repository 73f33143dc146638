"""Trouble for `bench.chaos`: processes of every tier, and Redis, killed, paused and drained at random times."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from graftree.errors import GraftreeError
from graftree.local.pod import Tier
from graftree.local_stack import LocalStack
from graftree.store.embedded import EmbeddedRedis

TIERS: tuple[Tier, ...] = ("speculator", "verifier", "router")  # in the order of a rolling restart
Victim = Literal["router", "verifier", "speculator", "redis"]
How = Literal["kill", "pause", "drain"]

SETTLE_SECONDS = 0.3  # between one trouble's end and the next
PAUSE_FACTOR = 4.0  # a pause is longer than an absence: long enough to be noticed, or not


@dataclass
class Fault:
    """One thing that was done. `at` and `over`: by time.monotonic, when it happened and when all was there again."""

    victim: Victim
    how: How
    at: float
    over: float = 0.0


class Places:
    """The pods of a stack by place: whoever is started in place of a dead one gets its address and its options.

    Args:
        stack: of child processes, started.
        redis: the stack's, started.
    """

    def __init__(self, stack: LocalStack, redis: EmbeddedRedis) -> None:
        self._stack, self._redis = stack, redis
        self._places: dict[tuple[Tier, int], int] = {}
        for tier in TIERS:
            for index in range(len(stack.pods(tier))):
                self._places[tier, index] = index

    def count(self, tier: Tier) -> int:
        """Places of a tier."""
        return sum(each == tier for each, _ in self._places)

    def kill(self, victim: Victim, place: int) -> None:
        """SIGKILL."""
        if victim == "redis":
            self._redis.stop()
        else:
            self._stack.kill(victim, self._places[victim, place])

    def drain(self, victim: Tier, place: int) -> None:
        """SIGTERM, and its end."""
        self._stack.stop(victim, self._places[victim, place])

    def pause(self, victim: Victim, place: int) -> None:
        """SIGSTOP."""
        if victim == "redis":
            os.kill(self._redis_pid, signal.SIGSTOP)
        else:
            self._stack.pause(victim, self._places[victim, place])

    def resume(self, victim: Victim, place: int) -> None:
        """SIGCONT."""
        if victim == "redis":
            os.kill(self._redis_pid, signal.SIGCONT)
        else:
            self._stack.resume(victim, self._places[victim, place])

    @property
    def _redis_pid(self) -> int:
        assert self._redis.pid is not None, "it runs"
        return self._redis.pid

    def start(self, victim: Victim, place: int) -> None:
        """Another one in the place of one that is gone; returns when it is ready and linked."""
        if victim == "redis":
            self._redis.start()
            return
        old = self._stack.pods(victim)[self._places[victim, place]]
        keep: dict[str, Any] = {name: value for name, value in old.values.items() if name not in ("redis", "pod_id")}
        if victim == "router":
            keep["port"] = int(old.address.rpartition(":")[2])
        self._places[victim, place] = len(self._stack.pods(victim))
        self._start(victim, keep)

    def _start(self, victim: Tier, keep: dict[str, Any]) -> None:
        try:
            drafter = keep.pop("drafter", None)
            self._stack.add(victim, drafter, **keep)
        except GraftreeError:  # another one went while this one was waited for
            if not self._stack.pods(victim)[-1].alive:
                raise


class Troublemaker:
    """Does one thing after the other, now and then two at once, until it is told to stop; all is there at its end.

    Args:
        kinds: what it may do: (victim, how).
        down_seconds: shortest and longest absence.
        rng: of everything that is drawn.

    Attributes:
        faults: all that it did.
    """

    def __init__(
        self,
        places: Places,
        kinds: Sequence[tuple[Victim, How]],
        rng: Random,
        *,
        down_seconds: tuple[float, float] = (0.1, 1.0),
    ) -> None:
        self.faults: list[Fault] = []
        self._places, self._kinds, self._rng, self._down = places, list(kinds), rng, down_seconds

    def run(self, stop: threading.Event, enough: Callable[[], bool] = lambda: False) -> None:
        """Blocks; every kind has had its turn before one has its second."""
        turn: list[tuple[Victim, How]] = []
        while not (stop.is_set() or enough()):
            turn = turn or self._rng.sample(self._kinds, len(self._kinds))
            chosen = [turn.pop()]
            if turn and self._rng.random() < 0.3 and turn[-1][0] != chosen[0][0]:
                chosen.append(turn.pop())
            self._do(chosen)
            stop.wait(SETTLE_SECONDS * self._rng.uniform(0.5, 2))

    def rolling_restart(self, tiers: Sequence[Tier]) -> None:
        """Every pod in turn: SIGTERM, its end, another one in its place."""
        for tier in tiers:
            for place in range(self._places.count(tier)):
                fault = Fault(tier, "drain", time.monotonic())
                self._places.drain(tier, place)
                self._places.start(tier, place)
                fault.over = time.monotonic()
                self.faults.append(fault)

    def _do(self, chosen: Sequence[tuple[Victim, How]]) -> None:
        begun = []
        for victim, how in chosen:
            place = 0 if victim == "redis" else self._rng.randrange(self._places.count(victim))
            fault = Fault(victim, how, time.monotonic())
            if how == "kill":
                self._places.kill(victim, place)
            elif how == "pause":
                self._places.pause(victim, place)
            else:
                self._places.drain(victim, place)  # type: ignore[arg-type]
            begun.append((fault, place))
        longer = PAUSE_FACTOR if any(how == "pause" for _, how in chosen) else 1.0
        time.sleep(longer * self._rng.uniform(*self._down))
        # Redis first: nobody is linked without it.
        for fault, place in sorted(begun, key=lambda each: each[0].victim != "redis"):
            if fault.how == "pause":
                self._places.resume(fault.victim, place)
            else:
                self._places.start(fault.victim, place)
            fault.over = time.monotonic()
            self.faults.append(fault)
