"""Pods that vanish, hang, lie or send garbage: the answer stays plain decoding's, and only they suffer for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from graftree.config import RouterConfig
from graftree.errors import ContextTooLong, GraftreeError, NotFound, NoVerifier, ResourceExhausted, Unavailable
from graftree.rpc.status import to_failure
from graftree.v1.common_pb2 import PodLoad
from graftree.v1.speculation_pb2 import TreeDelta
from graftree.v1.verification_pb2 import Verdict, VerifyStep
from router.metrics import Metrics
from router.pods import Pods
from tests.fakes import MODEL, VOCAB, FakeSpeculator, FakeVerifier, chain, plain
from tests.router_harness import PROMPT, Harness, harness, until

QUICK = {"quarantine_seconds": 0.01}


def at_step(number: int, action: Callable[[VerifyStep, Verdict], Any]) -> Callable[[VerifyStep, Verdict], Any]:
    """A verifier's script that does `action` once, with its `number`-th step."""
    seen = 0

    def script(step: VerifyStep, verdict: Verdict) -> Any:
        nonlocal seen
        seen += 1
        return action(step, verdict) if seen == number else verdict

    return script


async def check(stack: Harness, count: int = 40) -> Any:
    """One request whose tokens must be plain decoding's."""
    result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=count)
    assert list(result.token_ids) == plain(PROMPT, count)
    assert result.usage.completion_tokens == count
    return result


async def test_verifier_killed_mid_request() -> None:
    """The session goes on at the same token on another verifier, and speculators do not notice."""
    verifiers, speculator = [FakeVerifier("v0"), FakeVerifier("v1")], FakeSpeculator()
    async with harness(*verifiers, speculator) as stack:
        killing = []

        def kill(step: VerifyStep, verdict: Verdict) -> None:
            killing.append(asyncio.create_task(stack.remove(verifiers[0])))

        verifiers[0].script = at_step(3, kill)
        await check(stack)
        await asyncio.gather(*killing)
        assert stack.metrics.failovers == 1
        assert [opening.prompt_tokens for opening in verifiers[1].opened] == [len(PROMPT)]
        assert len(verifiers[1].opened[0].token_ids) > len(PROMPT)
        assert len(speculator.opened) == 1


async def test_only_verifier_replaced() -> None:
    """With no verifier left the session waits, and goes on when a new one registers."""
    first, second = FakeVerifier("v0"), FakeVerifier("v1")
    async with harness(first, connect_timeout_seconds=10) as stack:
        moving = []

        async def move() -> None:
            await stack.remove(first)
            await stack.add(second)

        def kill(step: VerifyStep, verdict: Verdict) -> None:
            moving.append(asyncio.create_task(move()))

        first.script = at_step(5, kill)
        await check(stack)
        await asyncio.gather(*moving)
        await second.stop()


@pytest.mark.parametrize("error", [Unavailable("x"), NotFound("x"), ResourceExhausted("x"), Unavailable("draining")])
async def test_session_failed_by_its_verifier(error: GraftreeError) -> None:
    """UNAVAILABLE, NOT_FOUND and RESOURCE_EXHAUSTED in mid run mean: try elsewhere."""
    verifiers = [FakeVerifier("v0"), FakeVerifier("v1")]
    verifiers[0].script = at_step(4, lambda step, verdict: to_failure(step.session_id, error))
    async with harness(*verifiers) as stack:
        await check(stack, 12)
        assert stack.metrics.failovers == 1
        assert stack.metrics.quarantines == 0


async def test_the_only_verifier_is_asked_again() -> None:
    """Where there is no other verifier, the one that failed the session is tried again."""
    verifier = FakeVerifier()
    verifier.script = at_step(4, lambda step, verdict: to_failure(step.session_id, NotFound("x")))
    async with harness(verifier) as stack:
        await check(stack, 12)
        assert len(verifier.opened) == 2
        assert len({opening.session_id for opening in verifier.opened}) == 2


async def test_a_refusal_for_good_ends_the_request() -> None:
    """What trying again cannot mend reaches the client as it is."""
    verifier = FakeVerifier()
    verifier.refuse = ContextTooLong("max_length", 9, "8")
    async with harness(verifier) as stack:
        with pytest.raises(ContextTooLong):
            await stack.client.generate(token_ids=PROMPT, max_new_tokens=4)
        assert len(verifier.opened) == 1


