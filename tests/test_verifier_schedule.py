"""Batches, prefill, limits and KV blocks of the verifier's engine."""

from __future__ import annotations

from typing import Any

import pytest

from graftree.sampling import GREEDY, SamplingParams
from graftree.tree import TokenTree
from tests.verifier_harness import Client, Router, chain, greedy, make_engine, plain

PROMPT = list(range(3, 20))


@pytest.mark.parametrize("step_tokens", [1, 2, 7, 17, 18, 64])
def test_prompts_longer_than_a_forward(step_tokens: int) -> None:
    """Trial 27: prompts of up to 10 times the limit are prefilled in chunks; the answer does not change."""
    prompt = [(7 * index) % 500 for index in range(70)]
    truth = greedy(prompt, 6)
    router = Router(make_engine(step_tokens=step_tokens))
    client = router.open("a", prompt)
    verdict = client.verify(chain(client.root, truth[:4]))
    got = list(verdict.token_ids)
    assert got == truth[: len(got)]
    # A tree larger than a forward is cut to its first rows.
    assert len(got) == min(step_tokens, 5)
    assert router.engine.counters.prefill_rows == 69
    assert client.generate(6 - len(got)) == truth[len(got) :]


def test_prefill_starts_at_open() -> None:
    """Committed tokens but the last are cached before the first step comes."""
    router = Router(make_engine())
    client = router.open("a", PROMPT)
    router.run()
    assert router.engine.counters.prefill_rows == len(PROMPT) - 1
    client.verify()
    assert router.engine.counters.rows == len(PROMPT)


def test_step_and_prefill_share_a_forward() -> None:
    """A prompt that fits is run together with root and tree: one forward to the first token."""
    truth = greedy(PROMPT, 4)
    router = Router(make_engine())
    client = router.open("a", PROMPT)
    verdict = client.verify(chain(client.root, truth[:3]))
    assert list(verdict.token_ids) == truth
    assert router.engine.counters.forwards == 1


def test_nobody_starves() -> None:
    """With 8 rows a forward: a long prefill, wide trees and small steps all advance, in turns."""
    router = Router(make_engine(step_tokens=8))
    long = router.open("long", [(3 * index) % 500 for index in range(80)])
    long.send()
    clients = [router.open(str(index), [index + 1, index + 2]) for index in range(4)]
    for client in clients:
        client.send(TokenTree(client.root, tuple(range(6)), (-1,) * 6, (-1.0,) * 6))
    served: dict[str, int] = {}
    counters = router.engine.counters
    for turn in range(1, 100):
        rows = counters.rows
        assert router.engine.iterate()
        assert 0 < counters.rows - rows <= 8
        router.engine.flush()
        for verdict in router.verdicts:
            served.setdefault(verdict.session_id, turn)
        for client in clients:
            if any(verdict.session_id == client.session_id for verdict in router.verdicts):
                client.take()
                client.send(TokenTree(client.root, tuple(range(6)), (-1,) * 6, (-1.0,) * 6))
        if "long" in served:
            break
    assert set(served) == {"long", "0", "1", "2", "3"}
    assert max(served[str(index)] for index in range(4)) <= 12, "each within two rounds of all five"


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_the_context_limit(room: int, depth: int, params: SamplingParams) -> None:
    """Trial 16: prompt = limit - room with deep trees: exactly `room` tokens, then a clear failure."""
    prompt = [(5 * index) % 509 for index in range(256 - room)]
    truth = plain(prompt, room, params)
    router = Router(make_engine())
    client = router.open("a", prompt, params=params, max_nodes=16)
    got: list[int] = []
    while len(got) < room:
        guess = [*truth[len(got) :], *range(20)][:depth]
        got += client.verify(chain(client.root, guess)).token_ids
    assert got == truth
    assert not router.failures
    client.send()
    router.run()
    assert [failure.reason for failure in router.failures] == ["CONTEXT_TOO_LONG"]


