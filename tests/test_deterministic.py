"""Batch invariance: with `deterministic` a token's logits are the same bits whatever shares the step.

Not only the tokens: log probabilities are compared as they are, and whole rows of logits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from graftree import Client, LocalStack
from graftree.config import DEFAULT_MODEL
from graftree.errors import Incompatible
from graftree.models.load import load
from graftree.models.paged import PagedKV
from graftree.models.rows import Rows, chain_rows
from graftree.models.runner import TreeRunner
from graftree.models.spec import ModelSpec
from graftree.models.steady import SIZES, agreeing
from graftree.sampling import GREEDY, SamplingParams
from graftree.tree import TokenTree
from tests.drafters import spec
from tests.verifier_harness import LLAMA, Router, make_engine
from tests.verifier_harness import Client as Session

MODELS = [
    (LLAMA, "float32"),
    (LLAMA, "bfloat16"),
    ("random:gpt2?layers=2&hidden=64&heads=4&vocab=512&context=256&seed=1&scale=3", "float32"),
    (
        "random:mistral?layers=2&hidden=64&heads=4&kv_heads=1&vocab=512&context=256&seed=2&scale=3&window=24",
        "float32",
    ),
]
PROMPTS = [[seed + 1, *((13 * i + seed // 2) % 512 for i in range(18 + 9 * seed))] for seed in range(5)]
PARAMS = [GREEDY, SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=0.7, top_p=0.9, seed=6)]

Said = list[tuple[int, float, tuple[tuple[int, float], ...]]]


def bushy(root: int, truth: Sequence[int], rng: random.Random, vocab_size: int = 512) -> TokenTree:
    """A tree that holds some of the truth, somewhere between wrong nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    parent = -1
    for token in truth[: rng.randrange(6)]:
        children = [token ^ wrong for wrong in range(rng.randrange(1, 4))]
        rng.shuffle(children)
        first = len(tokens)
        tokens += children
        parents += [parent] * len(children)
        parent = first + children.index(token)
        tokens.append(rng.randrange(vocab_size))
        parents.append(first)
        if first == parent:
            tokens.pop()
            parents.pop()
    return TokenTree(root, tuple(tokens), tuple(parents), (-1.0,) * len(tokens))


def open_all(router: Router, prompts: Sequence[Sequence[int]], first: int = 0) -> list[Session]:
    return [
        router.open(
            str(index),
            prompt,
            params=PARAMS[index % len(PARAMS)],
            max_length=len(prompt) + 40,
            max_nodes=30,
            log_probs=True,
            alternatives=2,
        )
        for index, prompt in enumerate(prompts, first)
    ]


def drive(
    sessions: Sequence[Session], count: int, truth: Sequence[Said] | None, rng: random.Random, parking: float = 0.0
) -> list[Said]:
    """What each session says, with log probabilities; all step when they can, with trees if a truth is given.

    One of them is preempted before a forward with the chance of `parking`.
    """
    router = sessions[0].router
    said: list[Said] = [[] for _ in sessions]
    waiting: set[int] = set()
    while min(map(len, said)) < count:
        for index, session in enumerate(sessions):
            if index not in waiting and len(said[index]) < count and rng.random() < 0.8:
                following = [] if truth is None else [token for token, *_ in truth[index][len(said[index]) :]]
                session.send(bushy(session.root, following, rng))
                waiting.add(index)
        if rng.random() < parking:
            chosen = rng.choice(list(router.stream.sessions.values()))
            if not chosen.parked:
                router.engine._park(chosen)
        router.engine.iterate()
        router.engine.flush()
        assert not router.failures
        for index in sorted(waiting):
            session = sessions[index]
            if not any(verdict.session_id == session.session_id for verdict in router.verdicts):
                continue
            waiting.discard(index)
            said[index] += [
                (entry.token_id, entry.log_prob, tuple((a.token_id, a.log_prob) for a in entry.alternatives))
                for entry in session.take().log_probs
            ]
            if len(said[index]) >= count:
                router.engine.close(router.stream, session.session_id)
    return [own[:count] for own in said]


def everyone_alone(uri: str, dtype: str, prompts: Sequence[Sequence[int]], count: int) -> list[Said]:
    """Plain decoding, one session at a time, each prompt in one chunk."""
    engine = make_engine(uri, dtype=dtype, deterministic=True, prefix_cache=False)
    return [
        drive(open_all(Router(engine), [prompt], index), count, None, random.Random(0))[0]
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("uri", "dtype"), MODELS[:2] + MODELS[3:])
def test_company_trees_chunks_prefixes_and_preemption_change_no_bit(uri: str, dtype: str) -> None:
    """Five sessions alone, and together: random trees, chunks of few rows, prompts found in the prefix cache,
    preemption in mid run. Tokens, log probabilities and alternatives are equal as floats."""
    expected = everyone_alone(uri, dtype, PROMPTS, 16)
    for step_tokens, reuse, parking in ((512, False, 0.0), (33, True, 0.0), (40, False, 0.1), (64, True, 0.1)):
        engine = make_engine(uri, dtype=dtype, deterministic=True, step_tokens=step_tokens, prefix_cache=reuse)
        for turn in range(2 if reuse else 1):  # the second time rows of the first are found
            got = drive(open_all(Router(engine), PROMPTS), 16, expected, random.Random(turn), parking)
            assert got == expected, (step_tokens, reuse, parking, turn)
        assert (engine.counters.preemptions > 0) == (parking > 0)
        assert (engine.counters.prefix_cache_hits > 0) == reuse


