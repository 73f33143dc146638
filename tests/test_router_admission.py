"""Admission: what would come too late is refused at once; everything else is let in."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

import pytest

from graftree.errors import ResourceExhausted
from graftree.step_time import StepTime
from graftree.store.embedded import EmbeddedRedis
from graftree.v1 import generation_pb2 as pb
from router.admission import SHARE, Admission
from router.metrics import Metrics
from tests.fakes import FakeVerifier, plain
from tests.router_harness import PROMPT, harness, until
from tests.test_router_resume import asking


@dataclass
class Place:
    """A verifier as admission sees it."""

    step_time: StepTime | None = None
    sessions: int = 0
    full: bool = False


@dataclass
class Lab:
    """A router that has been running for a while, in numbers."""

    verifiers: list[Place]
    metrics: Metrics = field(default_factory=Metrics)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.admission = Admission(self.metrics, lambda: self.verifiers, longest_wait=5.0, clock=lambda: self.now)
        self.admission.tick()

    def pass_time(self, seconds: float, *, tokens: int, each: float, ended: int = 0) -> None:
        """So many tokens leave, `each` seconds behind the ones before them."""
        self.now += seconds
        self.metrics.itl.observe(each, tokens)
        self.metrics.rounds += tokens
        self.metrics.finished += ended
        self.admission.tick()


def test_seconds_follow_the_load() -> None:
    """What was seen at one load is carried over to another by the verifier's step time, overhead included."""
    steps = StepTime((1, 2), (0.01, 0.02))  # 10 ms a row
    lab = Lab([Place(steps, sessions=4)])
    for _ in range(3):
        lab.pass_time(1.0, tokens=40, each=0.06)  # half as much again as the model says for 4
    assert lab.admission.seconds(9, running=4) == pytest.approx(10 * 1.5 * 0.05)
    assert lab.admission.seconds(9, running=9) == pytest.approx(10 * 1.5 * 0.10)
    lab.verifiers.append(Place(steps))
    assert lab.admission.seconds(9, running=9) == pytest.approx(10 * 1.5 * 0.05), "two share the ten"


def test_without_a_step_time_the_load_counts() -> None:
    """A verifier that says nothing is taken for one that is twice as slow with twice as many."""
    lab = Lab([Place(sessions=5)])
    for _ in range(3):
        lab.pass_time(1.0, tokens=50, each=0.1)
    assert lab.admission.seconds(19, running=9) == pytest.approx(20 * 0.2)


def test_who_is_let_in() -> None:
    """The deadline decides, with a margin. Without one, beside nobody, before anything was seen: all are let in."""
    lab = Lab([Place(StepTime.flat(0.1), sessions=3)])
    lab.admission.check(1000, 0.1, running=3, waiting=0)
    for _ in range(3):
        lab.pass_time(1.0, tokens=30, each=0.1)
    needed = 10 * 0.1 / SHARE
    lab.admission.check(9, needed + 0.01, running=3, waiting=0)
    lab.admission.check(9, None, running=3, waiting=0)
    lab.admission.check(9, 0.1, running=0, waiting=0)
    with pytest.raises(ResourceExhausted, match="too much to do") as caught:
        lab.admission.check(9, needed - 0.01, running=3, waiting=0)
    assert 0 < caught.value.retry_after_s < 1
    assert lab.metrics.shed == 1


def test_answers_that_end_early_count_as_such() -> None:
    """Where answers use a tenth of what they may, so does the guess."""
    lab = Lab([Place(StepTime.flat(0.1), sessions=3)])
    lab.pass_time(1.0, tokens=30, each=0.1)
    for _ in range(200):
        lab.metrics.length_share.observe(0.1)
    assert lab.admission.seconds(100, running=3) == pytest.approx(11 * 0.1, rel=0.01)


def test_a_queue_that_would_not_move_in_time() -> None:
    """With every verifier full, who would wait longer than the longest wait is refused now, deadline or not."""
    lab = Lab([Place(StepTime.flat(0.1), sessions=8, full=True)])
    for _ in range(3):
        lab.pass_time(1.0, tokens=80, each=0.1, ended=2)
    lab.admission.check(9, None, running=12, waiting=4)
    with pytest.raises(ResourceExhausted, match="wait for a verifier"):
        lab.admission.check(9, None, running=18, waiting=10)
    lab.verifiers[0].full = False
    lab.admission.check(9, None, running=18, waiting=10)


async def test_a_call_that_would_be_late() -> None:
    """Over gRPC: the call's own deadline counts, the refusal carries RetryInfo, and who is there already goes on."""
    verifier = FakeVerifier()
    verifier.holding = True
    async with harness(verifier) as stack:
        first = stack.client.stream(token_ids=PROMPT, max_new_tokens=3)
        await until(lambda: bool(verifier.held))
        metrics = stack.router.metrics
        admission = stack.router.generations.admission
        for _ in range(3):
            metrics.itl.observe(1.0, 20)
            admission.tick()
        with pytest.raises(ResourceExhausted) as caught:
            await stack.client.generate(token_ids=PROMPT, max_new_tokens=100, timeout=20.0)
        assert caught.value.retry_after_s > 0
        assert metrics.shed == 1
        verifier.holding = False
        verifier.release()
        second = await stack.client.generate(token_ids=PROMPT, max_new_tokens=100)
        async for _ in first:
            pass
        assert list(first.result.token_ids) == plain(PROMPT, 3)
        assert list(second.token_ids) == plain(PROMPT, 100)


class Closed:
    """In the place of `Admission.check`: lets nobody in, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, tokens: int, remaining: float | None, *, running: int, waiting: int, samples: int = 1) -> None:
        self.asked.append((running, waiting))
        raise ResourceExhausted("too much to do")


@pytest.mark.parametrize("away", [False, True])
async def test_who_starts_anew_is_asked_whatever_it_says(away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has nothing of a generation that nobody knows, or that nobody can look up, asks for a new one:
    it is let in or not like any other. One that has something was let in before, and so was one whose record is
    there."""
    with EmbeddedRedis() as redis:
        verifier = FakeVerifier()
        async with harness(verifier, redis=redis) as stack, asking(stack.router) as ask:
            begun = await ask(max_new_tokens=200).read(5)
            begun.cancel()
            await until(lambda: not len(stack.router.generations))
            admission, closed = stack.router.generations.admission, Closed()
            monkeypatch.setattr(admission, "check", closed)
            if away:
                redis.stop()
            nothing = pb.Recollection(seed=5, samples=[pb.TokenIds()])
            for after, recollection in (([], None), ([0], nothing)):
                with pytest.raises(ResourceExhausted):
                    await ask(request_id=str(UUID(int=7)), after=after, recollection=recollection).read()
            assert closed.asked == [(0, 0), (0, 0)]
            known = plain(PROMPT, 200)
            some = pb.Recollection(seed=5, samples=[pb.TokenIds(ids=known[:3])])
            heard = await ask(request_id=str(UUID(int=8)), after=[3], recollection=some, max_new_tokens=200).read()
            assert heard.token_ids == known[3:]
            if not away:
                heard = await ask(after=[0], recollection=nothing, max_new_tokens=200).read()
                assert heard.token_ids == known
            assert len(closed.asked) == 2
