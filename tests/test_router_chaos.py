"""Everything at once, by the dice: whatever pods do, the tokens are plain decoding's and nothing is left behind."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from graftree.errors import NotFound, ResourceExhausted, Unavailable
from graftree.rpc.status import to_failure
from graftree.v1.speculation_pb2 import TreeDelta
from graftree.v1.verification_pb2 import Verdict, VerifyStep
from tests.fakes import VOCAB, FakeSpeculator, FakeVerifier, chain, plain, wrong
from tests.router_harness import harness, until


def troubled_verifier(dice: Random, rate: float) -> Any:
    """A script that now and then fails the session, says nothing, disagrees or lies."""

    def script(step: VerifyStep, verdict: Verdict) -> Any:
        if dice.random() > rate:
            return verdict
        match dice.randrange(6):
            case 0:
                return to_failure(step.session_id, Unavailable("x"))
            case 1:
                return to_failure(step.session_id, NotFound("x"))
            case 2:
                return to_failure(step.session_id, ResourceExhausted("x"))
            case 3:
                return None
            case 4:
                return Verdict(session_id=step.session_id, step=step.step, stale=True)
            case _:
                verdict.token_ids[0] = VOCAB
                return verdict

    return script


def troubled_speculator(dice: Random, rate: float) -> Any:
    """A script that now and then fails the session, says nothing, or sends garbage, old or foreign deltas."""
    old: list[TreeDelta] = []

    def script(delta: TreeDelta) -> Any:
        old.append(delta)
        if dice.random() > rate:
            return delta
        match dice.randrange(5):
            case 0:
                return to_failure(delta.session_id, Unavailable("x"))
            case 1:
                return None
            case 2:
                return TreeDelta(session_id=delta.session_id, parent_ids=[1], token_ids=[VOCAB], log_probs=[0.0])
            case 3:
                return dice.choice(old)
            case _:
                return TreeDelta(
                    session_id=delta.session_id, parent_ids=[5, 6], token_ids=[1, 2], log_probs=[-1.0] * 2
                )

    return script


@pytest.mark.parametrize("seed", range(4))
async def test_chaos(seed: int) -> None:
    """Sixteen requests, some cancelled, over three troubled verifiers and three troubled speculators."""
    dice = Random(seed)
    verifiers = [FakeVerifier(f"v{index}") for index in range(3)]
    speculators = [
        FakeSpeculator("s0", "right", chain(4)),
        FakeSpeculator("s1", "wrong", wrong(4)),
        FakeSpeculator("s2", "mixed", lambda tokens: wrong(2)(tokens) + chain(2)(tokens)),
    ]
    for verifier in verifiers:
        verifier.script = troubled_verifier(dice, 0.03)
    for speculator in speculators:
        speculator.script = troubled_speculator(dice, 0.05)
    async with harness(
        *verifiers,
        *speculators,
        random=Random(seed),
        quarantine_seconds=0.01,
        step_timeout_seconds=0.1,
        connect_timeout_seconds=10,
    ) as stack:

        async def one(index: int, leave_after: int) -> None:
            prompt = [index, seed]
            seen: list[int] = []
            async with stack.client.stream(token_ids=prompt, max_new_tokens=50) as stream:
                async for chunk in stream:
                    seen += chunk.token_ids
                    if len(seen) > leave_after:
                        break
            assert seen == plain(prompt, 50)[: len(seen)]
            assert len(seen) == 50 or len(seen) > leave_after

        await asyncio.gather(*(one(index, dice.choice([10, 999, 999])) for index in range(16)))
        await until(lambda: not len(stack.router.generations))
        await until(lambda: not any(pod.sessions for pod in [*verifiers, *speculators]))
        assert stack.metrics.failovers > 0
        assert stack.metrics.quarantines > 0
        assert stack.metrics.failed == stack.metrics.cancelled
