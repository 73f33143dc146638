"""`LocalStack` in this process, on random models: the whole of it, pod by pod, and how it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from graftree import AsyncClient, Client, LocalStack
from graftree.errors import ConfigError, GraftreeError, Incompatible, InvalidArgument, NotFound, Unavailable
from graftree.store.embedded import EmbeddedRedis

MODEL = "random:llama?layers=1&seed=3"
SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """One verifier, an n-gram and a model speculator, one router."""
    with LocalStack(MODEL, ["ngram", f"model:{MODEL}"], in_process=True, threads=1) as stack:
        yield stack


def test_generates_text_and_tokens(stack: LocalStack) -> None:
    """A prompt goes in and its continuation comes out, with figures that agree with each other."""
    with Client(stack.target) as client:
        result = client.generate("Once upon a time", **SAMPLED)
        again = "".join(chunk.text for chunk in client.stream("Once upon a time", **SAMPLED))
    assert len(result.token_ids) == result.usage.completion_tokens == 12
    assert result.finish_reason == "length"
    assert result.text == again
    assert sum((k + 1) * n for k, n in enumerate(result.speculation.acceptance_histogram)) == 12


async def test_async_client(stack: LocalStack) -> None:
    """The asyncio client gets the same answer."""
    async with AsyncClient(stack.target) as client:
        result = await client.generate("Once upon a time", **SAMPLED)
        info = await client.model_info()
    with Client(stack.target) as other:
        assert result.token_ids == other.generate("Once upon a time", **SAMPLED).token_ids
    assert {pod.tier for pod in info.pods} == {"verifier", "speculator"}


def test_pods_come_and_go() -> None:
    """Speculators and verifiers are killed, stopped and added, and the tokens stay the same; indices never move."""
    with LocalStack(MODEL, [f"model:{MODEL}"], verifiers=2, in_process=True, threads=1) as stack:
        with Client(stack.target) as client:

            def tokens() -> tuple[int, ...]:
                return client.generate("Once upon a time", **SAMPLED).token_ids

            expected = tokens()
            stack.kill("speculator", 0)
            assert tokens() == expected
            assert stack.add("speculator", "ngram") == 1
            assert tokens() == expected
            stack.kill("verifier", 0)
            assert tokens() == expected
            stack.stop("speculator", 1)
            assert tokens() == expected
            assert stack.add("verifier") == 2
            stack.stop("verifier", 1)
            assert tokens() == expected
        assert [pod.alive for pod in stack.pods("speculator")] == [False, False]
        assert [pod.alive for pod in stack.pods("verifier")] == [False, False, True]
        assert [pod.index for pod in stack.pods("verifier")] == [0, 1, 2]


def test_two_routers() -> None:
    """Each router serves alone, and `target` is one that runs."""
    with LocalStack(MODEL, [], routers=2, in_process=True, threads=1) as stack:
        answers = []
        for target in stack.targets:
            with Client(target) as client:
                answers.append(client.generate("x", **SAMPLED).token_ids)
        assert answers[0] == answers[1]
        first, second = stack.targets
        stack.kill("router", 0)
        assert stack.target == second != first


def test_a_redis_of_ones_own() -> None:
    """With a URL no Redis is started, and the one given is used and left running."""
    with EmbeddedRedis() as server:
        with LocalStack(MODEL, [], redis=server.url, in_process=True, threads=1) as stack:
            assert stack.redis == server.url
            with Client(stack.target) as client:
                assert client.generate("x", max_new_tokens=1).usage.completion_tokens == 1
        assert server.running


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": "random:nothing"}, InvalidArgument, "model"),
        ({"verifiers": 0}, InvalidArgument, "verifiers"),
        ({"routers": -1}, InvalidArgument, "routers"),
        ({"speculators": "ngram"}, InvalidArgument, "speculators"),
        ({"speculators": ["no such drafter"]}, ConfigError, "drafter"),
        ({"speculators": [{"drafter": "ngram", "max_nodes": 0}]}, ConfigError, "max_nodes"),
        ({"verifier_options": {"colour": "red"}}, ConfigError, "colour"),
        ({"router_options": {"tree_budget": -1}}, ConfigError, "tree_budget"),
        ({"speculators": [f"model:{MODEL}&permute=1"]}, Incompatible, "vocabulary"),
        ({"redis": "redis://127.0.0.1:1/0"}, Unavailable, "redis://127.0.0.1:1/0 does not answer"),
    ],
)
def test_what_cannot_start(arguments: dict[str, Any], error: type[GraftreeError], words: str) -> None:
    """A stack that cannot be raises the error that says why, and leaves no thread behind."""
    before = set(threading.enumerate())
    with pytest.raises(error, match=words), LocalStack(**{"model": MODEL, "in_process": True, **arguments}):
        pass
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("graftree")}


def test_no_such_pod(stack: LocalStack) -> None:
    """Names and indices that do not exist are errors, and an instance cannot be paused."""
    with pytest.raises(NotFound):
        stack.kill("speculator", 9)
    with pytest.raises(NotFound):
        stack.kill("planner", 0)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        stack.pause("speculator", 0)
    with pytest.raises(InvalidArgument):
        stack.add("verifier", "ngram")
    with pytest.raises(ConfigError):
        stack.add("speculator", "ngram", max_nodes=0)


def test_closing_twice() -> None:
    """`close` may be called again, and nothing is served afterwards."""
    stack = LocalStack(MODEL, [], in_process=True, threads=1).start()
    target = stack.target
    stack.close()
    stack.close()
    with pytest.raises(Unavailable):
        _ = stack.target
    with Client(target) as client, pytest.raises(Unavailable):
        client.generate("x")