@pytest.mark.parametrize(("uri", "dtype"), MODELS)
def test_whole_rows_of_logits(uri: str, dtype: str) -> None:
    """A text token by token, and cut at random beside other sequences' rows: all logits of all rows are equal."""
    runner = TreeRunner(load(uri, dtype=dtype), kv_tokens=4096, deterministic=True)
    rng = random.Random(3)
    text = [rng.randrange(512) for _ in range(100)]
    blocks, others = runner.pool.allocate(9), [runner.pool.allocate(9) for _ in range(5)]
    expected = torch.cat(
        [runner.forward([chain_rows(blocks, at, [token], logits=[0])])[0] for at, token in enumerate(text)]
    )
    for other in others:
        runner.forward([chain_rows(other, 0, text)])
    for _ in range(2):
        at = 0
        while at < len(text):
            own = text[at : at + rng.choice((1, 2, 5, 30, 70))]
            batch = [
                chain_rows(other, rng.randrange(80), [rng.randrange(512)] * rng.randrange(1, 40), logits=[0])
                for other in rng.sample(others, rng.randrange(6))
            ]
            place = rng.randrange(len(batch) + 1)
            batch.insert(place, chain_rows(blocks, at, own, logits=range(len(own))))
            assert torch.equal(runner.forward(batch)[place], expected[at : at + len(own)])
            at += len(own)


def test_without_it_bits_do_change() -> None:
    """The comparison above can fail: the ordinary runner gives a row other bits in other company."""
    runner = TreeRunner(load(LLAMA), kv_tokens=4096)
    blocks = runner.pool.allocate(9)
    text = [7 * index % 512 for index in range(140)]
    whole = runner.forward([chain_rows(blocks, 0, text, logits=range(140))])[0]
    single = torch.cat(
        [runner.forward([chain_rows(blocks, at, [token], logits=[0])])[0] for at, token in enumerate(text)]
    )
    torch.testing.assert_close(whole, single, rtol=1e-4, atol=1e-4)
    assert not torch.equal(whole, single)


def odd(*sizes: int, place: bool = False) -> Any:
    """A forward whose logits are the row's token, a little off in steps of these sizes, or by the row's place."""

    def run(batch: Sequence[Rows], wanted: int, kv: PagedKV) -> torch.Tensor:
        tokens = [token for rows in batch for token in rows.token_ids]
        starts = [sum(len(rows.token_ids) for rows in batch[:index]) for index in range(len(batch))]
        rows = [start + index for start, own in zip(starts, batch, strict=True) for index in own.logits]
        rows += [0] * (wanted - len(rows))
        off = 0.5 if len(tokens) in sizes else 0.0
        return torch.tensor([[tokens[row] + off + (row / 100 if place else 0)] for row in rows])

    return run


SPEC = ModelSpec("m", "f", "v", 50, 300, ())


def agreed(run: Any) -> tuple[int, ...]:
    kv = PagedKV(layers=1, num_blocks=1, block_size=16, kv_heads=1, head_dim=2, dtype=torch.float32)
    return agreeing(run, kv, SPEC)


def test_sizes_that_disagree_are_left_out() -> None:
    """Where the library sums otherwise at some sizes, the sizes that agree with each other remain."""
    assert agreed(odd()) == SIZES
    assert agreed(odd(4, 256)) == SIZES[1:-1]


def test_a_machine_that_cannot_is_refused() -> None:
    """Where a row's bits depend on its place, the verifier does not start."""
    with pytest.raises(Incompatible, match="deterministic"):
        agreed(odd(place=True))


def outcome(client: Client, request: dict[str, Any]) -> Any:
    result = client.generate(**request)
    return result.token_ids, result.text, result.finish_reason, result.log_probs


def test_through_the_stack() -> None:
    """Tokens and log probabilities with alternatives are equal bit for bit: plain and alone, and with right and wrong
    speculators beside 15 others."""
    requests: list[dict[str, Any]] = [
        {
            "prompt": f"the quick brown fox {i % 5}",
            "max_new_tokens": 6 + i,
            "temperature": (0.0, 0.7, 1.3)[i % 3],
            "seed": i,
            "repetition_penalty": (1.0, 1.3)[i // 4 % 2],
            "log_probs": True,
            "alternatives": 3,
            "log_probs_mode": ("raw", "processed")[i % 2],
            "ignore_eos": True,
        }
        for i in range(16)
    ]
    speculators = ["ngram", spec("Perfect", model=LLAMA, siblings="2"), spec("Wrong", model=LLAMA)]
    with (
        LocalStack(
            LLAMA,
            speculators,
            in_process=True,
            threads=1,
            router_options={"adaptive": False, "draft_wait_ms": 200},
            verifier_options={"deterministic": True, "step_time_seconds": 0},
        ) as stack,
        Client(stack.target) as client,
    ):
        alone = [outcome(client, {**request, "speculation": False}) for request in requests]
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda request: outcome(client, request), requests))
        drafted = client.generate(**requests[15]).speculation
    assert together == alone
    assert drafted.num_accepted_tokens > 0


@pytest.mark.real_model
def test_on_the_real_model() -> None:
    """SmolLM2, three sessions: together with trees and in chunks, bit for bit what they say alone."""
    prompts = [[index + 5, *range(100 + 31 * index, 160 + 40 * index)] for index in range(3)]
    expected = everyone_alone(DEFAULT_MODEL, "float32", prompts, 8)
    engine = make_engine(DEFAULT_MODEL, deterministic=True, step_tokens=48)
    assert drive(open_all(Router(engine), prompts), 8, expected, random.Random(0)) == expected
