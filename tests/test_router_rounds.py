"""The round loop over fake pods: what comes out is plain decoding, whatever the speculators do."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import FakeSpeculator, FakeVerifier, chain, plain, wrong
from tests.router_harness import PROMPT, harness


async def test_plain_decoding() -> None:
    """Without speculators one step makes one token, and the tokens are the LLM's."""
    verifier = FakeVerifier()
    async with harness(verifier) as stack:
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=9)
    assert list(result.token_ids) == plain(PROMPT, 9)
    assert result.speculation.num_spec_steps == 9
    assert result.speculation.num_draft_tokens == 0
    assert result.speculation.mean_acceptance_length == 1
    assert all(not step.tree.token_ids for step in verifier.steps)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    "speculators",
    [
        [("chain", chain(4))],
        [("wrong", wrong(3))],
        [("chain", chain(3)), ("wrong", wrong(5)), ("short", chain(1))],
    ],
    ids=["right", "wrong", "merged"],
)
async def test_speculation_changes_no_token(speculators: list, adaptive: bool) -> None:
    """Right, wrong and merged speculators give the tokens of plain decoding, and usage counts what was delivered."""
    pods = [FakeSpeculator(f"s{index}", kind, draft) for index, (kind, draft) in enumerate(speculators)]
    async with harness(FakeVerifier(), *pods, adaptive=adaptive) as stack:
        result = await stack.client.generate(token_ids=PROMPT, max_new_tokens=40)
    assert list(result.token_ids) == plain(PROMPT, 40)
    figures = result.speculation
    assert adaptive or figures.num_draft_tokens > 0
    assert figures.num_speculators == len(pods)
    assert sum(k * n for k, n in enumerate(figures.acceptance_histogram)) == figures.num_accepted_tokens
    assert sum(figures.acceptance_histogram) == figures.num_spec_steps
    assert adaptive or (figures.num_accepted_tokens > 0) == (pods[0].kind == "chain")


async def test_many_sessions_share_messages() -> None:
    """Sixteen requests at once give what each gives alone, over one stream per pod."""
    verifier, speculator = FakeVerifier(), FakeSpeculator()
    async with harness(verifier, speculator) as stack:
        results = await asyncio.gather(
            *(stack.client.generate(token_ids=[seed, 7], max_new_tokens=20) for seed in range(16))
        )
    for seed, result in enumerate(results):
        assert list(result.token_ids) == plain([seed, 7], 20)
    assert verifier.streams == speculator.streams == 1
    assert verifier.max_batch > 1
