"""A session outlives its stream and its router: on any router it goes on at the token that its client names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest

from graftree.client import AsyncClient
from graftree.errors import AlreadyExists, InvalidArgument, LeaseLost, NotFound, Unavailable
from graftree.rpc.status import from_rpc
from graftree.sdk.options import SpeculationOptions, build_request
from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis
from graftree.text.tokenizer import Tokenizer
from graftree.v1 import generation_pb2 as pb
from graftree.v1 import generation_pb2_grpc
from graftree.v1.common_pb2 import TokenLogProb
from graftree.v1.verification_pb2 import Verdict, VerifyStep
from router.caller import Caller
from router.log_probs import pack, unpack
from router.pod import RouterPod
from tests.fakes import MODEL, FakeSpeculator, FakeVerifier, plain
from tests.router_harness import PROMPT, Harness, harness, until

IDENTIFIER = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"
TOKENIZER = Tokenizer.load(MODEL)


Ask = Callable[..., "Heard"]


class Heard:
    """One stream of Generate: what came, and how it ended."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.started: pb.GenerationStarted | None = None
        self.token_ids: list[int] = []
        self.offsets: list[int] = []
        self.text = ""
        self.log_probs: list[TokenLogProb] = []
        self.finished: pb.GenerationFinished | None = None

    async def read(self, count: int | None = None) -> Heard:
        """To the end, or until at least `count` tokens are here. Raises what the router raised."""
        try:
            while count is None or len(self.token_ids) < count:
                event = await self._call.read()
                if event is grpc.aio.EOF:
                    break
                self._take(event)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        return self

    def _take(self, event: pb.GenerateResponse) -> None:
        if event.HasField("started"):
            self.started = event.started
        elif event.HasField("finished"):
            self.finished = event.finished
        else:
            self.offsets.append(event.chunk.offset)
            self.token_ids += event.chunk.token_ids
            self.text += event.chunk.text
            self.log_probs += event.chunk.log_probs

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def asking(router: RouterPod) -> AsyncIterator[Any]:
    """A function that starts streams at a router."""
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        def ask(
            after: Sequence[int] | None = None, recollection: pb.Recollection | None = None, **options: Any
        ) -> Heard:
            options = {"token_ids": PROMPT, "max_new_tokens": 30, "request_id": IDENTIFIER, **options}
            request = build_request(None, options)  # type: ignore[arg-type]
            request.resume_after.extend(after or ())
            if recollection is not None:
                request.recollection.CopyFrom(recollection)
            return Heard(stub.Generate(request))

        yield ask


def telling(step: VerifyStep, verdict: Verdict) -> Verdict:
    """Log probabilities that depend on the position, with alternatives."""
    for index, each in enumerate(verdict.log_probs):
        position = step.committed_length + index
        each.log_prob, each.rank = -position / 7, position
        for other in range(position % 3):
            each.alternatives.add(token_id=other, log_prob=-other / 3)
    return verdict


@asynccontextmanager
async def two_routers(*pods: Any, redis: EmbeddedRedis | None = None) -> AsyncIterator[tuple[Harness, Ask, Ask]]:
    """Two routers over the same pods and Redis, and how each is asked."""
    async with (
        harness(*pods, redis=redis) as stack,
        stack.another() as other,
        asking(stack.router) as ask,
        asking(other) as ask_other,
    ):
        yield stack, ask, ask_other


