"""Priority and fairness: who gets rows of a forward, KV blocks, and a place, and that nobody is forgotten."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from graftree import AsyncClient, LocalStack
from graftree import Client as Caller
from graftree.errors import InvalidArgument, ResourceExhausted
from graftree.security.keys import new_key
from graftree.v1 import common_pb2, verification_pb2, verification_pb2_grpc
from tests.fakes import FakeVerifier
from tests.router_harness import PROMPT, harness
from tests.test_security_keys import entry, write
from tests.verifier_harness import SALT, Client, Router, chain, greedy, make_engine
from verifier_service.scheduler import STARVING
from verifier_service.session import Share

LONG = "random:llama?layers=1&hidden=32&heads=2&vocab=512&context=2048&seed=0"
TEXTS = [[seed + 1, *((13 * i + seed) % 512 for i in range(20))] for seed in range(6)]


class Watch:
    """The shares of each forward of an engine, by session id."""

    def __init__(self, router: Router) -> None:
        self.router, self.forwards = router, list[dict[str, Share]]()
        plan = router.engine.scheduler.plan

        def watched() -> list[Share]:
            shares = plan()
            self.forwards.append({share.session.session_id: share for share in shares})
            return shares

        router.engine.scheduler.plan = watched  # type: ignore[method-assign]

    def turn(self, *clients: Client, nodes: int = 0) -> dict[str, Share]:
        """One forward in which each of these clients has a step; the shares it had."""
        for client in clients:
            session = self.router.stream.sessions[client.session_id]
            if session.step is None:
                client.send(chain(client.root, range(nodes)))
        self.router.engine.iterate()
        self.router.engine.flush()
        for client in clients:
            if any(verdict.session_id == client.session_id for verdict in self.router.verdicts):
                client.take()
        return self.forwards[-1]


def prefilled(router: Router, *names: str, **fields: Any) -> list[Client]:
    """Sessions whose prompts are in the cache."""
    clients = [router.open(name, TEXTS[index], **fields) for index, name in enumerate(names)]
    router.run()
    return clients


def text(length: int) -> list[int]:
    return [(7 * index) % 500 for index in range(length)]


def test_a_long_prompt_does_not_keep_steps_out() -> None:
    """While a prompt of 1,500 tokens prefills, every forward has every decode's whole tree beside the chunk, and no
    more than `step_tokens` rows: decodes wait for one bounded forward a token, however long the prompt."""
    router = Router(make_engine(LONG, kv_tokens=1 << 14, step_tokens=64))
    clients = prefilled(router, "a", "b", "c", max_length=1000)
    watch = Watch(router)
    router.open("long", text(1500), max_length=2000)
    session, turns = router.stream.sessions["long"], 0
    while not session.prefilled:
        shares = watch.turn(*clients, nodes=7)
        assert set(shares) == {"a", "b", "c", "long"}
        assert [len(shares[name]) for name in "abc"] == [8, 8, 8]
        assert len(shares["long"]) == min(64 - 24, 1499 - session.cached + len(shares["long"]))
        turns += 1
    assert turns == -(-1499 // 40)
    assert {client.steps for client in clients} == {turns}


def test_many_long_prompts_beside_decodes() -> None:
    """Twelve prompts of 300 tokens beside four decodes whose trees alone would fill a forward's 64 rows: decodes take
    turns, prompts advance together, and none of the sixteen waits for more than a round of all."""
    router = Router(make_engine(LONG, kv_tokens=1 << 14, step_tokens=64))
    decodes = prefilled(router, "a", "b", "c", "d", max_length=1500)
    watch = Watch(router)
    for index in range(12):
        router.open(f"long-{index}", [index, *text(299)], max_length=400)
    prompts = [router.stream.sessions[f"long-{index}"] for index in range(12)]
    last: Counter[str] = Counter()
    halfway: list[int] = []
    turn = 0
    while not all(prompt.prefilled for prompt in prompts):
        turn += 1
        shares = watch.turn(*decodes, nodes=15)
        assert sum(map(len, shares.values())) <= 64
        waiting = [client.session_id for client in decodes] + [p.session_id for p in prompts if not p.prefilled]
        for name in shares:
            last[name] = turn
        assert all(turn - last[name] <= 16 for name in waiting), "nobody waits for more than a round"
        if turn == 100:
            halfway = [prompt.cached for prompt in prompts]
    assert 0.8 * turn <= sum(client.steps for client in decodes) / 4 / 0.75
    assert max(halfway) - min(halfway) <= 64, "prompts advance together"


def test_higher_priorities_get_their_rows_first() -> None:
    """Where 8 rows do not suffice for all, the urgent session has a step in every forward, the others what is left in
    turns, and the least urgent is served after `STARVING` forwards all the same."""
    router = Router(make_engine(LONG, step_tokens=8))
    urgent = prefilled(router, "urgent", priority=10, max_length=500)[0]
    usual = [router.open(name, TEXTS[1], max_length=500) for name in ("one", "other")]
    low = router.open("low", TEXTS[2], max_length=500, priority=-100)
    router.run()
    watch = Watch(router)
    for _ in range(2 * STARVING + 4):
        watch.turn(urgent, *usual, low, nodes=3)
    served = Counter(name for shares in watch.forwards for name in shares)
    assert served["urgent"] >= len(watch.forwards) - 2
    assert abs(served["one"] - served["other"]) <= 1
    assert served["low"] == 2


def test_an_urgent_prompt_goes_before_usual_steps() -> None:
    """A prompt of higher priority takes the forward's rows; usual steps ride along in what its last chunk leaves."""
    router = Router(make_engine(LONG, step_tokens=32))
    usual = prefilled(router, "usual", max_length=500)[0]
    watch = Watch(router)
    router.open("urgent", text(101), max_length=500, priority=1)
    assert [set(watch.turn(usual)) for _ in range(4)] == [{"urgent"}] * 3 + [{"urgent", "usual"}]


