"""`Stopper`: the first stop condition along the output ends it, whatever the runs look like."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftree.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from router.stops import Delivery, Finish, Stopper, StopRules

TEXTS = ["a", "b", "ab", "ba", "", "c", "abc", " "]


class Letters:
    """Token i has the text TEXTS[i]; an empty one is held back and comes with the next or at the end."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token: int) -> str:
        if TEXTS[token] == "":
            self.held += "?"
            return ""
        text, self.held = self.held + TEXTS[token], ""
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def deliver(rules: StopRules, tokens: list[int], lengths: list[int]) -> tuple[list[int], str, Finish | None]:
    """Walk `tokens` in runs of these lengths."""
    stopper = Stopper(rules, Letters())
    out: list[int] = []
    text, at, finish = "", 0, None
    for length in [*lengths, len(tokens)]:
        run = tokens[at : at + length]
        at += length
        if not run:
            continue
        delivery: Delivery = stopper.take(run)
        out += run[: delivery.count]
        text += delivery.text
        finish = delivery.finish
        if finish is not None:
            break
    return out, text, finish


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=30),
    st.lists(st.integers(1, 5), max_size=30),
    st.lists(st.sampled_from(["a", "ab", "bab", "abcab", "cc", "?", "b "]), max_size=3),
    st.sets(st.integers(0, len(TEXTS) - 1), max_size=2),
    st.integers(0, 6),
    st.integers(1, 25),
)
def test_runs_do_not_matter(tokens, lengths, stops, ends, minimum, maximum) -> None:
    """Any split into runs gives what one token at a time gives: tokens, text, reason."""
    rules = StopRules(max(maximum, minimum), minimum, frozenset(ends), tuple(stops))
    one = deliver(rules, tokens, [1] * len(tokens))
    assert deliver(rules, tokens, lengths) == one
    out, text, finish = one
    if finish is not None and finish.stop_string is None:
        letters = Letters()
        assert text == "".join(map(letters.push, out)) + letters.flush()
    if minimum == 0:
        assert not any(stop in text for stop in stops) or finish is None


@pytest.mark.parametrize("depth", range(5))
def test_stop_token_is_the_last(depth: int) -> None:
    """A stop token at any depth of a run is delivered, and nothing behind it."""
    run = [1, 1, 1, 1, 1]
    run[depth] = 5
    out, text, finish = deliver(StopRules(100, stop_token_ids=frozenset({5})), run, [5])
    assert (out, text) == (run[: depth + 1], "b" * depth + "c")
    assert finish == Finish(FINISH_REASON_STOP, stop_token_id=5)


@pytest.mark.parametrize("limit", range(1, 10))
def test_length_limit_inside_a_run(limit: int) -> None:
    """max_new_tokens is exact, wherever it falls in a run of five."""
    out, text, finish = deliver(StopRules(limit), [0] * 20, [5] * 4)
    assert (len(out), text, finish) == (limit, "a" * limit, Finish(FINISH_REASON_LENGTH))


def test_stop_string_over_tokens_and_runs() -> None:
    """The text ends before the string, the tokens with the one that completed it; held-back text never leaks."""
    stopper = Stopper(StopRules(100, stop_strings=("abcab",)), Letters())
    assert stopper.take([5, 0]) == Delivery(2, ("c", ""), None)
    assert stopper.take([1, 5]) == Delivery(2, ("", ""), None)
    delivery = stopper.take([0, 1, 5, 5])
    assert delivery == Delivery(2, ("", ""), Finish(FINISH_REASON_STOP, stop_string="abcab"))


def test_held_back_text_comes_out_when_it_was_nothing() -> None:
    """Text that looked like the start of a stop string is released as soon as it cannot be, and at the end."""
    stopper = Stopper(StopRules(4, stop_strings=("abcab",)), Letters())
    assert stopper.take([2]).text == ""
    assert stopper.take([1]).text == "abb"
    assert stopper.take([2]).text == ""
    assert stopper.take([5]) == Delivery(1, ("abc",), Finish(FINISH_REASON_LENGTH))


def test_stop_string_before_min_new_tokens_does_not_count() -> None:
    """A stop string that ends within the first min_new_tokens tokens is text; one that ends behind them counts."""
    rules = StopRules(100, min_new_tokens=3, stop_strings=("ab",))
    assert deliver(rules, [0, 1, 0, 1, 5], []) == ([0, 1, 0, 1], "ab", Finish(FINISH_REASON_STOP, "ab"))


def test_earliest_stop_string_wins() -> None:
    """Of several stop strings that one token completes, the text ends before the leftmost."""
    rules = StopRules(100, stop_strings=("c", "bc"))
    assert deliver(rules, [0, 6], []) == ([0, 6], "aa", Finish(FINISH_REASON_STOP, "bc"))


def test_stop_string_beats_the_length_limit() -> None:
    """Both in one token: the reason is the stop string, as in vLLM; with a stop token, both are named."""
    assert deliver(StopRules(2, stop_strings=("b",)), [0, 1], [])[2] == Finish(FINISH_REASON_STOP, "b")
    rules = StopRules(2, stop_token_ids=frozenset({1}), stop_strings=("b",))
    assert deliver(rules, [0, 1], []) == ([0, 1], "a", Finish(FINISH_REASON_STOP, "b", 1))


def test_incomplete_character_at_the_end() -> None:
    """What the detokenizer still holds at the end is delivered with the last token."""
    assert deliver(StopRules(2), [0, 4], [])[1] == "a?"
