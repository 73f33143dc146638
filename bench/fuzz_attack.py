"""Attacks of `bench.fuzz` on one port at a time, from a process of their own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import grpc

from bench.fuzz_calls import OPTIONS, Caller
from bench.fuzz_messages import methods
from bench.fuzz_record import Recordings
from bench.fuzz_wire import HALVES, SENDS, Half, Speech, send_once

WIDTH = 6  # attackers at once
HALVES_EACH = 8  # connections of each kind that say nothing more
CALLS_PER_CHANNEL = 12
WIRE_SHARE = 0.4  # of the attacks on a port that speaks gRPC
COMMON = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")


@dataclass(frozen=True)
class Port:
    """One port of one pod.

    Attributes:
        name: for people.
        address: HOST:PORT.
        speech: what it speaks.
        services: full names; of gRPC only.
        pod: name of the process behind it.
    """

    name: str
    address: str
    speech: Speech
    services: tuple[str, ...] = ()
    pod: str = ""


@dataclass
class Tally:
    """What was done to a port and what came of it.

    Attributes:
        attacks: by kind.
        codes: of answers to calls, by name.
        odd: answers that only an unexpected exception gives.
        refused: connections that nobody took: the port was not there.
        halves: connections that were begun and left so.
        hanging: of these, the ones that the port had not closed by the end.
        kept: of the hanging ones, what they began with, and how often.
    """

    attacks: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    refused: int = 0
    halves: int = 0
    hanging: int = 0
    kept: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.attacks + other.attacks,
            self.codes + other.codes,
            sorted({*self.odd, *other.odd}),
            self.refused + other.refused,
            self.halves + other.halves,
            self.hanging + other.hanging,
            self.kept + other.kept,
        )


def attack(port: Port, seconds: float, seed: int, recordings: Recordings, halves: int = HALVES_EACH) -> Tally:
    """Everything there is, for so many seconds; what is attacked follows from the seed, how fast does not."""
    return asyncio.run(_attack(port, seconds, seed, recordings, halves))


async def _attack(port: Port, seconds: float, seed: int, recordings: Recordings, halves: int) -> Tally:
    tally, ends = Tally(), time.monotonic() + seconds
    caller = Caller([each for each in methods() if each.service in (*port.services, *COMMON)], recordings)

    def over() -> bool:
        return time.monotonic() >= ends

    silent = [await Half.open(port.address, begun) for begun in HALVES[port.speech] for _ in range(halves)]
    watching = [asyncio.create_task(half.watch()) for half in silent]
    try:
        rngs = [Random(f"{seed} {port.name} {number}") for number in range(WIDTH)]
        await asyncio.gather(*(_worker(port, caller, rng, over, tally) for rng in rngs))
    finally:
        await asyncio.sleep(0)
        still = [half for half in silent if not half.gone]
        tally.halves, tally.hanging = len(silent), len(still)
        tally.kept.update(repr(half.begun[:60]) for half in still)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for half in silent:
            half.writer.close()
    tally.codes, tally.odd = caller.codes, sorted(caller.odd)
    return tally


async def _worker(port: Port, caller: Caller, rng: Random, over: Callable[[], bool], tally: Tally) -> None:
    while not over():
        if port.speech == "http" or rng.random() < WIRE_SHARE:
            await _wire(port, rng, tally)
            continue
        async with grpc.aio.insecure_channel(port.address, options=OPTIONS) as channel:
            for _ in range(rng.randrange(1, CALLS_PER_CHANNEL)):
                if over():
                    break
                tally.attacks[await caller.call(channel, rng)] += 1


async def _wire(port: Port, rng: Random, tally: Tally) -> None:
    kinds = SENDS[port.speech]
    kind = rng.choice(list(kinds))
    try:
        await send_once(port.address, kinds[kind](rng), rng)
    except ConnectionRefusedError:
        tally.refused += 1
        await asyncio.sleep(0.05)
    except OSError:
        tally.codes["broken"] += 1
    tally.attacks[kind] += 1
