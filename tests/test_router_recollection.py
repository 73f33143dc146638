"""A client that remembers its tokens goes on where no record of them is left, or none can be reached."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from graftree.errors import ContextTooLong, GraftreeError, InvalidArgument, NotFound, Unavailable
from graftree.sdk.options import SpeculationOptions
from graftree.store.embedded import EmbeddedRedis
from graftree.store.sessions import SessionStore
from graftree.v1 import generation_pb2 as pb
from router.recollection import LONGEST, Recollection
from tests.fakes import FakeSpeculator, FakeVerifier, plain
from tests.router_harness import PROMPT, harness, until
from tests.test_router_resume import IDENTIFIER, Ask, Heard, asking, two_routers

KNOWN = plain(PROMPT, 200)


def recalling(ask: Ask, *samples: Sequence[int], **options: Any) -> Heard:
    """Ask for what lies behind the tokens of each sample that are here."""
    recollection = pb.Recollection(seed=5, samples=[pb.TokenIds(ids=each) for each in samples])
    return ask(after=[len(each) for each in samples], recollection=recollection, max_new_tokens=200, **options)


async def test_no_record_is_left() -> None:
    """What the client has is verified in a few long steps, its seed is in force, and only the rest is sent; the
    record is then as if nothing had happened."""
    verifier = FakeVerifier()
    async with harness(verifier, FakeSpeculator()) as stack, asking(stack.router) as ask:
        heard = await recalling(ask, KNOWN[:150], temperature=1.0).read()
        assert heard.token_ids == KNOWN[150:]
        assert heard.offsets[0] == 150
        assert heard.started is not None
        assert heard.started.seed == 5
        lengths = [step.committed_length - len(PROMPT) for step in verifier.steps]
        assert lengths[:3] == [0, LONGEST + 1, 2 * (LONGEST + 1)]
        record = await SessionStore(stack.router.redis, ttl_seconds=9).load(IDENTIFIER)
        assert record is not None
        assert (record.token_ids, record.seed, record.finished) == (tuple(KNOWN), 5, True)


async def test_samples_recall_each_for_itself() -> None:
    """Of two samples one may be far, the other not have begun."""
    async with harness(FakeVerifier()) as stack, asking(stack.router) as ask:
        heard = await recalling(ask, KNOWN[:90], [], temperature=1.0, n=2).read()
        assert sorted(heard.token_ids) == sorted(KNOWN[90:] + KNOWN)


async def test_plain_decoding_recalls_plainly() -> None:
    """A request without speculation computes what its client has token by token."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack, asking(stack.router) as ask:
        heard = await recalling(ask, KNOWN[:20], speculation=SpeculationOptions(off=True)).read()
        assert heard.token_ids == KNOWN[20:]
        assert not any(step.HasField("tree") for step in verifier.steps)


async def test_a_record_that_has_less() -> None:
    """Tokens came while Redis was away, and then their router died: the record is taken over all the same, from the
    router that holds its lease, and completed."""
    verifier = FakeVerifier()
    async with two_routers(verifier) as (stack, ask, ask_other):
        verifier.holding = True
        first = ask(max_new_tokens=200)
        await verifier.until(lambda: bool(verifier.held))
        heard = recalling(ask_other, KNOWN[:100])
        await until(lambda: len(verifier.held) == 2)
        verifier.holding = False
        verifier.release()
        assert (await heard.read()).token_ids == KNOWN[100:]
        with pytest.raises(GraftreeError, match="epoch 2"):
            await first.read()
        record = await SessionStore(stack.router.redis, ttl_seconds=9).load(IDENTIFIER)
        assert record is not None
        assert (record.token_ids, record.epoch) == (tuple(KNOWN), 2)


@pytest.mark.parametrize("back", ["empty", "with another's record"])
async def test_redis_is_away(back: str) -> None:
    """Nobody can tell what became of the generation: who remembers its tokens goes on at once, and the record is
    written when Redis is back; where that has another's, the client learns it as after any take-over."""
    verifier = FakeVerifier()
    with EmbeddedRedis() as redis:
        async with two_routers(verifier, redis=redis) as (stack, ask, ask_other):
            first = await ask(max_new_tokens=200).read(5)
            assert redis.pid is not None
            if back == "empty":
                redis.stop()
            else:
                os.kill(redis.pid, signal.SIGSTOP)
            await stack.router.kill()
            with pytest.raises(Unavailable):
                await ask_other(after=[5], max_new_tokens=200).read()
            second = await recalling(ask_other, first.token_ids).read(60)
            verifier.holding = True
            await verifier.until(lambda: bool(verifier.held))
            if back == "empty":
                redis.start()
            else:
                os.kill(redis.pid, signal.SIGCONT)
            verifier.holding = False
            verifier.release()
            if back == "empty":
                await second.read()
            else:
                with pytest.raises(GraftreeError, match="belongs to epoch"):
                    await second.read()
                tokens = first.token_ids + second.token_ids
                second.token_ids += (await recalling(ask_other, tokens).read()).token_ids
    assert first.token_ids + second.token_ids == KNOWN


