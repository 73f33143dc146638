"""Trouble for `bench.chaos`: processes of every tier, and Redis, killed, paused, cut off, drained at random."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from bench.chaos_proxy import WAYS, Way
from bench.chaos_stack import OWN, ChaosStack, route
from graftree.errors import GraftreeError
from graftree.local.pod import Tier
from graftree.store.embedded import EmbeddedRedis

TIERS: tuple[Tier, ...] = ("speculator", "verifier", "router")  # in the order of a rolling restart
Victim = Literal["router", "verifier", "speculator", "redis", "nobody"]
How = Literal["kill", "pause", "cut", "drain", "spare"]
NOTHING: tuple[Victim, How] = ("nobody", "spare")  # as long as a pause: what streams see of the machine's other load

SETTLE_SECONDS = 0.3  # between one trouble's end and the next
PAUSE_FACTOR = 4.0  # a pause is longer than an absence: long enough to be noticed, or not
TWO_AT_ONCE = 0.3  # chance


@dataclass
class Fault:
    """One thing that was done.

    Attributes:
        place: whose turn it was: of its tier, or of a cut from Redis the router's.
        at, over: by time.monotonic, when it happened and when all was there again.
        ways, oldest, broken: of a cut, see `bench.chaos_proxy`.
        with_: what else happened at the same time.
    """

    victim: Victim
    how: How
    place: int = 0
    at: float = 0.0
    over: float = 0.0
    ways: tuple[Way, ...] = ()
    oldest: bool = False
    broken: bool = False
    with_: str = ""

    @property
    def name(self) -> str:
        """Victim and how."""
        return f"{self.victim} {self.how}"


class Places:
    """The pods of a stack by place: whoever is started in place of a dead one gets its address and its options.

    Args:
        stack: of child processes, started.
        redis: the stack's, started.
    """

    def __init__(self, stack: ChaosStack, redis: EmbeddedRedis) -> None:
        self._stack, self._redis = stack, redis
        self._places: dict[tuple[Tier, int], int] = {}
        for tier in TIERS:
            for index in range(len(stack.pods(tier))):
                self._places[tier, index] = index

    def count(self, tier: Victim) -> int:
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

    def cut(self, fault: Fault) -> None:
        """Stop the bytes of a way."""
        self._stack.proxy.cut(self._route(fault), fault.ways, oldest=fault.oldest)

    def mend(self, fault: Fault) -> None:
        """The end of `cut`."""
        self._stack.proxy.mend(self._route(fault), broken=fault.broken)

    def _route(self, fault: Fault) -> str:
        tier: Tier = "router" if fault.victim == "redis" else fault.victim  # type: ignore[assignment]
        return route(tier, self._places[tier, fault.place])

    def whole(self) -> None:
        """Wait until two of everything serve again."""
        with suppress(GraftreeError):  # a router may be late with its answer
            self._stack.whole()

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
        keep: dict[str, Any] = {name: value for name, value in old.values.items() if name not in OWN}
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
            if turn and self._rng.random() < TWO_AT_ONCE and _go_together(chosen[0], turn[-1]):
                chosen.append(turn.pop())
            self._do([self._drawn(victim, how) for victim, how in chosen])
            stop.wait(SETTLE_SECONDS * self._rng.uniform(0.5, 2))

    def rolling_restart(self, tiers: Sequence[Tier]) -> None:
        """Every pod in turn: SIGTERM, its end, another one in its place."""
        for tier in tiers:
            for place in range(self._places.count(tier)):
                fault = Fault(tier, "drain", place, time.monotonic())
                self._places.drain(tier, place)
                self._places.start(tier, place)
                fault.over = time.monotonic()
                self.faults.append(fault)

    def _drawn(self, victim: Victim, how: How) -> Fault:
        rng = self._rng
        if how != "cut":
            places = 1 if victim in ("redis", "nobody") else self._places.count(victim)
            return Fault(victim, how, rng.randrange(places))
        return Fault(
            victim,
            how,
            rng.randrange(self._places.count("router" if victim == "redis" else victim)),
            ways=rng.choice((WAYS, WAYS[:1], WAYS[1:])),
            oldest=rng.random() < 0.3,
            broken=rng.random() < 0.5,
        )

    def _do(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            fault.with_ = ", ".join(other.name for other in faults if other is not fault)
            fault.at = time.monotonic()
            if fault.how == "kill":
                self._places.kill(fault.victim, fault.place)
            elif fault.how == "pause":
                self._places.pause(fault.victim, fault.place)
            elif fault.how == "cut":
                self._places.cut(fault)
            elif fault.how == "drain":
                self._places.drain(fault.victim, fault.place)  # type: ignore[arg-type]
        longer = PAUSE_FACTOR if any(fault.how in ("pause", "cut", "spare") for fault in faults) else 1.0
        time.sleep(longer * self._rng.uniform(*self._down))
        for fault in sorted(faults, key=_order):
            if fault.how == "pause":
                self._places.resume(fault.victim, fault.place)
            elif fault.how == "cut":
                self._places.mend(fault)
            elif fault.how != "spare":
                self._places.start(fault.victim, fault.place)
            fault.over = time.monotonic()
            self.faults.append(fault)
        self._places.whole()


def _go_together(one: tuple[Victim, How], other: tuple[Victim, How]) -> bool:
    """Whether one of each tier is left, and something happens."""
    return one[0] != other[0] and NOTHING not in (one, other)


def _order(fault: Fault) -> int:
    """Of the ends: what stands still goes on before anybody waits for a new pod; without Redis none is linked."""
    return 0 if fault.how in ("pause", "cut") else 1 if fault.victim == "redis" else 2
