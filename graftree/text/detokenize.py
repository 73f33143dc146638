"""`Detokenizer`: text of a stream of tokens, piece by piece, that never splits a character.

A window of recent tokens is decoded at each push; what is new in its text is final unless it ends in U+FFFD, which
may be the start of a character whose other bytes are still to come. `tokenizers.decoders.DecodeStream` works alike,
but it cannot give out what it holds back at the end, and while stray bytes go on it gives out nothing and decodes an
ever longer window.
"""

from __future__ import annotations

from collections.abc import Sequence

from graftree.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MOST_HELD = 3  # an incomplete character has at most three bytes, each shown as U+FFFD by some decoders
_CONTEXT = 16  # tokens kept before the new ones: more than the bytes whose text can still change
_LONGEST_WINDOW = 64


class Detokenizer:
    """Incremental decoding of one request's output.

    The pushes and the flush together are `decode(prompt + output)` after what `decode(prompt)` shows of it; a
    character that the prompt leaves incomplete belongs to the output. (One exception: where a SentencePiece model
    with byte fallback emits invalid UTF-8, its decoder would turn characters that were given before into U+FFFD.)

    Args:
        tokenizer: the model's.
        prompt_ids: token ids of the prompt, needed where a decoder treats the first token of a text specially.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._boundaries: list[int] = []  # lengths of the window at which its text ended with a whole character
        self._given = 0  # characters of the window's text that are not to be given any more
        tail, is_all = self._tail(prompt_ids)
        if tokenizer.byte_fallback:
            if not is_all:
                self._restart()
            for token in tail:
                self.push(token)
        else:
            self._window = tail
            text = self._text()
            self._given = len(text) - _held(text)

    def push(self, token_id: int) -> str:
        """The text that has become final with this token, "" while a character is incomplete."""
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._text()
        held = _held(text)
        piece = text[self._given : len(text) - held]
        self._given = max(self._given, len(text) - held)
        if held == 0:
            self._boundaries.append(len(self._window))
        if held == 0 and token_id in self._tokenizer.byte_fallback:
            self._restart()
        else:
            self._trim(len(text) - self._given)
        return piece

    def flush(self) -> str:
        """What is held back at the end of the output: an incomplete character, as U+FFFD."""
        text = self._text()
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._window)

    def _tail(self, prompt_ids: Sequence[int]) -> tuple[list[int], bool]:
        """The prompt's last tokens with text, from the start of a character, and whether these are all it has."""
        tail: list[int] = []
        for token in reversed(prompt_ids):
            if self._tokenizer.has_text(token):
                tail.append(token)
                if len(tail) == 2 * _CONTEXT:
                    break
        count = len(tail)
        while tail and 0x80 <= self._tokenizer.byte_fallback.get(tail[-1], 0) < 0xC0:
            tail.pop()
        return tail[::-1], len(tail) == count < 2 * _CONTEXT

    def _restart(self) -> None:
        """Forget a run of bytes that made whole characters: an incomplete one behind it would turn all into U+FFFD.

        A word stands in for what was before, so that the next token is not taken for the first of a text.
        """
        self._window = [] if self._tokenizer.anchor is None else [self._tokenizer.anchor]
        self._boundaries = []
        self._given = len(self._text())

    def _trim(self, held: int) -> None:
        """Cut the window, at the end of a whole character where there is one."""
        count = len(self._window)
        if count <= 2 * _CONTEXT:
            return
        cut = max((at for at in self._boundaries if at <= count - _CONTEXT), default=0)
        if cut == 0:
            if count <= _LONGEST_WINDOW:
                return
            cut = count - _CONTEXT
        del self._window[:cut]
        self._boundaries = [at - cut for at in self._boundaries if at > cut]
        self._given = len(self._text()) - held


def _held(text: str) -> int:
    """How many characters at the end of a text may still change."""
    return min(_MOST_HELD, len(text) - len(text.rstrip(_REPLACEMENT)))
