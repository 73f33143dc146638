"""The engine: growth while nobody waits, commits between steps, fairness, and drafters that misbehave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from graftree.errors import GraftreeError, NotFound, Stale
from graftree.tree import node_id
from graftree.v1 import common_pb2, speculation_pb2
from speculator_service.drafters.base import Answer, Candidate, Drafter, DraftSession, Leaf
from speculator_service.engine import Engine
from speculator_service.events import Close, Commit, Failed, Grown, Open, Operation
from speculator_service.limits import Limits
from tests.drafters import GARBAGE, Crash, Flat, Garbage

LIMITS = Limits(max_sessions=100, max_nodes=20, max_depth=6, branching=4)
PROMPT = (1, 2, 3)


def opening(session_id: str, **changes: Any) -> Open:
    """A session behind three tokens."""
    fields = {"max_nodes": 20, "max_depth": 6, "vocab_size": 200, "max_length": 1000}
    fields |= {"sampling": common_pb2.SamplingParams(temperature=0.0), **changes}
    request = speculation_pb2.DraftOpen(
        session_id=session_id,
        token_ids=PROMPT,
        **fields,
    )
    session = LIMITS.session(session_id, request)
    return Open(session, LIMITS.tree(session, request.max_depth), 0)


class Watched:
    """An engine whose events are collected."""

    def __init__(self, drafter: Drafter, batch_leaves: int = 64) -> None:
        self.events: list[Grown | Failed] = []
        self._news = asyncio.Event()
        self.engine = Engine(drafter, batch_leaves=batch_leaves, deliver=self._deliver)

    def _deliver(self, events: list[Grown | Failed]) -> None:
        self.events.extend(events)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    def submit(self, *operations: Operation) -> None:
        self.engine.submit(operations)

    def complete(self, session_id: str) -> bool:
        own = [e for e in self.events if isinstance(e, Grown) and e.session_id == session_id]
        return bool(own) and own[-1].complete

    def failure(self, session_id: str) -> GraftreeError | None:
        for event in self.events:
            if isinstance(event, Failed) and event.session_id == session_id:
                return event.error
        return None


@asynccontextmanager
async def running(drafter: Drafter, batch_leaves: int = 64) -> AsyncIterator[Watched]:
    watched = Watched(drafter, batch_leaves)
    watched.engine.start()
    try:
        yield watched
    finally:
        await watched.engine.stop()


class InlineFlat(Flat):
    inline: ClassVar[bool] = True


@pytest.mark.parametrize("drafter", [Flat, InlineFlat])
async def test_layers_arrive_before_the_tree_is_complete(drafter: type[Flat]) -> None:
    """Nodes leave step by step; the last event, and only it, says complete; together they are the whole tree."""
    async with running(drafter(width="2")) as watched:
        opened = opening("a")
        watched.submit(opened)
        await watched.until(lambda: watched.complete("a"))
        grown = [event for event in watched.events if isinstance(event, Grown)]
        assert len(grown) > 2
        assert [event.complete for event in grown] == [False] * (len(grown) - 1) + [True]
        assert [node for event in grown for node in event.nodes] == list(opened.tree.nodes())
        assert len(opened.tree) == 20


async def test_an_idle_engine_makes_no_steps() -> None:
    """Once every tree is complete the thread sleeps until the next operation."""
    async with running(Flat()) as watched:
        watched.submit(opening("a"))
        await watched.until(lambda: watched.complete("a"))
        steps = watched.engine.steps
        await asyncio.sleep(0.05)
        assert watched.engine.steps == steps
        watched.submit(Commit("a", (199,), 3, 0))
        await watched.until(lambda: watched.engine.steps > steps and watched.complete("a"))


async def test_a_commit_re_roots_and_growth_goes_on() -> None:
    """New nodes hang on the committed token's node or on nodes sent before it."""
    async with running(Flat()) as watched:
        opened = opening("a")
        watched.submit(opened)
        await watched.until(lambda: watched.complete("a"))
        child = next(iter(opened.tree.root.children.values()))
        known = {node.id for node in opened.tree.nodes()}
        watched.events.clear()
        watched.submit(Commit("a", (child.token_id,), 3, 0))
        await watched.until(lambda: watched.complete("a"))
        assert opened.tree.root.id == child.id
        fresh = [node for event in watched.events if isinstance(event, Grown) for node in event.nodes]
        assert fresh
        for node in fresh:
            assert node.parent is not None
            assert node.parent.id in known
            assert node.id not in known
            known.add(node.id)