async def test_another_router_goes_on_at_the_same_token() -> None:
    """A router dies in mid generation: the next one opens the session behind the last committed token, under the
    next epoch, and sends what its client lacks; all of it is what an undisturbed run says."""
    verifier = FakeVerifier()
    verifier.script = telling
    options = {"log_probs": True, "alternatives": 2, "temperature": 1.0}
    async with two_routers(verifier, FakeSpeculator()) as (stack, ask, ask_other):
        first = await ask(**options).read(12)
        await stack.router.kill()
        assert first.started is not None
        opened = len(verifier.opened)
        second = await ask_other(after=[5], **options).read()
        reference = await ask_other(request_id="", seed=first.started.seed, **options).read()
    assert first.token_ids[:5] + second.token_ids == plain(PROMPT, 30) == reference.token_ids
    assert second.offsets[0] == 5
    assert second.started is not None
    assert second.started.seed == first.started.seed
    opening = verifier.opened[opened]
    assert (opening.epoch, opening.prompt_tokens) == (2, 3)
    assert len(opening.token_ids) >= 3 + 12
    assert reference.text.endswith(second.text)
    assert second.log_probs == reference.log_probs[5:]
    assert second.finished is not None
    assert reference.finished is not None
    assert second.finished.usage == reference.finished.usage
    assert second.finished.reason == reference.finished.reason


async def test_replay_from_any_token() -> None:
    """A finished generation is told again by a router that never saw it, from each of its tokens on: text, log
    probabilities and end are what decoding token by token gives, a stop string that was held back included."""
    reference = plain(PROMPT, 12)
    text = TOKENIZER.decode(reference)
    stop = next(text[at : at + 3] for at in range(4, len(text)) if "\ufffd" not in text[at : at + 3])
    verifier = FakeVerifier()
    verifier.script = telling
    options: dict[str, Any] = {"stop": [stop], "log_probs": True, "alternatives": 2}
    async with two_routers(verifier, FakeSpeculator()) as (stack, ask, ask_other):
        slow = {**options, "speculation": SpeculationOptions(off=True), "request_id": ""}
        texts, tokens = list[str](), list[int]()
        async for chunk in stack.client.stream(token_ids=PROMPT, **slow):
            texts.append(chunk.text)
            tokens += chunk.token_ids
        assert len(texts) == len(tokens)
        whole = await ask(**options).read()
        assert whole.finished is not None
        opened = len(verifier.opened)
        for source in (ask, ask_other):
            for after in range(len(tokens) + 1):
                rest = await source(after=[after], **options).read()
                assert rest.token_ids == tokens[after:]
                assert rest.text == "".join(texts[after:])
                assert rest.log_probs == whole.log_probs[after:]
                assert rest.finished is not None
                assert rest.finished.stop_string == whole.finished.stop_string == stop
                assert rest.finished.usage == whole.finished.usage
        assert len(verifier.opened) == opened


async def test_a_running_generation_has_many_streams() -> None:
    """On its own router a resumed generation is joined: the old stream and the new one both go on."""
    verifier = FakeVerifier()
    async with harness(verifier, FakeSpeculator()) as stack, asking(stack.router) as ask:
        old = await ask().read(4)
        verifier.holding = True
        new = ask(after=[2])
        await until(lambda: stack.metrics.attached == 1)
        verifier.holding = False
        verifier.release()
        await asyncio.gather(old.read(), new.read())
        assert old.token_ids == plain(PROMPT, 30)
        assert new.token_ids == plain(PROMPT, 30)[2:]
        assert new.offsets[0] == 2
        assert len(verifier.opened) == 1


async def test_a_generation_that_another_router_serves() -> None:
    """Repeating its id alone is refused for as long as its lease lives; saying what one has takes it, and the stream
    that was left there ends with ABORTED, having said nothing wrong."""
    verifier = FakeVerifier()
    async with two_routers(verifier) as (stack, ask, ask_other):
        first = await ask(max_new_tokens=200).read(3)
        verifier.holding = True
        await verifier.until(lambda: bool(verifier.held))
        with pytest.raises(Unavailable, match="served by another router") as caught:
            await ask_other(max_new_tokens=200).read()
        assert 0 < caught.value.retry_after_s <= stack.router.config.lease_seconds
        second = ask_other(after=[len(first.token_ids)], max_new_tokens=200)
        await verifier.until(lambda: len(verifier.held) == 2)
        verifier.holding = False
        verifier.release()
        with pytest.raises(LeaseLost, match="epoch 2"):
            await first.read()
        await second.read()
    reference = plain(PROMPT, 200)
    assert first.token_ids == reference[: len(first.token_ids)]
    assert second.token_ids == reference[second.offsets[0] :]
    assert stack.metrics.errors["LEASE_LOST"] == 1