async def test_tries_are_bounded() -> None:
    """A verifier that is always full ends in RESOURCE_EXHAUSTED, not in an endless loop."""
    verifier = FakeVerifier()
    verifier.refuse = ResourceExhausted("no KV blocks")
    async with harness(verifier) as stack:
        with pytest.raises(ResourceExhausted, match="no KV blocks"):
            await stack.client.generate(token_ids=PROMPT, max_new_tokens=4)
        assert len(verifier.opened) == 8


async def test_no_verifier() -> None:
    """Without a verifier a request is answered UNAVAILABLE within the connect timeout, and says who is there."""
    verifier = FakeVerifier()
    async with harness(verifier, connect_timeout_seconds=0.1) as stack:
        await stack.remove(verifier)
        with pytest.raises(NoVerifier, match="no verifier takes sessions"):
            await stack.client.generate(token_ids=PROMPT, max_new_tokens=4)


async def test_full_and_draining_verifiers_are_passed_over() -> None:
    """Sessions go to verifiers that take them; when all are full the answer is RESOURCE_EXHAUSTED."""
    full, draining, free = (FakeVerifier(name) for name in ("v0", "v1", "v2"))
    full.load = PodLoad(sessions=5, max_sessions=5)
    draining.load = PodLoad(draining=True)
    async with harness(full, draining, free, connect_timeout_seconds=0.1) as stack:
        for pod in (full, draining):
            pod.push(pod.load)
        while stack.states()["v1"] != "draining":
            await stack.router.pods.changed(stack.router.pods.version)
        await check(stack, 5)
        assert [len(pod.opened) for pod in (full, draining, free)] == [0, 0, 1]
        await stack.remove(free)
        with pytest.raises(ResourceExhausted):
            await stack.client.generate(token_ids=PROMPT, max_new_tokens=4)


async def test_verifier_that_hangs() -> None:
    """No verdict within the step timeout: the session moves on."""
    verifiers = [FakeVerifier("v0"), FakeVerifier("v1")]
    verifiers[0].script = at_step(3, lambda step, verdict: None)
    async with harness(*verifiers, step_timeout_seconds=0.1) as stack:
        await check(stack, 12)
        assert stack.metrics.failovers == 1
        assert [opening.session_id for opening in verifiers[0].opened] == verifiers[0].closed


async def test_stale_verdict_opens_again() -> None:
    """A verifier that disagrees about the committed length is asked anew with all tokens."""
    verifier = FakeVerifier()
    stale = at_step(3, lambda step, v: Verdict(session_id=v.session_id, step=v.step, stale=True))
    verifier.script = stale
    async with harness(verifier) as stack:
        await check(stack, 12)
        assert stack.metrics.stale_steps == 1


async def test_tree_refused_by_the_verifier() -> None:
    """A step that ran without its tree counts no draft tokens."""
    verifier = FakeVerifier()

    def refuse(step: VerifyStep, verdict: Verdict) -> Verdict:
        answer = Verdict(session_id=verdict.session_id, step=verdict.step, token_ids=verdict.token_ids[:1])
        answer.tree_error = "too deep"
        session = verifier.sessions[step.session_id]
        del session.token_ids[len(session.token_ids) - len(verdict.token_ids) + 1 :]
        return answer

    verifier.script = refuse
    async with harness(verifier, FakeSpeculator()) as stack:
        result = await check(stack, 12)
        assert result.speculation.num_draft_tokens == 0
        assert stack.metrics.refused_trees == 12