def test_preemption_takes_the_least_urgent_and_of_these_the_youngest() -> None:
    """A growing session of any age parks lower priorities first, then younger equals; who was parked goes on with the
    text it would have had, the first in rank first."""
    engine = make_engine(kv_tokens=192, kv_reserve=0.0, prefix_cache=False)
    router = Router(engine)
    fields = {"max_length": 120, "max_nodes": 2}
    names = {"old": 0, "young": 0, "low": -1, "high": 1, "last": 0}
    clients = {
        name: router.open(name, TEXTS[index], priority=priority, **fields)
        for index, (name, priority) in enumerate(names.items())
    }
    router.run()
    assert not router.failures
    expected = {name: greedy(client.token_ids, 90) for name, client in clients.items()}
    order: list[str] = []
    for _ in range(90):
        clients["high"].verify()
        parked = [name for name, session in router.stream.sessions.items() if session.parked]
        order += [name for name in parked if name not in order]
    assert order == ["low", "last", "young", "old"][: len(order)]
    assert len(order) >= 2
    assert clients["high"].token_ids[-90:] == expected["high"]
    for name in ("low", "last"):
        clients[name].send()
    router.run()
    engine.close(router.stream, "high")
    router.run()
    for name in ("last", "low"):
        clients[name].take()
        assert clients[name].token_ids[-1] == expected[name][0]
        assert clients[name].generate(5) == expected[name][1:6]


def test_an_urgent_session_is_let_in() -> None:
    """A full pool takes a session of higher priority in place of as many lower ones as it must, the last in rank
    first, not one of the same or a lower priority; nobody is parked where that would not suffice."""
    engine = make_engine(kv_tokens=160, prefix_cache=False)
    router = Router(engine)
    fields: dict[str, Any] = {"max_length": 48, "max_nodes": 0}
    low = [router.open(name, TEXTS[index], priority=-index, **fields) for index, name in enumerate("ab")]
    router.run()
    assert engine.load().free_blocks == 2
    router.open("same", TEXTS[2], priority=-1, **fields)
    router.open("lower", TEXTS[2], priority=-5, **fields)
    router.open("large", TEXTS[2], **{**fields, "max_length": 150})
    router.run()
    assert [failure.session_id for failure in router.failures] == ["same", "lower", "large"]
    assert {failure.reason for failure in router.failures} == {"RESOURCE_EXHAUSTED"}
    assert all(failure.retry_after_ms > 0 for failure in router.failures)
    assert engine.counters.preemptions == 0
    urgent = router.open("urgent", TEXTS[3], priority=100, **fields)
    assert [name for name, session in router.stream.sessions.items() if session.parked] == ["b"]
    assert urgent.generate(3) == greedy(TEXTS[3], 3)
    assert low[0].generate(4) == greedy(TEXTS[0], 4)
    low[1].send()
    router.run()
    assert not router.verdicts
    engine.close(router.stream, "urgent")
    router.run()
    assert list(low[1].take().token_ids) == greedy(TEXTS[1], 1)
    for name in "ab":
        engine.close(router.stream, name)
    engine.check()
    assert engine.load().free_blocks == engine.load().total_blocks


