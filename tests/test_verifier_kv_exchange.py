"""The engine's side of the KV Redis, driven by hand: whatever comes, late or for nobody, answers stay right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graftree.models.paged import PagedKV
from tests.kv_lab import PROMPT
from tests.verifier_harness import Router, chain, greedy, make_engine
from verifier_service.engine import Engine
from verifier_service.kv_exchange import Exchange, Load

BLOCKS = len(PROMPT) // 16


class Elsewhere:
    """A remote that wants everything and brings what the test says."""

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self.offered: list[bytes] = []
        self.asked: list[tuple[int, int, int]] = []

    def wants(self, first: int, blocks: int, length: int) -> bool:
        self.asked.append((first, blocks, length))
        return True

    def begin(self, load: Load) -> None:
        self.loads.append(load)

    def offer(self, names: Sequence[bytes]) -> None:
        self.offered += names


def engine_with_remote(**options: Any) -> tuple[Engine, Exchange, Elsewhere]:
    remote = Elsewhere()
    engine = make_engine(remote=remote, **options)
    assert engine.exchange is not None
    return engine, engine.exchange, remote


def rows_of(prompt: Sequence[int]) -> Tensor:
    """(2, layers, n, 16, KVH, D) the full blocks of a text, from an engine of its own."""
    engine = make_engine()
    router = Router(engine)
    router.open("s", prompt)
    router.run()
    (session,) = router.stream.sessions.values()
    kv = engine._runner.kv
    assert isinstance(kv, PagedKV)
    return kv.read_blocks(session.blocks[: (len(prompt) - 1) // 16])


def test_a_session_waits_and_takes_what_comes() -> None:
    """Nothing is computed while it waits, not even with a step queued. Two blocks come, two are computed."""
    engine, exchange, remote = engine_with_remote()
    router, done = Router(engine), list[float]()
    client = router.open("s", PROMPT)
    client.send(chain(client.root, greedy(PROMPT, 3)))
    router.run()
    (load,) = remote.loads
    assert remote.asked == [(0, BLOCKS, len(PROMPT))]
    assert engine.counters.rows == 0
    assert remote.offered == []
    exchange.put(load, rows_of(PROMPT)[:, :, :2], done.append)
    router.run()
    assert engine.counters.rows == 0
    assert remote.offered == load.names[:2]
    exchange.ended(load)
    router.run()
    assert list(client.take().token_ids) == greedy(PROMPT, 4)
    assert (engine.counters.loaded_rows, engine.counters.prefill_rows) == (32, len(PROMPT) - 1 - 32)
    assert done[0] > 0
    assert remote.offered == load.names
    assert client.generate(12) == greedy(PROMPT, 16)[4:]


def test_nothing_comes() -> None:
    """A load that ends with nothing is a prefill."""
    engine, exchange, remote = engine_with_remote()
    router = Router(engine)
    client = router.open("s", PROMPT)
    exchange.ended(remote.loads[0])
    assert client.generate(5) == greedy(PROMPT, 5)
    assert engine.counters.loaded_rows == 0


def test_what_nobody_waits_for_is_dropped() -> None:
    """Blocks that come after the session has closed, after the load has ended, or for a session that has the same id:
    they are not written, `done` is called, no block is lost, and the other session says what it should."""
    engine, exchange, remote = engine_with_remote()
    router, done = Router(engine), list[float]()
    router.open("s", PROMPT)
    engine.close(router.stream, "s")
    wrong = rows_of([(token + 1) % 512 for token in PROMPT])
    other = router.open("s", PROMPT)
    exchange.put(remote.loads[0], wrong, done.append)
    exchange.ended(remote.loads[0])
    assert remote.loads[0].given_up
    assert not remote.loads[1].given_up
    exchange.ended(remote.loads[1])
    exchange.put(remote.loads[1], wrong, done.append)
    assert other.generate(5) == greedy(PROMPT, 5)
    assert len(done) == 2
    assert engine.counters.loaded_rows == 0
    engine.close(router.stream, "s")
    engine.check()
    assert engine.counters.pool_faults == 0


def test_siblings_wait_with_it() -> None:
    """A sample that takes its prompt's rows from the first one gets those that were loaded."""
    engine, exchange, remote = engine_with_remote()
    router = Router(engine)
    first = router.open("0", PROMPT)
    second = router.open("1", PROMPT, prefix_of="0")
    router.run()
    (load,) = remote.loads
    exchange.put(load, rows_of(PROMPT), lambda seconds: None)
    exchange.ended(load)
    assert first.generate(4) == second.generate(4) == greedy(PROMPT, 4)
    assert engine.counters.prefill_rows == len(PROMPT) - 1 - BLOCKS * 16
    assert len(remote.loads) == 1