def test_max_length_below_the_context() -> None:
    """A session never runs past its own limit: deeper nodes are cut, shallower ones are kept."""
    truth = greedy(PROMPT, 6)
    router = Router(make_engine())
    client = router.open("a", PROMPT, max_length=len(PROMPT) + 4)
    tree = TokenTree(
        client.root,
        (1, truth[0], truth[1], truth[2], truth[3], 9),
        (-1, -1, 1, 2, 3, 4),
        (-1.0,) * 6,
    )
    verdict = client.verify(tree)
    assert list(verdict.token_ids) == truth[:4]
    assert list(verdict.accepted_nodes) == [1, 2, 3]
    assert router.engine.counters.num_draft_tokens == 4


def test_blocks_come_back() -> None:
    """Trial 20: 200 sessions that end by close, failure, stream end or refusal: the pool is as at the start."""
    engine = make_engine(kv_tokens=1024)
    free = engine.load().free_blocks
    truth = greedy(PROMPT, 4)
    for turn in range(50):
        router = Router(engine)
        done = router.open("done", PROMPT, max_length=40, max_nodes=8)
        done.verify(chain(done.root, truth[:3]))
        engine.close(router.stream, "done")
        router.open("prefilling", PROMPT, max_length=40, max_nodes=8)
        failing = router.open("failing", PROMPT, max_length=40, max_nodes=8)
        failing.send()
        if turn % 2:
            failing.send()
        router.open("refused", PROMPT, max_length=40, prompt_tokens=99)
        if turn % 3:
            engine.iterate()
        engine.close_stream(router.stream)
        assert engine.load().free_blocks == free
        assert engine.sessions == 0
        assert not engine.iterate()
    engine.check()
    counters = engine.counters
    assert counters.sessions_opened == counters.sessions_closed + counters.sessions_failed == 150


def test_no_blocks_left() -> None:
    """RESOURCE_EXHAUSTED with a time to try again; what is open goes on; a close makes room."""
    router = Router(make_engine(kv_tokens=96))
    fields = {"max_length": 40, "max_nodes": 0}
    first, second = router.open("a", PROMPT, **fields), router.open("b", PROMPT, **fields)
    router.open("c", PROMPT, **fields)
    first.verify()
    (failure,) = router.failures
    assert (failure.session_id, failure.reason) == ("c", "RESOURCE_EXHAUSTED")
    assert failure.retry_after_ms > 0
    second.verify()
    router.engine.close(router.stream, "a")
    router.open("c", PROMPT, **fields).verify()
    # What can never fit is not worth trying again.
    router.open("d", PROMPT, max_length=200)
    router.run()
    assert router.failures[1].reason == "CONTEXT_TOO_LONG"


def test_sessions_at_once() -> None:
    """max_sessions is the limit, over all streams; draining refuses every open."""
    engine = make_engine(max_sessions=2)
    first, second = Router(engine), Router(engine)
    first.open("a", PROMPT)
    second.open("b", PROMPT)
    second.open("c", PROMPT)
    second.run()
    assert [failure.reason for failure in second.failures] == ["RESOURCE_EXHAUSTED"]
    engine.drain()
    engine.close(second.stream, "b")
    second.open("d", PROMPT)
    second.run()
    assert [failure.reason for failure in second.failures] == ["RESOURCE_EXHAUSTED", "UNAVAILABLE"]
    assert engine.load().draining
    assert engine.load().sessions == 1


def test_a_closed_session_is_dropped_from_the_queue() -> None:
    """A step that waits is not run after its session's close, and is counted."""
    router = Router(make_engine())
    client = router.open("a", PROMPT)
    client.send()
    router.engine.close(router.stream, "a")
    router.engine.close(router.stream, "a")
    router.run()
    counters = router.engine.counters
    assert (counters.rows, counters.steps, counters.dropped_steps, counters.sessions_closed) == (0, 0, 1, 1)
    assert not router.verdicts
    assert not router.failures


