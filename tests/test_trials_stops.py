"""Trials 1 to 4, 16 and 29: where an answer ends, and that everything said about it ends there too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest

from graftree import Client
from graftree.sdk.options import Mode
from router.figures import Figures
from tests import drafters, trials
from tests.trials import INVARIANT, MODES, PROMPT, SPECULATORS, TOKENIZER, compared, same
from tests.verifier_harness import greedy

LENGTH = 14
DEFAULT = MODES[0]  # tried at every place, the others at some
GREEDY: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": LENGTH}


@pytest.fixture(scope="module", params=SPECULATORS)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with trials.stack(SPECULATORS[request.param]) as client:
        yield client


@pytest.fixture(scope="module")
def said() -> list[int]:
    """What the LLM says greedily, by transformers."""
    return greedy(PROMPT, LENGTH)


def first_uses(tokens: list[int]) -> list[int]:
    """Places where a token comes for the first time: declared an end there, it ends the text there."""
    return [place for place, token in enumerate(tokens) if token not in tokens[:place]]


@pytest.mark.parametrize("mode", MODES)
def test_trial_1_stop_token_at_every_depth(client: Client, said: list[int], mode: Mode) -> None:
    """Each token in turn is declared a stop token: it is the last one delivered, wherever in a run it falls."""
    for place in first_uses(said)[: 7 if mode == DEFAULT else 3]:
        result = compared(client, mode, **GREEDY, stop_token_ids=[said[place]], log_probs=True)
        assert list(result.token_ids) == said[: place + 1]
        assert result.stop_token_id == said[place]


@pytest.mark.parametrize("kind", SPECULATORS)
def test_trial_1_end_of_sequence(said: list[int], kind: str) -> None:
    """Two of the produced tokens are the model's end-of-sequence tokens: the one that comes first ends the answer;
    with ignore_eos neither does; no end is chosen before min_new_tokens."""
    ends = [said[place] for place in first_uses(said)[2:7:3]]
    model = f"{trials.MODEL.replace('&eos=none', '')}&eos={','.join(map(str, sorted(ends)))}"
    speculators = [each.replace("%26eos%3Dnone", "") for each in SPECULATORS[kind]]
    with trials.stack(speculators, model) as client:
        drafters.TEXTS[:] = [PROMPT + said]
        plain = client.generate(**GREEDY, speculation=False)
        result = client.generate(**GREEDY)
        assert list(result.token_ids) == said[: said.index(ends[0]) + 1]
        assert (result.stop_token_id, result.finish_reason) == (ends[0], "stop")
        same(result, plain)
        assert list(compared(client, **GREEDY, ignore_eos=True).token_ids) == said
        late = compared(client, **GREEDY, min_new_tokens=8)
        assert not set(ends) & set(late.token_ids[:8])


@pytest.mark.parametrize("mode", MODES)
def test_trial_2_stop_string(client: Client, said: list[int], mode: Mode) -> None:
    """A stop string that begins and ends anywhere, within a token or over several and over runs: text, ids, log
    probabilities and usage agree with each other and with plain decoding."""
    text = TOKENIZER.decode(said)
    stops = {text[at : at + size] for at in range(len(text)) for size in (1, 2, 4, 7)}
    stops = {stop for stop in stops if "\ufffd" not in stop and len(stop) in (1, 2, 4, 7)}
    for stop in sorted(stops)[:: max(1, len(stops) // (8 if mode == DEFAULT else 3))]:
        result = compared(client, mode, **GREEDY, stop=stop, log_probs=True)
        assert (result.stop_string, result.finish_reason) == (stop, "stop")
        assert result.text == text[: text.index(stop)]
        assert stop in TOKENIZER.decode(list(result.token_ids))
        assert stop not in TOKENIZER.decode(list(result.token_ids[:-1]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trials_3_and_4_exact_length(client: Client, mode: Mode, temperature: float) -> None:
    """max_new_tokens 1 to 9 with trees of depth 4: delivered = usage = the sum over the steps = plain."""
    for limit in range(1, 10) if mode == DEFAULT else (1, 4, 5, 9):
        options: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": limit, "seed": 3}
        result = compared(client, mode, **options, temperature=temperature)
        assert (len(result.token_ids), result.finish_reason) == (limit, "length")


def test_perfect_drafts_make_runs() -> None:
    """The trials are about runs: perfect speculators make them, at temperature 0 and above, in every mode."""
    with trials.stack(SPECULATORS["perfect"]) as client:
        for mode, temperature in product(MODES, (0.0, 0.8)):
            result = compared(client, mode, token_ids=PROMPT, max_new_tokens=40, temperature=temperature, seed=1)
            if temperature == 0 or mode in INVARIANT:
                assert result.speculation.mean_acceptance_length > 2


@pytest.mark.parametrize(("mode", "missing"), [*product([DEFAULT], range(1, 7)), *product(MODES[1:], (1, 4))])
def test_trial_16_context_limit(client: Client, mode: Mode, missing: int) -> None:
    """Prompts that end 1 to 6 tokens before the context's end, deeper than which trees are: the context gets exactly
    full, the reason is length, and nothing fails."""
    prompt = [32 + (5 * i + 1) % 95 for i in range(256 - missing)]
    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {"token_ids": prompt, "max_new_tokens": 50, "temperature": temperature}
        result = compared(client, mode, **options, seed=2)
        assert (len(result.token_ids), result.finish_reason) == (missing, "length")


def test_trial_29_inter_token_latency() -> None:
    """Over any runs, the latencies between tokens add up to the decode time, and there is one fewer than tokens."""
    now = [100]
    figures = Figures(lambda: now[0], arrived_ns=40)
    arrivals = []
    for passed, tokens in [(0, 1), (30, 3), (10, 1), (60, 4)]:
        now[0] += passed
        figures.departed()
        figures.completion_tokens += tokens
        arrivals += [now[0]] * tokens
    timings = figures.timings()
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert (timings.ttft_ns, timings.decode_ns, timings.total_ns) == (60, 100, 160)
    assert (sum(gaps), len(gaps)) == (timings.decode_ns, figures.completion_tokens - 1)


def test_trial_29_through_the_stack(client: Client) -> None:
    """What a client sees of it: no decode time for one token, and a mean over tokens, not over steps, for more."""
    one = client.generate(token_ids=PROMPT, max_new_tokens=1)
    assert (one.timings.decode_ns, one.mean_inter_token_latency_ns) == (0, 0.0)
    many = client.generate(token_ids=PROMPT, max_new_tokens=20)
    assert many.mean_inter_token_latency_ns * 19 == pytest.approx(many.timings.decode_ns)
    assert 0 < many.timings.ttft_ns + many.timings.decode_ns <= many.timings.total_ns