class Gated(Drafter):
    """Each step waits for the test."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        self.entered.release()
        self.gate.acquire()
        return [[Candidate(5, -0.1), Candidate(6, -3.0)] for _ in leaves]


async def test_nodes_that_a_commit_overtook_are_not_sent() -> None:
    """A commit that arrives during a step is applied before the step's nodes go out: dead ones stay here."""
    drafter = Gated()
    async with running(drafter) as watched:
        watched.submit(opening("a"))
        await asyncio.to_thread(drafter.entered.acquire)
        watched.submit(Commit("a", (5, 9), 3, 0))
        drafter.gate.release()
        await asyncio.to_thread(drafter.entered.acquire)
        assert not [event for event in watched.events if isinstance(event, Grown) and event.nodes]
        watched.submit(Close("a"))
        drafter.gate.release(100)


async def test_a_paused_session_drafts_and_says_nothing() -> None:
    """From a commit that says so to one that does not: no leaf is expanded and no event comes, commits are followed
    by tree and drafter; then growth goes on behind the last of them. Other sessions are served throughout."""
    expanded: list[str] = []
    told: list[tuple[int, ...]] = []

    class Spy(Flat):
        def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
            expanded.extend(leaf.session_id for leaf in leaves)
            return super().expand(leaves)

        def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
            told.append(tuple(token_ids))

    async with running(Spy()) as watched:
        opened = opening("a")
        watched.submit(opened)
        await watched.until(lambda: watched.complete("a"))
        expanded.clear()
        watched.events.clear()
        watched.submit(Commit("a", (199,), 3, 0, paused=True), Commit("a", (198,), 4, 0, paused=True), opening("b"))
        await watched.until(lambda: watched.complete("b"))
        assert set(expanded) == {"b"}
        assert not [event for event in watched.events if event.session_id == "a"]
        watched.submit(Commit("a", (197, 196), 5, 0))
        await watched.until(lambda: watched.complete("a"))
        assert told == [(199,), (198,), (197, 196)]
        assert opened.tree.committed_length == 7
        assert len(opened.tree) == 20


async def test_a_commit_sets_the_budget() -> None:
    """As many nodes as the commit says, and those of the opening again when it says nothing."""
    async with running(Flat()) as watched:
        opened = opening("a")
        watched.submit(opened, Commit("a", (199,), 3, 0, budget=3))
        await watched.until(lambda: watched.complete("a"))
        assert len(opened.tree) == 3
        watched.events.clear()
        watched.submit(Commit("a", (199,), 4, 0))
        await watched.until(lambda: watched.complete("a"))
        assert len(opened.tree) == 20


async def test_sessions_learn_from_those_before_them() -> None:
    """What commits said about the drafter is where a new session begins; greedy sessions and those under noise are
    told apart."""
    async with running(Flat(width="1")) as watched:
        watched.submit(opening("a"))
        for length in range(3, 100):
            await watched.until(lambda: watched.complete("a"))
            watched.events.clear()
            watched.submit(Commit("a", (199,), length, 0))
        await watched.until(lambda: watched.complete("a"))
        assert watched.engine.priors["greedy"].chance(1, 0.6) < 0.2
        later = opening("b")
        watched.submit(later)
        await watched.until(lambda: watched.complete("b"))
        assert len(later.tree) < 3
        noisy = opening("c", sampling=common_pb2.SamplingParams(temperature=1.0, seed=1))
        watched.submit(noisy)
        await watched.until(lambda: watched.complete("c"))
        assert len(noisy.tree) > len(later.tree)
        assert set(watched.engine.priors) == {"greedy", "noise"}


async def test_all_sessions_share_each_step() -> None:
    """More sessions than leaves per step: everybody is served within sessions / leaves steps, in turn."""
    served: list[set[str]] = []

    class Spy(Flat):
        def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
            served.append({leaf.session_id for leaf in leaves})
            assert len(leaves) <= 4
            return super().expand(leaves)

    names = {f"s{i}" for i in range(12)}
    async with running(Spy(), batch_leaves=4) as watched:
        watched.submit(*[opening(name) for name in sorted(names)])
        await watched.until(lambda: all(watched.complete(name) for name in names))
    assert set().union(*served[:3]) == names
    assert set().union(*served[3:6]) == names


