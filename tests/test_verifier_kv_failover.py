"""A session whose verifier dies goes on at the same token on another one, with rows that it loads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from graftree import Client, LocalStack
from graftree.local.instances import InstancePod
from tests.kv_lab import FULL, PROMPT, kv
from tests.store_redis import server
from tests.verifier_harness import LLAMA, greedy
from verifier_service.pod import VerifierPod


def verifier(stack: LocalStack, index: int) -> VerifierPod:
    pod = stack.pods("verifier")[index]
    assert isinstance(pod, InstancePod)
    assert isinstance(pod.instance, VerifierPod)
    return pod.instance


def soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def kill_the_one_at_work(stack: LocalStack, blocks: int) -> int:
    """Once it has written so many blocks; its index."""
    index = next(index for index in (0, 1) if verifier(stack, index).record().sessions)
    counters = kv(verifier(stack, index)).counters
    soon(lambda: counters.blocks_written >= blocks)
    stack.kill("verifier", index)
    return index


def test_a_session_moves_with_its_rows() -> None:
    """The verifier is killed in mid answer. The other one loads prompt and answer so far instead of computing them,
    the client sees transformers' tokens, each once, and the next request finds the whole text there."""
    url = server("valkey").url
    options: dict[str, Any] = {"kv_redis": url, "kv_load_tokens": 1, "step_time_seconds": 0.05}
    expected = greedy(PROMPT, 150)
    with (
        LocalStack(LLAMA, [], verifiers=2, in_process=True, threads=1, redis=url, verifier_options=options) as stack,
        Client(stack.target) as client,
    ):
        tokens: list[int] = []
        killed: int | None = None
        for chunk in client.stream(token_ids=PROMPT, max_new_tokens=150, ignore_eos=True):
            tokens.extend(chunk.token_ids)
            if killed is None and len(tokens) >= 30:
                killed = kill_the_one_at_work(stack, (len(PROMPT) + 20) // 16)
        assert tokens == expected
        assert killed is not None
        survivor = verifier(stack, 1 - killed)
        assert survivor.counters.loaded_rows >= FULL + 16
        assert survivor.counters.prefill_rows < len(PROMPT) + 150 - FULL
        assert kv(survivor).counters.refused == {}
        longer = [*PROMPT, *tokens, 3, 4]
        before = survivor.counters.prefix_cache_hits
        again = client.generate(token_ids=longer, max_new_tokens=5, ignore_eos=True)
        assert list(again.token_ids) == greedy(longer, 5)
        assert survivor.counters.prefix_cache_hits - before == (len(longer) - 1) // 16 * 16
