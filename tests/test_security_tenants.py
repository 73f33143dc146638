"""Tenants in a whole stack: they share a verifier and nothing that is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from graftree import Client, LocalStack
from graftree.security.keys import digest, new_key

MODEL = "random:llama?layers=1&seed=3"
PROMPT = list(range(32, 96))  # four full KV blocks
KEYS = {name: new_key() for name in ("alice", "carol", "bob")}
TENANTS = {"alice": "acme", "carol": "acme", "bob": "other"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """alice and carol are of one tenant, bob is of another."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = [
        {"name": name, "tenant": TENANTS[name], "sha256": digest(key), "admin": name == "alice"}
        for name, key in KEYS.items()
    ]
    path.write_text(json.dumps({"keys": entries}))
    with LocalStack(
        MODEL,
        ["ngram"],
        in_process=True,
        threads=1,
        router_options={"api_keys": str(path)},
        client_options={"api_key": KEYS["alice"]},
    ) as running:
        yield running


def hits(stack: LocalStack) -> int:
    pod: Any = stack.pods("verifier")[0]
    found: int = pod.instance.counters.prefix_cache_hits
    return found


def ask(stack: LocalStack, name: str) -> tuple[int, ...]:
    with Client(stack.target, api_key=KEYS[name]) as client:
        return client.generate(token_ids=PROMPT, max_new_tokens=4, ignore_eos=True).token_ids


def test_kv_rows_are_a_tenants_own(stack: LocalStack) -> None:
    """A prompt that one tenant has asked is prefilled again for another; within a tenant it is found."""
    first = ask(stack, "alice")
    before = hits(stack)
    assert ask(stack, "bob") == first
    assert hits(stack) == before
    assert ask(stack, "carol") == first
    assert hits(stack) > before


def test_a_stack_without_keys_has_one_tenant(stack: LocalStack) -> None:
    """Nobody in particular shares with nobody in particular: the cache works as ever."""
    with LocalStack(MODEL, [], in_process=True, threads=1) as plain, Client(plain.target) as client:
        for _ in range(2):
            client.generate(token_ids=PROMPT, max_new_tokens=2)
        assert hits(plain) > 0
