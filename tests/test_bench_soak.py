"""bench.soak in small: its load, and what counts as growth or as left behind, whatever the machine."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from bench import soak_load
from bench.soak import MODEL, drafters
from bench.soak_lab import Course, Rest, by_family
from bench.vitals import slope
from graftree.config import DEFAULT_MODEL
from graftree.local_stack import LocalStack

KINDS = {"short", "long", "given up", "late", "bad", "told again", "stranger"}
MORE_KINDS = {"samples", "structured", "text"}


@pytest.mark.parametrize(
    ("model", "kinds"),
    [("standin:?vocab=512&context=4096", KINDS), (MODEL, KINDS | MORE_KINDS)],
    ids=["toy", "model"],
)
async def test_a_mixed_load_goes_as_it_should(model: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Good requests are answered, bad ones refused, others given up; nothing of it counts as unexpected."""
    for name, value in {"LONG": (6, 12), "SHORT": (1, 3), "PROMPT_TOKENS": (1, 3), "SHARED": [17]}.items():
        monkeypatch.setattr(soak_load, name, value)
    with LocalStack(model, [], in_process=True, threads=1, router_options={"replay_seconds": 2.0}) as stack:
        mix = soak_load.Mix([stack.target], 3, Random(2), greedy=kinds == KINDS)
        running = asyncio.create_task(mix.run())
        for _ in range(600):
            await asyncio.sleep(0.1)
            if mix.counts.keys() >= kinds:
                break
        mix.stop()
        await running
    assert mix.unexpected == []
    assert mix.counts.keys() == kinds


def test_what_is_left_behind() -> None:
    """Only more than before counts; a few descriptors are spared, and pooled connections."""
    before = Rest({"sessions in Redis": 2}, 0.0, {"verifier 0": 0.0}, {"router 0": 20, "verifier 0": 16})
    assert (
        Rest({"sessions in Redis": 1}, 0.0, {"verifier 0": 0.0}, {"router 0": 30, "verifier 0": 26}).left_behind(
            before
        )
        == {}
    )
    left = Rest({"sessions in Redis": 3}, 1.0, {"verifier 0": 0.25}, {"router 0": 31, "verifier 0": 28}).left_behind(
        before
    )
    assert left == {
        "sessions in Redis": 1.0,
        "requests under way": 1.0,
        "KV blocks of verifier 0": 0.25,
        "descriptors of router 0": 1.0,
        "descriptors of verifier 0": 2.0,
    }


def test_slopes_are_of_the_second_half() -> None:
    """A process that grows at first and then by 3 MB a minute."""
    times = [float(second) for second in range(120)]
    memory = [second * 5.0 if second < 60 else 300.0 + second / 20.0 for second in times]
    found, files = Course(times, memory, [7] * 120).slopes()
    assert found == pytest.approx(3.0)
    assert files == 0.0
    assert slope([1.0, 2.0], [1.0, 9.0]) == 0.0


def test_whose_a_key_is() -> None:
    """Sessions, the registry, KV blocks, and whatever else somebody has left."""
    keys = [b"graftree:v1:{s:0}:record", b"graftree:v1:{s:0}:tokens", b"graftree:v1:{registry}:pods", b"x\xff"]
    assert by_family([*keys, b"graftree:kv:v1:marker"]) == {
        "sessions in Redis": 2,
        "registry in Redis": 1,
        "KV blocks in Redis": 1,
        "other keys in Redis": 1,
    }


def test_what_drafts() -> None:
    """The SSM that comes with a model where there is one, and an n-gram everywhere."""
    assert drafters(DEFAULT_MODEL) == ("ngram", "model:ssm:smollm2")
    assert drafters("standin:?vocab=8") == ("ngram", "standin")
    assert drafters("random:llama") == ("ngram", "model:random:llama")