def _lie(change: Callable[[Verdict], object]) -> Callable[[VerifyStep, Verdict], Verdict]:
    def action(step: VerifyStep, verdict: Verdict) -> Verdict:
        change(verdict)
        return verdict

    return action


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.accepted_nodes.append(0),
        lambda v: v.ClearField("token_ids"),
        lambda v: v.token_ids.__setitem__(0, VOCAB),
        lambda v: (v.accepted_nodes.append(99), v.token_ids.append(1)),
        lambda v: (v.accepted_nodes.__setitem__(slice(None), [1]), v.token_ids.__setitem__(slice(None), [1, 2])),
    ],
    ids=["lengths", "empty", "vocabulary", "node", "path"],
)
async def test_impossible_verdict_quarantines_the_verifier(change: Callable[[Verdict], object]) -> None:
    """A verdict that does not follow from the tree is not believed: the verifier rests, the session moves."""
    verifiers, speculator = [FakeVerifier("v0"), FakeVerifier("v1")], FakeSpeculator()
    verifiers[0].script = at_step(3, _lie(change))
    async with harness(*verifiers, speculator) as stack:
        await check(stack)
        assert stack.metrics.quarantines == 1
        assert stack.states()["v0"] == "quarantined"
        assert len(verifiers[1].opened) == 1


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda v: setattr(v.timings, "queue_ns", 2**64 - 1),
        lambda v: setattr(v.timings, "forward_ns", 2**63 - 1),
        lambda v: setattr(v.timings, "sample_ns", 2**63),
        lambda v: setattr(v.timings, "total_ns", 3600 * 10**9 + 1),
        lambda v: setattr(v, "batch_sessions", 101),
    ],
    ids=["queue", "forward", "sample", "total", "sessions"],
)
async def test_figures_that_no_step_can_have_quarantine_the_verifier(
    change: Callable[[Verdict], object], stale: bool
) -> None:
    """Over an hour, or more sessions than the verifier takes: the session is served by another one."""

    def lie(verdict: Verdict) -> None:
        change(verdict)
        if stale:
            verdict.stale = True
            verdict.ClearField("token_ids")

    verifiers = [FakeVerifier("v0"), FakeVerifier("v1")]
    verifiers[0].script = at_step(3, _lie(lie))
    async with harness(*verifiers, FakeSpeculator()) as stack:
        await check(stack)
        assert stack.metrics.quarantines == 1
        assert stack.states()["v0"] == "quarantined"
        assert len(verifiers[1].opened) == 1


async def test_the_largest_figures_of_a_step_add_up() -> None:
    """An hour in each of many steps, and as many sessions as the verifier takes, are believed."""

    def slow(step: VerifyStep, verdict: Verdict) -> Verdict:
        timings = verdict.timings
        timings.queue_ns = timings.forward_ns = timings.sample_ns = timings.total_ns = 3600 * 10**9
        verdict.batch_sessions = 100
        return verdict

    verifier = FakeVerifier()
    verifier.script = slow
    async with harness(verifier, FakeSpeculator()) as stack:
        result = await check(stack)
        assert stack.metrics.quarantines == 0
        assert result.timings.verify_total_ns == len(verifier.steps) * 3600 * 10**9


def _garbage(kind: str, delta: TreeDelta) -> TreeDelta:
    match kind:
        case "lengths":
            delta.log_probs.append(-1.0)
        case "vocabulary":
            delta.token_ids[0] = VOCAB
        case "nan":
            delta.log_probs[0] = math.nan
        case "positive":
            delta.log_probs[0] = 2.0
        case "siblings":
            delta.MergeFrom(
                TreeDelta(parent_ids=delta.parent_ids, token_ids=delta.token_ids, log_probs=delta.log_probs)
            )
        case "too many":
            root = delta.parent_ids[0]
            extra = range(VOCAB - 200, VOCAB)
            delta.MergeFrom(TreeDelta(parent_ids=[root] * 200, token_ids=extra, log_probs=[-9.0] * 200))
    return delta


@pytest.mark.parametrize("kind", ["lengths", "vocabulary", "nan", "positive", "siblings", "too many"])
async def test_garbage_quarantines_one_speculator(kind: str) -> None:
    """Garbage on one stream: its pod rests and is tried again; the session, the others and the loop go on."""
    bad, good = FakeSpeculator("bad", "bad"), FakeSpeculator("good", "good", chain(2))
    left = 1

    def script(delta: TreeDelta) -> TreeDelta:
        nonlocal left
        if len(bad.commits) < 3 or not left:
            return delta
        left -= 1
        return _garbage(kind, delta)

    bad.script = script
    async with harness(FakeVerifier(), bad, good, **QUICK) as stack:
        await check(stack, 60)
        assert stack.metrics.quarantines == 1
        assert len(good.opened) == 1
        await stack.settled(bad)
        while stack.states()["bad"] != "ready":
            await stack.router.pods.changed(stack.router.pods.version)
        assert bad.streams == 2
        await check(stack, 10)
        assert bad.opened[-1].prompt_tokens == len(PROMPT)