async def test_commit_that_disagrees_about_the_length_fails_its_session() -> None:
    """STALE for a wrong committed length, NOT_FOUND for a session nobody opened; others go on."""
    async with running(Flat()) as watched:
        watched.submit(opening("a"), opening("b"), Commit("a", (7,), 4, 0), Commit("c", (7,), 3, 0))
        await watched.until(lambda: watched.complete("b"))
        assert isinstance(watched.failure("a"), Stale)
        assert isinstance(watched.failure("c"), NotFound)
        assert watched.failure("b") is None


class OneBad(Flat):
    """Misbehaves for the session named `bad`, or for every leaf batch that holds one of its leaves."""

    def __init__(self, bad: Drafter) -> None:
        super().__init__()
        self._bad = bad

    def open(self, session: DraftSession) -> None:
        if session.session_id == "bad":
            self._bad.open(session)

    def commit(self, session_id: str, token_ids: Sequence[int]) -> None:
        if session_id == "bad":
            self._bad.commit(session_id, token_ids)

    def close(self, session_id: str) -> None:
        if session_id == "bad":
            self._bad.close(session_id)

    def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
        answers = list(super().expand(leaves))
        for index, leaf in enumerate(leaves):
            if leaf.session_id == "bad":
                answers[index : index + 1] = self._bad.expand([leaf])
        return answers


@pytest.mark.parametrize(
    "bad",
    [
        *[pytest.param(Garbage(kind), id=kind) for kind in (*GARBAGE, "short")],
        *[pytest.param(Crash(where), id=f"crash-{where}") for where in ("open", "expand", "commit")],
    ],
)
async def test_a_bad_answer_costs_its_own_session_only(bad: Drafter) -> None:
    """Whatever a drafter returns or raises for one session, that session fails, is counted, and others complete."""
    async with running(OneBad(bad)) as watched:
        watched.submit(opening("good"), opening("bad"), Commit("bad", (150,), 3, 0), opening("other"))
        await watched.until(lambda: watched.complete("good") and watched.complete("other"))
        await watched.until(lambda: watched.failure("bad") is not None)
        assert sum(watched.engine.faults.values()) == 1
        watched.submit(opening("late"))
        await watched.until(lambda: watched.complete("late"))


async def test_a_crash_on_close_is_counted() -> None:
    """A drafter that raises in close changes nothing for anybody."""
    async with running(Crash("close")) as watched:
        watched.submit(opening("a"), Close("a"), opening("b"))
        await watched.until(lambda: watched.complete("b"))
        assert watched.engine.faults == {"close: RuntimeError": 1}


async def test_a_drafter_that_is_never_ready_is_given_up() -> None:
    """None for ever does not keep the thread busy for ever."""

    class NeverReady(Drafter):
        def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
            return [None for _ in leaves]

    async with running(NeverReady()) as watched:
        watched.submit(opening("a"))
        await watched.until(lambda: watched.failure("a") is not None)
        assert watched.engine.faults == {"never ready": 1}


async def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    """A drafter with a larger vocabulary drafts nothing wrong: its session just gets no such node."""
    async with running(Garbage("huge")) as watched:
        opened = opening("a")
        watched.submit(opened)
        await watched.until(lambda: watched.complete("a"))
        assert len(opened.tree) == 0


async def test_close_forgets_the_session() -> None:
    """After a close the drafter knows nothing of the session, and stop closes those still open."""
    closed: list[str] = []

    class Spy(Flat):
        def close(self, session_id: str) -> None:
            closed.append(session_id)

    async with running(Spy()) as watched:
        watched.submit(opening("a"), opening("b"), Close("a"))
        await watched.until(lambda: watched.complete("b"))
        assert closed == ["a"]
    assert closed == ["a", "b"]


async def test_leaves_name_their_nodes() -> None:
    """A leaf's ids are the chain of node ids along its path, and its position is that of its children."""
    seen: list[Leaf] = []

    class Spy(Flat):
        def expand(self, leaves: Sequence[Leaf]) -> Sequence[Answer]:
            seen.extend(leaves)
            return super().expand(leaves)

    async with running(Spy()) as watched:
        opened = opening("a")
        root = opened.session.root_id
        watched.submit(opened)
        await watched.until(lambda: watched.complete("a"))
    for leaf in seen:
        chain = [root]
        for token in leaf.path:
            chain.append(node_id(chain[-1], token))
        assert leaf.node_id == chain[-1]
        assert leaf.parent_id == (chain[-2] if leaf.path else root)
        assert leaf.position == len(PROMPT) + len(leaf.path)
