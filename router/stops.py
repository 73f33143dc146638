"""`Stopper`: where an answer ends, decided token by token.

The verifier emits whole runs; whatever lies behind the token that ends the answer is never delivered, and text,
token ids, log probabilities, usage and acceptance counts all end with that token. Against vLLM's V1 engine:

    * a stop or end-of-sequence token is the last token; its text, if it has any, is part of the text, so that the
      text is always the decoded tokens up to a stop string (vLLM leaves the text of a stop token out);
    * a stop string ends the text before it, the token ids with the token that completed it (as vLLM);
    * stop strings count when they end behind the first min_new_tokens tokens (as vLLM);
    * where a stop string and the length limit meet in one token, the reason is the stop string (as vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graftree.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason


@dataclass(frozen=True)
class StopRules:
    """When an answer ends.

    Attributes:
        max_new_tokens: already bounded by what is left of the context.
        min_new_tokens: stop strings that end within these first tokens do not count.
        stop_token_ids: end-of-sequence and stop tokens; the first of them is the last token.
        stop_strings: the text ends before the first of them.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finish:
    """Why an answer ended."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Delivery:
    """What of one run reaches the client: its first `count` tokens, and with each of them text that is final then."""

    count: int
    texts: tuple[str, ...]
    finish: Finish | None

    @property
    def text(self) -> str:
        """All text that is final now."""
        return "".join(self.texts)


class TextSource(Protocol):
    """What `graftree.text.detokenize.Detokenizer` does."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Stopper:
    """Walks one request's output. Not to be used after it has said `finish`."""

    def __init__(self, rules: StopRules, detokenizer: TextSource) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._held = ""  # final text that may be the start of a stop string
        self._longest = max(map(len, rules.stop_strings), default=0)
        self.count = 0

    def take(self, token_ids: Sequence[int]) -> Delivery:
        """Walk one verified run and stop at the first token that ends the answer."""
        released: list[str] = []
        for index, token in enumerate(token_ids):
            self.count += 1
            text, finish = self._step(token)
            released.append(text)
            if finish is not None:
                return Delivery(index + 1, tuple(released), finish)
        return Delivery(len(token_ids), tuple(released), None)

    def _step(self, token: int) -> tuple[str, Finish | None]:
        rules = self._rules
        stop_token = token if token in rules.stop_token_ids else None
        text, stop_string = self._release(self._detokenizer.push(token))
        last = stop_string is not None or stop_token is not None or self.count >= rules.max_new_tokens
        if not last:
            return text, None
        if stop_string is None:
            # The end releases what was held back, half a character included.
            tail, stop_string = self._release(self._detokenizer.flush())
            text += tail + self._held
        self._held = ""
        if stop_string is not None or stop_token is not None:
            return text, Finish(FINISH_REASON_STOP, stop_string, stop_token)
        return text, Finish(FINISH_REASON_LENGTH)

    def _release(self, new: str) -> tuple[str, str | None]:
        """Text that can go out now that `new` is final, and the stop string that `new` completes."""
        if not self._longest:
            return new, None
        buffer = self._held + new
        if self.count > self._rules.min_new_tokens and (match := self._match(buffer, len(self._held))) is not None:
            start, stop_string = match
            self._held = ""
            return buffer[:start], stop_string
        keep = self._possible_start(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def _match(self, buffer: str, old: int) -> tuple[int, str] | None:
        """Leftmost stop string that ends behind the first `old` characters; the first listed of equals."""
        found = [
            (start, order, stop)
            for order, stop in enumerate(self._rules.stop_strings)
            if (start := buffer.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest tail of `buffer` that could still grow into a stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._rules.stop_strings):
                return length
        return 0