async def test_unknown_and_late_messages_are_counted() -> None:
    """Deltas and verdicts of sessions nobody knows change nothing."""
    verifier, speculator = FakeVerifier(), FakeSpeculator()
    async with harness(verifier, speculator) as stack:
        speculator.push(TreeDelta(session_id="nobody", token_ids=[1 << 31]))
        verifier.push(Verdict(session_id="nobody", step=1))
        await check(stack, 10)
        assert stack.metrics.late_deltas == 1
        assert stack.metrics.late_verdicts == 1
        assert stack.metrics.quarantines == 0


async def test_speculator_killed_and_added_mid_request() -> None:
    """A session goes on without a speculator that vanished, and takes in one that joins."""
    verifier, first, second = FakeVerifier(), FakeSpeculator("s0", "a"), FakeSpeculator("s1", "b")
    async with harness(verifier, first) as stack:
        jobs = []

        async def swap() -> None:
            await stack.remove(first)
            await stack.add(second)

        verifier.script = at_step(3, lambda step, v: jobs.append(asyncio.create_task(swap())) or v)
        chunks = 0
        async with stack.client.stream(token_ids=PROMPT, max_new_tokens=200) as stream:
            async for _ in stream:
                chunks += 1
                if jobs and chunks < 20:
                    await asyncio.sleep(0)
                if chunks == 4:
                    await jobs[0]
            assert list(stream.result.token_ids) == plain(PROMPT, 200)
        await second.stop()


async def test_speculator_that_cannot_serve_a_session() -> None:
    """A speculator that keeps failing a session is asked a bounded number of times, and the answer is plain."""
    speculator = FakeSpeculator()
    speculator.script = lambda delta: to_failure(delta.session_id, NotFound("x"))
    async with harness(FakeVerifier(), speculator) as stack:
        await check(stack, 20)
        assert 1 <= len(speculator.opened) <= 3
        assert stack.metrics.lost_speculators == len(speculator.opened)


async def test_speculator_with_a_short_context() -> None:
    """A session longer than the speculator's context decodes without it."""
    speculator = FakeSpeculator()
    speculator.hello.max_context = 4
    async with harness(FakeVerifier(), speculator) as stack:
        result = await stack.client.generate(token_ids=[1, 2, 3, 4], max_new_tokens=5)
        assert list(result.token_ids) == plain([1, 2, 3, 4], 5)
        assert not speculator.opened


async def test_wrong_vocabulary_is_refused_with_the_reason() -> None:
    """A pod whose hello has another vocabulary or revision is refused; GetModelInfo says why."""
    stranger, old = FakeSpeculator("stranger"), FakeSpeculator("old", "old")
    stranger.hello.vocab_fingerprint = "other"
    record = stranger.record
    stranger.record = lambda: record().__class__(**{**record().__dict__, "vocab_fingerprint": ""})  # type: ignore[method-assign]
    old.hello.revision = 7
    async with harness(FakeVerifier(), stranger, old) as stack:
        states = {pod.pod_id: pod.state for pod in (await stack.client.model_info()).pods}
        assert states["stranger"].startswith("refused: speculator stranger has vocabulary other")
        assert states["old"].startswith("refused")
        assert "revision 7" in states["old"]
        await check(stack, 5)


async def test_pod_that_never_says_hello() -> None:
    """A silent pod stays out, and holds nobody up."""
    silent = FakeSpeculator("silent")
    silent.silent = True
    async with harness(FakeVerifier(), connect_timeout_seconds=0.05) as stack:
        adding = asyncio.create_task(stack.add(silent))
        await check(stack, 10)
        await until(lambda: bool(silent.address))  # a server that is still starting cannot be stopped
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        await silent.stop()


async def test_an_error_in_the_place_of_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails by itself while it is cancelled says that it failed: its link ends all the same."""

    async def fails(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Unavailable("the server is gone") from None

    async with harness(FakeVerifier("v")) as stack:
        monkeypatch.setattr(Pods, "_serve", fails)
        config = RouterConfig(model=MODEL)
        pods = Pods(stack.router.registry, config, vocab_fingerprint="", metrics=Metrics(), random=Random(0))
        watching = asyncio.create_task(pods.watch())
        await until(lambda: bool(pods.infos()))
        await asyncio.sleep(0)  # the link's task begins
        watching.cancel()
        async with asyncio.timeout(5):
            await pods.close()