@pytest.mark.parametrize("have", [0, 10])
async def test_redis_stalls_and_the_same_router_is_asked(have: int) -> None:
    """The generation begins again without its record, which has more of its tokens already: they are not written
    twice, and no commit fails."""
    verifier = FakeVerifier()
    with EmbeddedRedis() as redis:
        async with harness(verifier, redis=redis) as stack, asking(stack.router) as ask:
            first = await ask(max_new_tokens=200).read(29)
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGSTOP)
            first.cancel()
            verifier.holding = True
            second = recalling(ask, KNOWN[:have])
            await until(lambda: len(verifier.opened) == 2 and bool(verifier.held))
            os.kill(redis.pid, signal.SIGCONT)
            await until(lambda: not stack.router.committer.degraded)
            verifier.holding = False
            verifier.release()
            assert (await second.read()).token_ids == KNOWN[have:]
            assert stack.metrics.commit_failures == 0
            record = await SessionStore(stack.router.redis, ttl_seconds=9).load(IDENTIFIER)
            assert record is not None
            assert (record.token_ids, record.epoch, record.finished) == (tuple(KNOWN), 1, True)
            assert len({opening.session_id for opening in verifier.opened}) == 2


@pytest.mark.parametrize("where", [0, 99])
async def test_tokens_that_are_not_the_models(where: int) -> None:
    """They end the request with an error that names the first, and what the model says there; none of them is
    committed."""
    wrong = [*KNOWN[:where], (KNOWN[where] + 1) % 512, *KNOWN[where + 1 : 120]]
    async with harness(FakeVerifier()) as stack, asking(stack.router) as ask:
        heard = recalling(ask, wrong)
        with pytest.raises(InvalidArgument) as caught:
            await heard.read()
        assert caught.value.field == f"recollection.samples[0].ids[{where}]"
        assert f"= {wrong[where]}: {KNOWN[where]}, as the model says there" in str(caught.value)
        assert heard.token_ids == []
        record = await SessionStore(stack.router.redis, ttl_seconds=9).load(IDENTIFIER)
        assert record is not None
        assert record.token_ids == tuple(KNOWN[: len(record.token_ids)])
        assert len(record.token_ids) <= where


async def test_tokens_behind_the_end() -> None:
    """A client that has more than there are is told where the answer ends; more than it asked for is refused before
    anything is computed."""
    verifier = FakeVerifier()
    async with harness(verifier, default_max_new_tokens=20) as stack, asking(stack.router) as ask:
        with pytest.raises(InvalidArgument, match=r"'210 tokens': at most stopping\.max_new_tokens, 200") as caught:
            await recalling(ask, KNOWN[:9], plain(PROMPT, 210), temperature=1.0, n=2).read()
        assert caught.value.field == "recollection.samples[1].ids"
        assert not verifier.opened
        recollection = pb.Recollection(seed=5, samples=[pb.TokenIds(ids=KNOWN[:30])])
        with pytest.raises(InvalidArgument, match="'30 tokens': at most 20: the answer ends there") as caught:
            await ask(after=[30], recollection=recollection, max_new_tokens=None).read()
        assert caught.value.field == "recollection.samples[0].ids"


async def test_a_verifier_without_room() -> None:
    """One that cannot take so long a branch gets one as long as usual trees."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack, asking(stack.router) as ask:
        openings: list[int] = []

        def refuse_wide(opening: Any, outbox: Any) -> None:
            openings.append(opening.max_nodes)
            verifier.refuse = ContextTooLong("max_length", 1, "less") if opening.max_nodes > 16 else None
            FakeVerifier._open(verifier, opening, outbox)

        verifier._open = refuse_wide  # type: ignore[method-assign]
        heard = await recalling(ask, KNOWN[:100]).read()
        assert heard.token_ids == KNOWN[100:]
        assert openings == [LONGEST, 16]


async def test_what_cannot_be_recalled() -> None:
    """Counts that do not fit and tokens outside the vocabulary name what is wrong; a mode whose tokens depend on
    the speculators recalls nothing."""
    async with harness(FakeVerifier()) as stack, asking(stack.router) as ask:
        one = pb.Recollection(samples=[pb.TokenIds(ids=[1])])
        for after in ([], [2]):
            with pytest.raises(InvalidArgument) as caught:
                await ask(after=after, recollection=one).read()
            assert caught.value.field == "recollection.samples"
        with pytest.raises(InvalidArgument, match="vocabulary size 512") as caught:
            await recalling(ask, [7, 512]).read()
        assert caught.value.field == "recollection.samples[0].ids"
        with pytest.raises(NotFound):
            await recalling(ask, KNOWN[:9], temperature=1.0, speculation=SpeculationOptions(mode="mss")).read()


def test_branches() -> None:
    """As long as the step, the answer's limit and what is known allow; none where nothing is known or wanted."""
    known = Recollection(range(1, 101), usual=16)
    cut = known.cut(9, 0, 500)
    assert cut is not None
    assert (cut.tree.root_id, cut.tree.token_ids) == (9, tuple(range(1, LONGEST + 1)))
    assert cut.tree.parents == tuple(range(-1, LONGEST - 1))
    cut.tree.validate(vocab_size=512)
    assert [known.rest(length) for length in (0, 90, 100, 300)] == [LONGEST, 10, 0, 0]
    short = known.cut(9, 95, 3)
    assert short is not None
    assert short.tree.token_ids == (96, 97, 98)
    assert known.cut(9, 100, 500) is None
    assert known.cut(9, 0, 0) is None
    assert Recollection(range(5), usual=0).cut(9, 0, 500) is None
