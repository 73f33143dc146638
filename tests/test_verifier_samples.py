"""Sessions that take their prompt's rows from a sibling; processed log probabilities; padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graftree.models.load import load
from graftree.models.runner import Rows, TreeRunner
from graftree.sampling import SamplingContext, SamplingParams, describe, process
from graftree.v1 import common_pb2
from tests.verifier_harness import LLAMA, Client, Router, chain, make_engine, plain, reference_model
from verifier_service.engine import Engine

PROMPT = [(7 * i + 3) % 512 for i in range(60)]
HOT = SamplingParams(temperature=1.0, seed=5)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed)


def finish(router: Router, clients: Sequence[Client], count: int) -> list[list[int]]:
    """`count` tokens of each, all of them stepping together."""
    lengths = [len(client.token_ids) for client in clients]
    for _ in range(count):
        for client in clients:
            client.send()
        router.run()
        for client in clients:
            client.take()
    return [client.token_ids[length:] for client, length in zip(clients, lengths, strict=True)]


@pytest.mark.parametrize("step_tokens", [7, 64, 512])
@pytest.mark.parametrize("early", [True, False])
def test_the_prompts_rows_are_computed_once(step_tokens: int, early: bool) -> None:
    """Three samples: one prefill whatever its chunks, and each says what it says alone; whether they open before
    the first one's prefill or behind it."""
    engine = make_engine(step_tokens=step_tokens)
    router = Router(engine)
    clients = [router.open("0", PROMPT, params=sampled(10))]
    if not early:
        router.run()
    clients += [router.open(str(i), PROMPT, params=sampled(10 + i), prefix_of="0") for i in (1, 2)]
    outputs = finish(router, clients, 6)
    assert outputs == [plain(PROMPT, 6, sampled(10 + i)) for i in range(3)]
    assert engine.counters.prefill_rows == len(PROMPT) - 1
    assert engine.counters.shared_rows + engine.counters.prefix_cache_hits == 2 * (len(PROMPT) - 1)


@pytest.mark.parametrize("prefilled", [0, 1, 3])
def test_a_sibling_that_leaves_early(prefilled: int) -> None:
    """What it had computed is taken, the rest is computed; no block is lost."""
    engine = make_engine(step_tokens=16)
    router = Router(engine)
    router.open("0", PROMPT, params=HOT)
    other = router.open("1", PROMPT, params=HOT, prefix_of="0")
    for _ in range(prefilled):
        engine.iterate()
    engine.close(router.stream, "0")
    assert other.generate(5) == plain(PROMPT, 5, HOT)
    assert engine.counters.shared_rows == 16 * prefilled
    assert engine.counters.prefill_rows == len(PROMPT) - 1
    engine.close(router.stream, "1")
    assert engine.load().free_blocks == engine.load().total_blocks


def test_texts_that_differ_share_their_beginning() -> None:
    """Only what both have in common is taken, also where one begins the other; an unknown name has no effect."""
    engine = make_engine()
    router = Router(engine)
    first = router.open("0", PROMPT, params=HOT)
    first.generate(4)
    texts = [[*PROMPT[:20], 1, 2, 3], PROMPT[:30], [9, *PROMPT], [*first.token_ids[:-1], 8, 8]]
    for index, text in enumerate(texts):
        other = router.open(f"other {index}", text, params=HOT, prefix_of="0")
        assert other.generate(4) == plain(text, 4, HOT)
    taken = engine.counters.shared_rows + engine.counters.prefix_cache_hits
    assert taken == 20 + 29 + 0 + len(PROMPT) + 3
    alone = router.open("alone", PROMPT, params=HOT, prefix_of="nobody")
    assert alone.generate(4) == plain(PROMPT, 4, HOT)


def test_a_waiting_session_can_be_closed() -> None:
    """A sample that is cancelled while it waits leaves nothing behind."""
    engine = make_engine(step_tokens=16)
    router = Router(engine)
    first = router.open("0", PROMPT, params=HOT)
    router.open("1", PROMPT, params=HOT, prefix_of="0")
    engine.iterate()
    engine.close(router.stream, "1")
    assert first.generate(3) == plain(PROMPT, 3, HOT)
    engine.close(router.stream, "0")
    assert engine.load().free_blocks == engine.load().total_blocks


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.7, seed=3, top_k=20, top_p=0.9, presence_penalty=1.0),
    ],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("processed", [False, True])
def test_log_probs_of_both_distributions(params: SamplingParams, processed: bool) -> None:
    """Inside a run of five, each token's log probability, rank and alternatives are those of a plain forward over all
    that came before it, raw or processed as asked."""
    mode = common_pb2.LOG_PROBS_MODE_PROCESSED if processed else common_pb2.LOG_PROBS_MODE_RAW
    router = Router(make_engine())
    fields: dict[str, Any] = {"log_probs": True, "alternatives": 4, "log_probs_mode": mode}
    expected = plain(PROMPT, 5, params)
    client = router.open("0", PROMPT, params=params, **fields)
    verdict = client.verify(chain(client.root, expected[:4]))
    assert list(verdict.token_ids) == expected
    model = reference_model()
    with torch.inference_mode():
        rows = model(torch.tensor([PROMPT + expected[:-1]]), use_cache=False).logits[0, len(PROMPT) - 1 :].numpy()
    for index, (row, got) in enumerate(zip(rows, verdict.log_probs, strict=True)):
        context = SamplingContext(PROMPT, expected[:index], vocab_size=len(row))
        scores = process(row, params, context) if processed else row
        want = describe(scores, expected[index], 4)
        assert got.log_prob == pytest.approx(want.log_prob, abs=1e-3)
        assert got.rank == want.rank
        assert [each.token_id for each in got.alternatives] == [token for token, _ in want.alternatives]
        assert [each.log_prob for each in got.alternatives] == pytest.approx(
            [value for _, value in want.alternatives], abs=1e-3
        )


class LovesPadding(TreeRunner):
    """Finds the rows of its head that the tokenizer does not know the most likely of all."""

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]:
        outputs = super().forward(batch)
        for logits in outputs:
            logits[:, self.spec.token_count :] += 100.0
        return outputs


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), HOT], ids=["greedy", "sampled"])
def test_padding_is_never_emitted(params: SamplingParams) -> None:
    """Where padding would be the argmax, the answer is that of the same model without it, with and without trees."""
    runner = LovesPadding(load(LLAMA.replace("?", "?padded=64&")), kv_tokens=2048)
    assert (runner.spec.vocab_size, runner.spec.token_count) == (576, 512)
    router = Router(Engine(runner, max_sessions=4, step_tokens=512))
    expected = plain(PROMPT, 8, params)
    assert router.open("plain", PROMPT, params=params).generate(8) == expected
    client = router.open("tree", PROMPT, params=params)
    assert list(client.verify(chain(client.root, [*expected[:3], 570])).token_ids) == expected[:4]
