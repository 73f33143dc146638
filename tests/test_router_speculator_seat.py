"""`SpeculatorSeat`: commits, pauses, and what is known of how soon a speculator answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from graftree.errors import Unavailable
from graftree.sampling import GREEDY
from graftree.v1.speculation_pb2 import DraftCommit, DraftOpen, TreeDelta
from router.adaptive import AdaptiveSteering
from router.drafts import Drafts
from router.metrics import Metrics
from router.priors import Priors
from router.request import GenerationPlan
from router.speculator_seat import SpeculatorSeat
from router.steering import FixedSteering, Steering
from router.stops import StopRules
from tests.fakes import FakeSpeculator, FakeVerifier, plain, wrong
from tests.router_harness import PROMPT, harness


class Link:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.record, self.metrics = SimpleNamespace(kind="model:/a/b", pod_id="s0"), Metrics()
        self.opened: list[DraftOpen] = []
        self.commits: list[DraftCommit] = []

    def join(self, member: Any, opening: DraftOpen) -> None:
        self.opened.append(opening)

    def commit(self, commit: DraftCommit) -> None:
        self.commits.append(commit)

    def leave(self, wire_id: str) -> None:
        """Nothing."""


class Bench:
    """A seat on a link, with a clock."""

    def __init__(self) -> None:
        self.now, self.link, self.heard = 0.0, Link(), list[TreeDelta]()
        self.gone = asyncio.Event()
        plan = GenerationPlan(
            request_id="r",
            parameters=b"",
            prompt_token_ids=(1, 2),
            sampling=GREEDY,
            stops=StopRules(10, 0, frozenset(), ()),
            max_length=100,
            log_probs=False,
            alternatives=0,
            echo_prompt_token_ids=False,
            max_nodes=16,
            max_depth=8,
        )
        link: Any = self.link
        self.seat = SpeculatorSeat(
            link,
            plan,
            [1, 2],
            wire_id="w.1",
            salt=1,
            draft_salt=2,
            vocab_size=10,
            max_nodes=32,
            max_depth=8,
            sink=lambda seat, delta: self.heard.append(delta),
            gone=self.gone.set,
            clock=lambda: self.now,
        )

    def told(self) -> list[tuple[list[int], int, int, bool]]:
        """(tokens, committed length, budget, paused) of each commit."""
        return [(list(c.token_ids), c.committed_length, c.budget_nodes, c.paused) for c in self.link.commits]


def test_commits_go_out_at_once() -> None:
    """Each names the length before it, and the budget, at most what the tree was opened for."""
    bench = Bench()
    bench.seat.commit([5, 6], living_nodes=12)
    bench.seat.commit([7], living_nodes=99)
    bench.seat.commit([8])
    assert bench.told() == [([5, 6], 2, 12, False), ([7], 4, 32, False), ([8], 5, 0, False)]


@pytest.mark.parametrize("adaptive", [False, True])
def test_one_that_has_failed_is_not_waited_for(adaptive: bool) -> None:
    """It says so at once, and is no longer among those worth waiting for."""
    bench, metrics = Bench(), Metrics()
    common: Any = {"most": 16, "longest_wait": 1.0, "clock": lambda: 0.0}
    steering: Steering = (
        AdaptiveSteering(Priors(), metrics, **common) if adaptive else FixedSteering(Priors(), **common)
    )
    bench.seat.latency = 0.01
    assert steering.pending([bench.seat]) == [bench.seat]
    bench.seat.failed(Unavailable("gone"))
    assert bench.gone.is_set()
    assert steering.pending([bench.seat]) == []


async def test_a_wait_ends_with_its_speculator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step leaves once the only one that it waits for is gone, however long it was to wait."""
    wait = Drafts.wait
    monkeypatch.setattr(Drafts, "wait", lambda self, until: wait(self, until._replace(seconds=600.0)))
    speculator, removing = FakeSpeculator(draft=wrong(1)), list[asyncio.Task[None]]()
    async with harness(FakeVerifier(), speculator, adaptive=False, draft_wait_ms=1000.0) as stack:

        def vanish(delta: TreeDelta) -> TreeDelta | None:
            if delta.committed_length < len(PROMPT) + 8:
                return delta
            if not removing:
                removing.append(asyncio.create_task(stack.remove(speculator)))
            return None

        speculator.script = vanish
        async with asyncio.timeout(60):
            result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=30)
        await asyncio.gather(*removing)
        assert removing
        assert stack.metrics.draft_waits == stack.metrics.draft_wins + 1
        assert list(result.token_ids) == plain(PROMPT, 30)


def test_a_paused_speculator_hears_nothing() -> None:
    """One commit pauses it, those after it are held, and all of them travel in the one that wakes it."""
    bench = Bench()
    bench.seat.commit([5], paused=True)
    bench.seat.commit([6, 7], paused=True)
    bench.seat.commit([8], paused=True)
    assert bench.told() == [([5], 2, 0, True)]
    assert bench.seat.paused
    bench.seat.commit([9], living_nodes=8)
    assert bench.told()[1:] == [([6, 7, 8, 9], 3, 8, False)]
    assert not bench.seat.paused
    bench.seat.commit([1])
    assert bench.told()[2:] == [([1], 7, 0, False)]


def test_answers_and_their_latency() -> None:
    """The first delta grown from the text as it is now answers; a complete one says that nothing more comes."""
    bench = Bench()
    seat = bench.seat
    seat.drafted(TreeDelta(committed_length=2))
    assert seat.answered
    assert seat.latency is None  # an open takes longer than a commit
    seat.commit([5])
    assert not seat.answered
    bench.now = 0.004
    seat.drafted(TreeDelta(committed_length=2, complete=True))
    assert not seat.answered
    assert not seat.complete
    seat.drafted(TreeDelta(committed_length=3))
    assert seat.answered
    assert not seat.complete
    assert seat.latency == pytest.approx(0.004)
    seat.drafted(TreeDelta(committed_length=3, complete=True))
    assert seat.complete
    seat.commit([6], paused=True)
    assert seat.answered
    assert seat.complete
    assert len(bench.heard) == 4


async def test_a_dropped_speculator_is_left_alone() -> None:
    """Through real streams: paused once, then silence until its trial, which gives it the tokens of all rounds."""
    speculator = FakeSpeculator(draft=lambda _: [])  # answers, and never has anything to say
    async with harness(FakeVerifier(), speculator, replay_seconds=0) as stack:
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=150)
        assert list(result.token_ids) == plain(PROMPT, 150)
        assert stack.metrics.dropped_speculators == 1
    assert sum(commit.paused for commit in speculator.commits) >= 1
    assert len(speculator.commits) < 100
    assert max(len(commit.token_ids) for commit in speculator.commits) > 10
