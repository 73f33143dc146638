"""Recordings: what plain decoding says, kept, and taken up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import recording
from bench.recording import Prompt, Recorder, prompts
from graftree.sampling import SamplingParams
from graftree.text.tokenizer import Tokenizer
from tests.verifier_harness import plain

LLM = "random:llama?layers=2&hidden=32&heads=2&kv_heads=1&intermediate=64&vocab=300&context=256&scale=3"
PROMPTS = [Prompt(3, "a", tuple(range(5, 40))), Prompt(4, "b", (1, 2, 3)), Prompt(9, "b", (7, 7))]
TEMPERATURES = (0.0, 1.0)


def test_recordings_are_plain_decodings(tmp_path: Path) -> None:
    """Prompts of different lengths side by side, both temperatures from one prefill, the seed from the question."""
    made = Recorder(LLM, "fingerprint", tmp_path, 12).record(PROMPTS, TEMPERATURES)
    assert [(each.temperature, each.prompt) for each in made] == [(t, p) for t in TEMPERATURES for p in PROMPTS]
    for each in made:
        params = SamplingParams(temperature=each.temperature, seed=each.prompt.question_id)
        assert each.params == params
        assert list(each.output) == plain(each.prompt.token_ids, 12, params, LLM)[: len(each.output)]
        assert each.ended or len(each.output) == 12


def test_what_is_on_record_is_not_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped goes on where it was; fewer tokens are cut, more are asked for anew."""
    whole = Recorder(LLM, "fingerprint", tmp_path / "whole", 10).record(PROMPTS, TEMPERATURES)
    Recorder(LLM, "fingerprint", tmp_path, 10).record(PROMPTS[:1], TEMPERATURES[:1])
    assert Recorder(LLM, "fingerprint", tmp_path, 10).record(PROMPTS, TEMPERATURES) == whole
    longer = Recorder(LLM, "fingerprint", tmp_path, 14).record(PROMPTS[1:2], (0.0,))
    assert longer[0].output[:10] == whole[1].output

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the LLM is asked")

    monkeypatch.setattr(recording, "Decoder", refuse)
    again = Recorder(LLM, "fingerprint", tmp_path, 10).record(PROMPTS, TEMPERATURES)
    assert [each.output for each in again] == [each.output for each in whole]
    shorter = Recorder(LLM, "fingerprint", tmp_path, 4).record(PROMPTS, TEMPERATURES)
    assert [each.output for each in shorter] == [each.output[:4] for each in whole]
    assert not any(each.ended for each in shorter if len(each.output) == 4)
    with pytest.raises(AssertionError, match="is asked"):
        Recorder(LLM, "another", tmp_path, 4).record(PROMPTS, TEMPERATURES)


def test_prompts_are_spread_over_categories() -> None:
    """As many of each, evenly, with the chat template, none too long."""
    tokenizer = Tokenizer.load("random:llama?vocab=300")
    lines = [
        {"question_id": index, "category": "ab"[index % 2], "turns": [str(index) * (1 if index else 4000)]}
        for index in range(12)
    ]
    chosen = prompts(lines, tokenizer, 2)
    assert [(prompt.category, prompt.question_id) for prompt in chosen] == [("b", 1), ("b", 7), ("a", 2), ("a", 6)]
    assert chosen[0].token_ids == tuple(tokenizer.encode_chat([{"role": "user", "content": "1"}]))