def test_failover_continues_the_same_answer() -> None:
    """A second verifier, opened with prompt and output so far, says what the first one would have said."""
    params = SamplingParams(temperature=0.9, seed=8, presence_penalty=0.5)
    truth = plain(PROMPT, 30, params)
    first = Router(make_engine()).open("a", PROMPT, params=params)
    first.generate(11, lambda committed, root: chain(root, truth[len(committed) - len(PROMPT) :][:3]))
    second = Router(make_engine()).open("a", first.token_ids, params=params, prompt_tokens=len(PROMPT))
    done = len(first.token_ids) - len(PROMPT)
    assert second.generate(30 - done) == truth[done:]


def test_min_new_tokens_holds_inside_a_run() -> None:
    """The natural token is declared a stop token: it is not chosen before min_new_tokens, drafted or not."""
    truth = greedy(PROMPT, 6)
    stop = truth[2]
    router = Router(make_engine())
    fields = {"stop_token_ids": [stop], "min_new_tokens": 5}
    plain_client = router.open("a", PROMPT, **fields)
    want = plain_client.generate(8)
    assert stop not in want[:5]
    drafted = router.open("b", PROMPT, **fields)
    first = drafted.verify(chain(drafted.root, truth[:5]))
    assert list(first.token_ids) == want[:3], "the walk leaves the drafted path where the stop token is forbidden"
    rest = drafted.verify(chain(drafted.root, want[3:7]))
    assert list(rest.token_ids) == want[3:8]


def test_counters_follow_the_steps() -> None:
    """vLLM's counts: drafts, draft tokens, accepted tokens, accepted per position; stages are timed."""
    truth = greedy(PROMPT, 12)
    ticks = iter(range(0, 10**9, 1000))
    router = Router(make_engine(clock=lambda: next(ticks)))
    client: Client = router.open("a", PROMPT)
    verdict = client.verify(chain(client.root, truth[:3]))
    client.verify()
    client.verify(chain(client.root, [truth[5], 0]))
    counters = router.engine.counters
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (2, 5, 4)
    assert counters.num_accepted_tokens_per_pos == [2, 1, 1]
    assert (counters.steps, counters.emitted_tokens) == (3, 7)
    assert counters.rows == len(PROMPT) + 3 + 1 + 3
    timings = verdict.timings
    assert timings.forward_ns == 1000
    assert timings.sample_ns > 0
    assert timings.queue_ns + timings.forward_ns + timings.sample_ns <= timings.total_ns


def test_sessions_that_were_answered_together_are_waited_for() -> None:
    """A tenth of the last forward's time, no longer; not for a lone session, one that closed, or without work."""
    now = 0

    def clock() -> int:
        nonlocal now
        now += 1_000_000
        return now

    engine = make_engine(clock=clock)
    runner: Any = engine._runner
    forward = runner.forward

    def slow(batch: Any) -> Any:
        nonlocal now
        now += 100_000_000
        return forward(batch)

    runner.forward = slow
    router = Router(engine)
    clients = [router.open(str(index), PROMPT) for index in range(3)]

    def together() -> None:
        for client in clients:
            client.send()
        router.run()
        for client in clients:
            client.take()

    together()  # with their prompts
    together()
    assert engine.patience_ns() == 0, "nothing to run: the worker sleeps anyway"
    clients[0].send()
    assert 0 < engine.patience_ns() < 100_000_000
    clients[1].send()
    assert engine.patience_ns() > 0
    engine.close(router.stream, clients.pop().session_id)
    assert engine.patience_ns() == 0, "everybody is back or gone"
    router.run()
    for client in clients:
        client.take()
    clients[0].send()
    now += 100_000_000
    assert engine.patience_ns() == 0, "too late"
    router.run()
    clients[0].take()
    engine.close(router.stream, clients.pop().session_id)
    clients[0].send()
    assert engine.patience_ns() == 0, "a session alone is not waited for"