async def test_what_cannot_be_resumed() -> None:
    """An id that nobody knows, tokens that there are not, another request, and counts that do not fit: each names
    what is wrong, on the router that served the generation and on another one, and harms nothing."""
    async with two_routers(FakeVerifier()) as (_, ask, ask_other):
        for source in (ask, ask_other):
            with pytest.raises(NotFound, match=f"request_id = '{IDENTIFIER}'.*60 s"):
                await source(after=[0]).read()
        await ask().read()
        for source in (ask_other, ask):
            with pytest.raises(InvalidArgument, match="at most 30, the tokens there are") as caught:
                await source(after=[31]).read()
            assert (caught.value.field, caught.value.value) == ("resume_after[0]", "31")
            with pytest.raises(AlreadyExists, match=r"stopping\.max_new_tokens = 31, it began with 30"):
                await source(after=[3], max_new_tokens=31).read()
            with pytest.raises(AlreadyExists, match=r"prompt is another one of 3 tokens|token_ids\.ids = 2 values"):
                await source(after=[3], token_ids=[1, 2]).read()
            with pytest.raises(InvalidArgument, match="1 samples") as caught:
                await source(after=[3, 4]).read()
            assert caught.value.field == "resume_after"
            with pytest.raises(InvalidArgument) as caught:
                await source(after=[3], request_id="").read()
            assert caught.value.field == "request_id"
            assert (await source(after=[29]).read()).token_ids == plain(PROMPT, 30)[29:]


async def test_another_tenants_generation() -> None:
    """Under its own id another tenant's generation is as unknown as one that never was."""
    async with harness(FakeVerifier()) as stack:
        request = pb.GenerateRequest(request_id=IDENTIFIER, token_ids={"ids": PROMPT}, stopping={"max_new_tokens": 5})

        async def hear(caller: Caller, after: Sequence[int] = ()) -> list[pb.GenerateResponse]:
            message = pb.GenerateRequest(resume_after=after)
            message.MergeFrom(request)
            with stack.router.generations.start(message, caller).reading() as events:
                return [event async for event in events.follow(after)]

        assert len(await hear(Caller("a"))) > 2
        errors = []
        for caller in (Caller("b"), Caller()):
            with pytest.raises(NotFound) as caught:
                await hear(caller, [0])
            errors.append(str(caught.value))
        assert len(set(errors)) == 1
        assert len(await hear(Caller("a"), [5])) == 2


async def test_samples_are_resumed_each_for_itself() -> None:
    """With n samples each goes on behind its own count; one that had ended says only that it has."""
    verifier = FakeVerifier()
    options: dict[str, Any] = {"n": 2, "temperature": 1.0, "max_new_tokens": 20, "seed": 3}
    async with two_routers(verifier) as (_, ask, ask_other):
        first = await ask(**options).read(10)
        first.cancel()
        with pytest.raises(InvalidArgument, match=r"resume_after\[0\]"):
            await ask_other(after=[21, 0], **options).read()
        await ask_other(after=[0, 0], **options).read()
        rest = await ask_other(after=[20, 7], **options).read()
        assert rest.token_ids == plain(PROMPT, 20)[7:]
        assert rest.offsets[0] == 7
        assert rest.finished is not None
        assert rest.finished.total_usage.completion_tokens == 40


