"""An engine that works as on a GPU (steps recorded, tokens chosen on the device) says what one on a CPU says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from graftree.models.load import load
from graftree.models.runner import TreeRunner
from graftree.sampling import GREEDY, SamplingParams
from graftree.tree import TokenTree
from graftree.v1 import common_pb2
from tests.verifier_harness import LLAMA, Client, Router, make_engine, plain
from verifier_service.engine import Engine

PROMPT = [5, 17, 3, 99, 42, 7, 7, 8]


def gpu_like() -> Engine:
    runner = TreeRunner(load(LLAMA), kv_tokens=4096, graph_bytes=1)
    assert runner.graphs is not None
    runner.graphs.record_at = 1
    return Engine(runner, max_sessions=64, step_tokens=512, sample_on_device=True)


def half_right(text: Sequence[int], future: Sequence[int]) -> Any:
    """Trees that hold the next three tokens between wrong ones, last."""

    def make(token_ids: list[int], root: int) -> TokenTree:
        done = len(token_ids) - len(text)
        right = list(future[done : done + 3])
        wrong = [token for token in range(200, 204) if token not in right]
        parents = [-1] * len(wrong)
        for depth in range(len(right)):
            parents.append(-1 if not depth else len(wrong) + depth - 1)
        return TokenTree(root, (*wrong, *right), tuple(parents), (-1.0,) * len(parents))

    return make


CASES = {
    "greedy": GREEDY,
    "sampled": SamplingParams(seed=4, temperature=0.8),
    "filtered": SamplingParams(seed=4, top_k=20, top_p=0.9),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.4, logit_bias={3: 2.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_plain_decoding_is_what_comes_out(name: str) -> None:
    """With trees that are partly right, tokens are those of plain decoding with transformers' own forward."""
    expected = plain(PROMPT, 14, CASES[name])
    engine = gpu_like()
    client = Router(engine).open("a", PROMPT, params=CASES[name])
    assert client.generate(12, half_right(PROMPT, expected)) == expected[:12]
    assert engine.counters.num_accepted_tokens > 4


def test_sessions_of_all_kinds_share_steps() -> None:
    """Plain and sampled ones, a grammar, log probabilities, a mode that tests draws, a stop token that is held off:
    side by side, verdict by verdict as the other engine gives them."""
    grammar = common_pb2.StructuredOutputParams(regex="[ab]{3,20}")
    sessions: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sampled": {"params": SamplingParams(seed=1)},
        "grammar": {"params": SamplingParams(seed=2), "structured_output": grammar, "stop_token_ids": [256]},
        "log probs": {"params": SamplingParams(seed=3, temperature=2.0), "log_probs": True, "alternatives": 2},
        "mss": {"params": SamplingParams(seed=4), "mode": common_pb2.SPECULATION_MODE_MSS},
        "held off": {"params": GREEDY, "min_new_tokens": 3, "stop_token_ids": range(0, 512, 2)},
    }
    found = []
    for engine in (gpu_like(), make_engine()):
        router = Router(engine)
        clients = {name: router.open(name, [*PROMPT, len(name)], **fields) for name, fields in sessions.items()}
        verdicts: dict[str, list[Any]] = {name: [] for name in clients}
        for _ in range(5):
            for client in clients.values():
                client.send(tree(client))
            router.run()
            for name, client in clients.items():
                verdict = client.take()
                values = [(each.token_id, each.rank, len(each.alternatives)) for each in verdict.log_probs]
                verdicts[name].append((list(verdict.token_ids), list(verdict.accepted_nodes), values))
        found.append(verdicts)
    assert found[0] == found[1]


def tree(client: Client) -> TokenTree:
    """Some guesses, other ones at every length."""
    first = len(client.token_ids) % 7
    return TokenTree(client.root, (first, 97, first + 1, 98), (-1, -1, 0, 1), (-1.0,) * 4)


def test_logits_that_are_not_finite_fail_their_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device finds them, the host says so, the session beside goes on."""
    engine = gpu_like()
    router = Router(engine)
    clients = [router.open(name, PROMPT) for name in ("a", "b")]
    router.run()
    forward = engine._runner.forward

    def broken(batch: Any) -> Any:
        first, *others = forward(batch)
        return [first * float("nan"), *others]

    monkeypatch.setattr(engine._runner, "forward", broken)
    for client in clients:
        client.send()
    router.run()
    assert [failure.session_id for failure in router.failures] == ["a"]
    assert "not finite" in router.failures[0].message
    assert clients[1].take().token_ids
