"""Less KV reserved than sessions may need: the youngest gives way, and nothing but time changes."""

from __future__ import annotations

import random

import pytest

from tests.verifier_harness import Client, Router, chain, greedy, make_engine

PROMPTS = [[seed + 1, *((13 * i + seed) % 512 for i in range(20))] for seed in range(6)]


def drive(router: Router, clients: list[Client], count: int, rng: random.Random) -> None:
    """Every session to `count` tokens, stepping whenever it can, with guesses that are right or wrong."""
    answers = {client.session_id: greedy(client.token_ids, count + 8) for client in clients}
    starts = {client.session_id: len(client.token_ids) for client in clients}
    waiting: set[str] = set()
    for _ in range(60 * count):
        for client in clients:
            done = len(client.token_ids) - starts[client.session_id]
            if client.session_id in waiting or done >= count:
                continue
            guess = answers[client.session_id][done : done + rng.randrange(5)]
            if rng.random() < 0.3:
                guess = [(token + 1) % 512 for token in guess]
            client.send(chain(client.root, guess))
            waiting.add(client.session_id)
        router.engine.iterate()
        router.engine.flush()
        for client in clients:
            if any(verdict.session_id == client.session_id for verdict in router.verdicts):
                client.take()
                waiting.discard(client.session_id)
                done = len(client.token_ids) - starts[client.session_id]
                assert client.token_ids[starts[client.session_id] :] == answers[client.session_id][:done]
                if done >= count:
                    router.engine.close(router.stream, client.session_id)
        if all(len(client.token_ids) - starts[client.session_id] >= count for client in clients):
            return
    raise AssertionError(f"sessions starve: {[len(client.token_ids) for client in clients]}")


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(("reserve", "kv_tokens", "sessions"), [(0.0, 272, 6), (0.3, 208, 4)])
def test_preempted_sessions_finish_and_say_the_same(
    reserve: float, kv_tokens: int, sessions: int, reuse: bool
) -> None:
    """Twice as many sessions as would fit whole: all end, each with plain decoding's text, whether their rows are
    found again or not; no block is lost."""
    engine = make_engine(kv_tokens=kv_tokens, kv_reserve=reserve, prefix_cache=reuse)
    router = Router(engine)
    clients = [
        router.open(str(index), prompt, max_length=80, max_nodes=6) for index, prompt in enumerate(PROMPTS[:sessions])
    ]
    assert not router.failures
    drive(router, clients, 40, random.Random(1))
    assert engine.counters.preemptions > 0
    engine.check()
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    assert engine.counters.pool_faults == 0


def test_the_oldest_is_never_preempted() -> None:
    """The session that opened first runs through at one step a turn, whatever the others want."""
    engine = make_engine(kv_tokens=160, kv_reserve=0.0, prefix_cache=False)
    router = Router(engine)
    first = router.open("0", PROMPTS[0], max_length=120, max_nodes=2)
    others = [router.open(str(index), PROMPTS[index], max_length=120, max_nodes=2) for index in (1, 2)]
    expected = greedy(PROMPTS[0], 90)
    for other in others:
        other.send()
    assert first.generate(90) == expected
    assert engine.counters.preemptions > 0
    engine.close(router.stream, "0")
    router.run()
    for other, prompt in zip(others, PROMPTS[1:], strict=False):
        assert list(other.take().token_ids) == greedy(prompt, 1)


def test_nobody_new_while_preempted_sessions_wait() -> None:
    """A full pool refuses with a time to try again; who was there before comes first."""
    engine = make_engine(kv_tokens=96, kv_reserve=0.0, prefix_cache=False)
    router = Router(engine)
    first = router.open("0", PROMPTS[0], max_length=90, max_nodes=2)
    second = router.open("1", PROMPTS[1], max_length=60, max_nodes=2)
    first.generate(50)
    assert engine.counters.preemptions == 1
    router.open("2", [1, 2, 3], max_length=10, max_nodes=0)
    router.run()
    (failure,) = router.failures
    assert (failure.reason, failure.retry_after_ms > 0) == ("RESOURCE_EXHAUSTED", True)
    second.send()
    router.run()
    assert not router.verdicts
    engine.close(router.stream, "0")
    router.run()
    assert list(second.take().token_ids) == greedy(PROMPTS[1], 1)


def test_a_sibling_of_a_preempted_session_keeps_what_there_was() -> None:
    """A sample that waits for its prompt's rows takes those that are there when their session is preempted."""
    engine = make_engine(kv_tokens=128, kv_reserve=0.0, prefix_cache=False, step_tokens=8)
    router = Router(engine)
    first = router.open("0", PROMPTS[0], max_length=120, max_nodes=0)
    first.generate(1)
    router.open("1", PROMPTS[1], max_length=40, max_nodes=0)
    sibling = router.open("2", PROMPTS[1], max_length=40, max_nodes=0, prefix_of="1")
    engine.iterate()
    engine._park(router.stream.sessions["1"])
    assert sibling.generate(3) == greedy(PROMPTS[1], 3)
    for session_id in "012":
        engine.close(router.stream, session_id)
    engine.check()
    assert engine.load().free_blocks == engine.load().total_blocks


def test_trial_23_a_late_tree_behind_a_preemption() -> None:
    """The step that waited runs after the preemption; the same tree once more, late, is stale."""
    engine = make_engine(kv_tokens=512, prefix_cache=False)
    router = Router(engine)
    client = router.open("0", PROMPTS[0], max_length=80, max_nodes=4)
    client.generate(5)
    truth = greedy(PROMPTS[0], 12)[5:]
    late = chain(client.root, truth[:3])
    length = len(client.token_ids)
    client.send(late)
    engine._park(router.stream.sessions["0"])
    router.run()
    assert list(client.take().token_ids) == truth[:4]
    client.send(late, committed_length=length)
    router.run()
    assert client.take().stale
    assert engine.counters.stale_steps == 1
    assert engine.counters.preemptions == 1