@pytest.mark.parametrize("trouble", ["restarted empty", "read only"])
async def test_after_an_outage(trouble: str) -> None:
    """Redis goes away in the middle of a generation, which goes on; once it is back the record is whole again, and
    another router can go on from any token that came meanwhile."""
    verifier = FakeVerifier()
    with EmbeddedRedis() as redis:
        async with two_routers(verifier, redis=redis) as (stack, ask, ask_other):
            first = await ask(max_new_tokens=200, log_probs=True).read(5)
            async with connect(redis.url) as admin:
                if trouble == "read only":
                    await admin.replicaof("127.0.0.1", 1)
                else:
                    redis.stop()
                committer = stack.router.committer
                await until(lambda: committer.degraded)
                await first.read(40)
                assert committer.unsaved_tokens > 0
                verifier.holding = True
                await verifier.until(lambda: bool(verifier.held))
                if trouble == "read only":
                    await admin.replicaof("NO", "ONE")
                else:
                    redis.start()
            await until(lambda: not committer.degraded and committer.unsaved_tokens == 0)
            await stack.router.kill()
            verifier.holding = False
            rest = await ask_other(after=[35], max_new_tokens=200, log_probs=True).read()
    assert first.token_ids == plain(PROMPT, 200)[: len(first.token_ids)]
    assert rest.token_ids == plain(PROMPT, 200)[35:]
    assert len(rest.log_probs) == 165


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 5}])
async def test_a_client_whose_generation_nobody_knows_any_more(options: dict[str, Any]) -> None:
    """Redis comes back empty after the router died: the client has the answer generated again and goes on in it."""
    with EmbeddedRedis() as redis:
        async with (
            harness(FakeVerifier(), FakeSpeculator(), redis=redis) as stack,
            stack.another() as other,
            AsyncClient([stack.router.address, other.address], rng=Random(0)) as client,
        ):
            stream = client.stream(token_ids=PROMPT, max_new_tokens=150, **options)
            tokens = list((await anext(stream)).token_ids)
            first, second = (stack.router, other) if len(stack.router.generations) else (other, stack.router)
            redis.stop()
            await first.kill()
            redis.start()
            tokens += [token async for chunk in stream for token in chunk.token_ids]
    assert tokens == plain(PROMPT, 150) == list(stream.result.token_ids)
    assert stream.result.usage.completion_tokens == 150
    assert second.metrics.errors["NOT_FOUND"] == 0  # it remembers its tokens
    assert stream.reconnects >= 1


async def test_records_expire() -> None:
    """A record outlives its last token by resume_seconds, and its end by replay_seconds."""
    verifier = FakeVerifier()
    async with harness(verifier, resume_seconds=500, replay_seconds=7) as stack, asking(stack.router) as ask:
        stream = await ask(log_probs=True).read(3)
        names = [f"graftree:v1:{{s:{IDENTIFIER}}}:{part}" for part in ("record", "tokens", "log_probs")]
        for name in names:
            assert 490 < await stack.router.redis.ttl(name) <= 500
        await stream.read()
        await until(lambda: stack.router.committer.sessions == 0)
        for name in names:
            assert 0 < await stack.router.redis.ttl(name) <= 7
        assert (await ask(log_probs=True, after=[1]).read()).token_ids == plain(PROMPT, 30)[1:]


@pytest.mark.parametrize("alternatives", [0, 1, 3])
def test_log_probabilities_of_a_record(alternatives: int) -> None:
    """They come back as they went in, with fewer alternatives than asked for, too; a damaged end costs that end."""
    tokens = [5, 6, 7]
    given = []
    for index, token in enumerate(tokens):
        each = TokenLogProb(token_id=token, log_prob=-0.1 * index, rank=index + 1)
        for other in range(min(index, alternatives)):
            each.alternatives.add(token_id=other, log_prob=-float(other))
        given.append(each)
    data = pack(given, alternatives)
    assert len(data) == 3 * (8 + 8 * alternatives)
    assert unpack(data, tokens, alternatives) == given
    assert unpack(data[:-1], tokens, alternatives) == given[:2]
