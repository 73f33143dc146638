"""The prefix cache: texts that begin as earlier ones did are not computed again, and nothing else changes."""

from __future__ import annotations

import random

import pytest

from graftree.sampling import SamplingParams
from graftree.tree import TokenTree
from tests.verifier_harness import Client, Router, chain, greedy, make_engine, plain

PROMPT = [(11 * i + 5) % 512 for i in range(70)]


def right_or_wrong(answer: list[int], start: int) -> dict[int, list[int]]:
    """Guesses by committed length: three right tokens, then a wrong one."""
    return {
        start + index: [*answer[index : index + 3], (answer[min(index + 3, len(answer) - 1)] + 1) % 512]
        for index in range(len(answer))
    }


def accepted(client: Client, answer: list[int], count: int) -> int:
    """Generate `count` tokens of `answer` with trees; how many draft tokens were accepted."""
    start, total = len(client.token_ids), 0
    guesses = right_or_wrong(answer, start)
    while len(client.token_ids) - start < count:
        guess = guesses[len(client.token_ids)]
        total += len(client.verify(chain(client.root, guess)).accepted_nodes)
    assert client.token_ids[start : start + count] == answer[:count]
    return total


def test_trial_19_the_same_prompt_and_a_longer_one() -> None:
    """Twice the same prompt, then its answer and more behind it: the text is plain decoding's and as much is accepted
    as without a cache; rows are computed once."""
    answer = greedy(PROMPT, 20)
    longer = [*PROMPT, *answer[:12], 7, 7, 300]
    after = greedy(longer, 20)
    counts: dict[bool, list[int]] = {}
    computed: dict[bool, int] = {}
    for reuse in (False, True):
        engine = make_engine(prefix_cache=reuse)
        router = Router(engine)
        counts[reuse] = [accepted(router.open("first", PROMPT), answer, 16)]
        engine.close(router.stream, "first")
        for name, text, expected in (("second", PROMPT, answer), ("third", longer, after)):
            counts[reuse].append(accepted(router.open(name, text), expected, 16))
        computed[reuse] = engine.counters.prefill_rows
    assert counts[True] == counts[False]
    size = 16
    # All full blocks before the root's own: four of the prompt, five of the longer text.
    assert computed[False] - computed[True] == 4 * size + 5 * size


def test_rows_are_found_while_their_session_is_open() -> None:
    """A second session finds what the first has computed so far, also what it generated; each goes on alone."""
    engine = make_engine()
    router = Router(engine)
    first = router.open("first", PROMPT)
    said = first.generate(30)
    other = router.open("other", [*PROMPT, *said[:20]])
    assert engine.counters.prefix_cache_hits == (len(PROMPT) + 20 - 1) // 16 * 16
    assert other.generate(10) == said[20:]
    assert first.generate(10) == greedy(PROMPT, 40)[30:]


def test_siblings_share_blocks_and_copy_what_they_write() -> None:
    """Four samples of one prompt: full blocks are held once, the block that is written is each one's own."""
    engine = make_engine(block_size=16)
    router, pool = Router(engine), engine._runner.pool
    first = router.open("0", PROMPT, params=SamplingParams(temperature=1.0, seed=1), max_nodes=10)
    alone = pool.num_blocks - pool.free_blocks
    others = [
        router.open(
            str(seed), PROMPT, params=SamplingParams(temperature=1.0, seed=1 + seed), max_nodes=10, prefix_of="0"
        )
        for seed in (1, 2, 3)
    ]
    outputs = [client.generate(8) for client in (first, *others)]
    assert outputs == [plain(PROMPT, 8, SamplingParams(temperature=1.0, seed=1 + seed)) for seed in range(4)]
    assert pool.num_blocks - pool.free_blocks == alone + 3 * (alone - len(PROMPT) // 16)
    assert engine.counters.prefill_rows == len(PROMPT) - 1


def test_idle_rows_make_room() -> None:
    """A pool full of old texts takes a new session at once; what was evicted is computed again, rightly."""
    engine = make_engine(kv_tokens=160)
    router = Router(engine)
    texts = [[seed, *PROMPT[:40]] for seed in range(4)]
    for turn in range(2):
        for index, text in enumerate(texts):
            client = router.open(f"{turn}-{index}", text, max_length=60, max_nodes=4)
            assert client.generate(6) == greedy(text, 6)
            engine.close(router.stream, client.session_id)
            engine.check()
    assert engine.counters.sessions_opened == 8
    assert engine.counters.pool_faults == 0


def test_another_answer_is_not_found() -> None:
    """Only committed rows are published: a rejected draft, written in the same place, is never another's prefix."""
    engine = make_engine()
    router = Router(engine)
    answer = greedy(PROMPT, 40)
    wrong = [(token + 1) % 512 for token in answer]
    first = router.open("first", PROMPT)
    first.verify(chain(first.root, wrong[:30]))
    engine.close(router.stream, "first")
    text = [*PROMPT, *wrong[:30]]
    other = router.open("other", text)
    assert engine.counters.prefix_cache_hits == len(PROMPT) // 16 * 16
    assert other.generate(8) == greedy(text, 8)


@pytest.mark.parametrize("reuse", [False, True])
def test_trial_20_no_block_is_lost(reuse: bool) -> None:
    """500 short requests of few texts, with and without trees, a third cancelled at some point: every block comes
    back, the pool is whole, and every answer is right."""
    engine = make_engine(kv_tokens=1024, prefix_cache=reuse)
    router, rng = Router(engine), random.Random(0)
    texts = [[seed, *PROMPT[: 3 + 17 * (seed % 4)]] for seed in range(6)]
    answers = [greedy(text, 6) for text in texts]
    for request in range(500):
        which = rng.randrange(len(texts))
        client = router.open(str(request), texts[which], max_length=80, max_nodes=8)
        client.send(chain(client.root, answers[which][:3]) if request % 2 else TokenTree(client.root))
        if request % 3 == 0:
            for _ in range(rng.randrange(2)):
                engine.iterate()
            engine.flush()
            engine.close(router.stream, client.session_id)
            router.verdicts.clear()
            continue
        router.run()
        got = list(client.take().token_ids)
        assert got == answers[which][: len(got)]
        engine.close(router.stream, client.session_id)
    engine.check()
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    assert engine.counters.pool_faults == 0
    assert (engine.counters.prefix_cache_hits > 0) == reuse
