"""What the LLM writes for its SSM: turns, lockstep, shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import SafetensorError

from graftree.distill.checks import check_answers
from graftree.distill.corpus import Corpus, CorpusSettings
from graftree.distill.files import write_tensors
from graftree.distill.streams import ANSWER, FORCED, USER, Script, Stream
from graftree.distill.trainer import TrainSettings
from graftree.distill.writer import Writer
from graftree.errors import Incompatible, InvalidArgument, Unavailable
from graftree.models.load import load
from graftree.text.tokenizer import Tokenizer
from tests.runner_models import FAMILIES

LLM = "random:llama?layers=2&hidden=32&vocab=300&scale=2"
SCRIPT = Script((1, 2), (9, 3), (9, 4), frozenset({9}), ((5, 6),), True)
SETTINGS = CorpusSettings(streams=3, length=24, top=8, seed=5)


def _said(stream: Stream, sampled: list[int]) -> list[tuple[int, int]]:
    return [stream.next(token) for token in sampled]


def test_turns_follow_the_template() -> None:
    """Opening, the user's own words, the template's pieces and the answer follow each other, each with its role."""
    stream = Stream(SCRIPT, Random(0), iter(()))
    said = _said(stream, [0, 0, 0, 0, 20, 21, 9, 0, 30, 31, 9, 0, 0, 0, 22])
    assert said == [
        (1, FORCED), (2, FORCED), (5, FORCED), (6, FORCED), (20, USER), (21, USER), (9, USER), (3, FORCED),
        (30, ANSWER), (31, ANSWER), (9, ANSWER), (4, FORCED), (5, FORCED), (6, FORCED), (22, USER),
    ]  # fmt: skip


def test_given_prompts_come_first() -> None:
    """A prompt takes the user's turn; when none is left the LLM writes the next one."""
    stream = Stream(SCRIPT, Random(0), iter([[40, 41]]))
    tokens = [token for token, _ in _said(stream, [0] * 6 + [30, 9] + [0] * 3 + [20])]
    assert tokens == [1, 2, 40, 41, 9, 3, 30, 9, 4, 5, 6, 20]


def test_turns_have_an_end() -> None:
    """A turn that never ends is ended by the template's own token, which counts as nobody's."""
    stream = Stream(SCRIPT, Random(0), iter(()))
    said = _said(stream, [20] * 400)
    assert (9, FORCED) in said
    assert {ANSWER, USER, FORCED} == {role for _, role in said}


def test_a_model_without_a_template_just_writes() -> None:
    """Text goes on from the start token, and begins anew after the end of a text."""
    script = Script((1,), (), (), frozenset({9}), ((),), False)
    assert [t for t, _ in _said(Stream(script, Random(0), iter(())), [0, 20, 9, 21])] == [1, 20, 1, 21]


def test_the_script_of_a_chat_template() -> None:
    """The pieces are the template's text between the turns, in tokens."""
    tokenizer = Tokenizer.load(LLM)
    script = Script.of(tokenizer)
    assert script.chat == tokenizer.has_chat_template
    assert script.start


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt", "mistral"])
def test_the_writer_stores_the_models_own_log_probabilities(family: str) -> None:
    """In lockstep the LLM says what an ordinary forward over the finished text says, at every position."""
    loaded = load(FAMILIES[family])
    reference = load(FAMILIES[family]).model
    script = replace(SCRIPT, ends=frozenset({9}))
    written = Writer(loaded, top=5).write([Stream(script, Random(n), iter(())) for n in range(3)], 40, seed=1)
    with torch.inference_mode():
        expected = torch.log_softmax(reference(input_ids=written.token_ids.long()).logits.float(), -1)
    got = expected.gather(-1, written.top_ids.long())
    torch.testing.assert_close(written.top_log_probs.float(), got, atol=0.02, rtol=0.01)
    assert (expected.argmax(-1) == written.top_ids[..., 0]).float().mean() > 0.98


def test_greedy_answers_are_the_models_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 an answer's token is the most likely one after the token before it."""
    monkeypatch.setattr("graftree.distill.streams.ANSWER_TEMPERATURES", (0.0,))
    written = Writer(load(LLM), top=5).write([Stream(SCRIPT, Random(0), iter([[7, 8]]))], 30, seed=1)
    answers = (written.roles[0, 1:] == ANSWER).nonzero()[:, 0] + 1
    assert answers.numel()
    for place in answers.tolist():
        assert written.token_ids[0, place] in (written.top_ids[0, place - 1, 0], 9)


def _write(directory: Path, shards: int, settings: CorpusSettings = SETTINGS) -> Corpus:
    corpus = Corpus(directory, settings)
    corpus.write(Writer(load(LLM), top=settings.top), Script.of(Tokenizer.load(LLM)), shards)
    return corpus


def test_a_killed_corpus_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    """A missing shard is written again, an unfinished file is ignored, and the text is that of an undisturbed run."""
    whole = _write(tmp_path / "a", 3)
    part = _write(tmp_path / "b", 1)
    (tmp_path / "b" / "shard-00001.partial").write_bytes(b"half")
    assert len(part) == 1
    part = _write(tmp_path / "b", 3)
    for index in range(3):
        torch.testing.assert_close(whole.read(index).token_ids, part.read(index).token_ids, rtol=0, atol=0)
        torch.testing.assert_close(whole.read(index).top_log_probs, part.read(index).top_log_probs, rtol=0, atol=0)
    assert not torch.equal(whole.read(0).token_ids, whole.read(1).token_ids)


def test_text_without_answers_is_refused(tmp_path: Path) -> None:
    """Held-out text with nothing to measure by ends a run before anything is trained; with an answer it goes on."""
    corpus = _write(tmp_path, 2)
    written = corpus.read(1)
    corpus._save(1, replace(written, roles=torch.full_like(written.roles, ANSWER)))
    check_answers(corpus, TrainSettings(), 2)
    corpus._save(1, replace(written, roles=torch.full_like(written.roles, USER)))
    with pytest.raises(InvalidArgument, match="no answers in the held-out text: take more --length or --tokens"):
        check_answers(corpus, TrainSettings(), 2)


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written is named, and nothing of it stays."""

    def full(tensors: object, path: Path, metadata: object = None) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("graftree.distill.files.save_file", full)
    with pytest.raises(Unavailable, match=r"a.safetensors cannot be written: No space left"):
        write_tensors(tmp_path / "a.safetensors", {})
    assert not list(tmp_path.iterdir())


def test_another_runs_corpus_is_refused(tmp_path: Path) -> None:
    """Shards of other settings or another LLM are not mixed in; the difference is named."""
    _write(tmp_path, 1)
    with pytest.raises(Incompatible, match="seed '5', now it is '6'"):
        Corpus(tmp_path, replace(SETTINGS, seed=6))
    with pytest.raises(Incompatible, match="llm"):
        Corpus(tmp_path, replace(SETTINGS, llm="other"))


@pytest.mark.parametrize(("name", "value"), [("streams", 0), ("length", 7), ("top", 0), ("seed", -1)])
def test_settings_have_limits(name: str, value: int) -> None:
    """A value out of range is named with its limits."""
    with pytest.raises(InvalidArgument, match=name):
        replace(SETTINGS, **{name: value})