@pytest.mark.parametrize("priority", [-101, 101, 2**31 - 1, -(2**31)])
def test_out_of_range_at_the_verifier(priority: int) -> None:
    """The pod itself names the field, the value and the range."""
    router = Router(make_engine(LONG))
    message = verification_pb2.VerifyOpen(
        session_id="a", salt=SALT, token_ids=[1], prompt_tokens=1, max_length=9, priority=priority
    )
    router.engine.open(router.stream, message)
    router.run()
    (failure,) = router.failures
    assert failure.reason == "INVALID_ARGUMENT"
    assert f"{priority}" in failure.message
    assert "-100 to 100" in failure.message


async def test_the_router_hands_it_on(tmp_path: Path) -> None:
    """The verifier gets the request's priority; the range is the router's to refuse; a key bounds it, by default at
    the ordinary one."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack:
        await stack.client.generate(token_ids=PROMPT, max_new_tokens=1, priority=-7)
        with pytest.raises(InvalidArgument, match="-100 to 100") as caught:
            await stack.client.generate(token_ids=PROMPT, max_new_tokens=1, priority=101)
        assert caught.value.field == "priority"
    assert [opened.priority for opened in verifier.opened] == [-7]
    usual, vip = new_key(), new_key()
    keys = write(tmp_path / "keys.json", entry(usual, "usual"), entry(vip, "vip", max_priority=50))
    async with harness(FakeVerifier(), api_keys=keys, audit_log=str(tmp_path / "audit")) as stack:
        for key, most in ((usual, 0), (vip, 50)):
            async with AsyncClient(stack.router.address, api_key=key) as client:
                await client.generate(token_ids=PROMPT, max_new_tokens=1, priority=most)
                with pytest.raises(InvalidArgument, match=f"at most {most} with this API key"):
                    await client.generate(token_ids=PROMPT, max_new_tokens=1, priority=most + 1)


@contextmanager
def holding(address: str, max_length: int) -> Iterator[None]:
    """A session on the verifier that takes KV for so many tokens and never steps."""
    over = threading.Event()

    def requests() -> Iterator[verification_pb2.VerifyRequest]:
        hello = common_pb2.StreamHello(revision=1, pod_id="other")
        opening = verification_pb2.VerifyOpen(
            session_id="held", salt=SALT, token_ids=[1], prompt_tokens=1, max_length=max_length
        )
        yield verification_pb2.VerifyRequest(hello=hello, opens=[opening], credits=100)
        over.wait()

    with grpc.insecure_channel(address) as channel:
        call = verification_pb2_grpc.VerificationServiceStub(channel).Verify(requests())
        assert any(response.load.sessions == 1 for response in call)
        try:
            yield
        finally:
            over.set()
            call.cancel()


def test_full_and_urgent_through_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV for one session, and somebody has it: a request is refused with a time to try again, never queued; an urgent
    one is served. Preempted in mid run, a request goes on with the text it would have had."""
    monkeypatch.setattr("router.session.RETRY_SECONDS", (0.001, 0.01))
    options = {"kv_tokens": 1536, "kv_reserve": 1.0, "step_time_seconds": 0}
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    with (
        LocalStack(LONG, [], in_process=True, threads=1, verifier_options=options) as stack,
        Caller(stack.target) as client,
    ):
        expected = client.generate("once", max_new_tokens=60, **fields).token_ids
        with holding(stack.pods("verifier")[0].address, 1500):
            with pytest.raises(ResourceExhausted) as caught:
                client.generate("again", max_new_tokens=40)
            assert caught.value.retry_after_s > 0
            assert client.generate("once", max_new_tokens=60, priority=1, **fields).token_ids == expected
        stream = client.stream("once", max_new_tokens=1500, **fields)
        tokens = [*next(stream).token_ids]
        client.generate("urgent", max_new_tokens=20, ignore_eos=True, priority=1)
        while len(tokens) < 60:
            tokens += next(stream).token_ids
        stream.close()
    assert tuple(tokens[:60]) == expected