def test_the_first_of_siblings_goes_away() -> None:
    """The one that loads is closed: the other one computes."""
    engine, exchange, remote = engine_with_remote()
    router = Router(engine)
    router.open("0", PROMPT)
    second = router.open("1", PROMPT, prefix_of="0")
    engine.close(router.stream, "0")
    exchange.put(remote.loads[0], rows_of(PROMPT), lambda seconds: None)
    assert second.generate(4) == greedy(PROMPT, 4)


def test_preempted_while_it_loads() -> None:
    """A session that gives its blocks up forgets its load, asks again when it has blocks again, and says the same."""
    engine, exchange, remote = engine_with_remote(kv_tokens=160, kv_reserve=0.0)
    router = Router(engine)
    old = router.open("old", PROMPT[20:40], max_length=130, max_nodes=2)
    exchange.ended(remote.loads[0])
    young = router.open("young", PROMPT, max_length=100, max_nodes=2)
    young.send()
    said = old.generate(90)
    assert said == greedy(PROMPT[20:40], 90)
    assert engine.counters.preemptions > 0
    assert remote.loads[1].given_up
    exchange.put(remote.loads[1], rows_of(PROMPT), lambda seconds: None)
    assert engine.counters.loaded_rows == 0
    engine.close(router.stream, "old")
    router.run()
    assert len(remote.loads) == 3
    exchange.put(remote.loads[2], rows_of(PROMPT), lambda seconds: None)
    exchange.ended(remote.loads[2])
    router.run()
    assert list(young.take().token_ids) == greedy(PROMPT, 1)
    assert engine.counters.loaded_rows == BLOCKS * 16
    engine.close(router.stream, "young")
    engine.check()
    assert engine.counters.pool_faults == 0


def test_copies_of_what_is_still_there() -> None:
    """Blocks are supplied by name while the pool has them, as they are; the others are left out."""
    engine, exchange, remote = engine_with_remote()
    router, supplied = Router(engine), list[tuple[Sequence[bytes], Tensor | None]]()
    client = router.open("s", PROMPT)
    exchange.ended(remote.loads[0])
    client.generate(1)
    names = list(remote.loads[0].names)
    exchange.supply([b"?" * 32, *reversed(names)], lambda *given: supplied.append(given))
    found, data = supplied[0]
    assert list(found) == names[::-1]
    assert data is not None
    assert data.equal(rows_of(PROMPT).flip(2))
    exchange.supply([b"?" * 32], lambda *given: supplied.append(given))
    assert supplied[1] == ([], None)


def test_offers() -> None:
    """Each block is offered once when it is full, those of an earlier session when one begins with them; and all of
    open sessions when somebody asks."""
    engine, exchange, remote = engine_with_remote()
    router = Router(engine)
    client = router.open("s", PROMPT)
    exchange.ended(remote.loads[0])
    client.generate(30)
    assert len(remote.offered) == len(set(remote.offered)) == (len(PROMPT) + 29) // 16
    again = router.open("t", PROMPT)
    assert remote.offered[-BLOCKS:] == remote.offered[:BLOCKS]
    assert len(remote.loads) == 1  # the pool has it all
    before = list(remote.offered)
    exchange.offer_all()
    assert sorted(remote.offered[len(before) :]) == sorted(before)
    assert again.generate(3) == greedy(PROMPT, 3)


def test_a_cache_that_fails() -> None:
    """A copy that cannot be made costs the blocks, not the engine."""
    engine, exchange, remote = engine_with_remote()
    router = Router(engine)
    client = router.open("s", PROMPT)
    supplied: list[Any] = []
    exchange.put(remote.loads[0], rows_of(PROMPT)[:, :1], lambda seconds: None)  # a layer too few
    exchange.ended(remote.loads[0])
    assert client.generate(4) == greedy(PROMPT, 4)
    assert engine.counters.loaded_rows == 0

    def boom(blocks: Sequence[int]) -> Tensor:
        raise RuntimeError("out of memory")

    engine._runner.kv.read_blocks = boom  # type: ignore[attr-defined]
    exchange.supply(remote.offered, lambda *given: supplied.append(given))
    assert supplied == [([], None)]
