"""`SamplingParams`: how a request wants its tokens chosen; `graftree.sampling` does it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graftree.errors import InvalidArgument

if TYPE_CHECKING:
    from graftree.v1 import common_pb2

GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS
BAN = -100.0
MAX_BIASES = 1024
MAX_BANNED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 65_536
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 256
MAX_BAD_SEQUENCES = 256
MAX_BAD_SEQUENCE_TOKENS = 256
_MOST = {
    "logit_bias": MAX_BIASES,
    "bad_words": MAX_BAD_WORDS,
    "bad_words_token_ids": MAX_BAD_SEQUENCES,
    "banned_token_ids": MAX_BANNED_TOKENS,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
}


@dataclass(frozen=True)
class SamplingParams:
    """Mirror of the wire's SamplingParams with its unset fields filled in.

    Attributes:
        temperature: 0 = greedy.
        top_k: 0 = all tokens.
        top_p: 1 = all tokens.
        min_p: 0 = all tokens.
        seed: 64-bit key of the noise; None = not drawn yet (enough for greedy).
        repetition_penalty: 1 = none.
        presence_penalty: 0 = none.
        frequency_penalty: 0 = none.
        logit_bias: token id -> what is added to its logit.
        bad_words: texts that must not come; without effect until they are among `bad_words_token_ids`.
        bad_words_token_ids: token sequences that must not come.
        banned_token_ids: tokens that must not come.
        allowed_token_ids: the only tokens that may come; empty = all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> SamplingParams:
        """Take over the fields that are set; call `validate` next.

        Raises:
            InvalidArgument: a list that is too long, before anything is made of its entries.
        """
        _check_lengths(message)
        for index, sequence in enumerate(message.bad_words_token_ids):
            _check_sequence(index, len(sequence.ids))
        names = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        given: dict[str, Any] = {name: getattr(message, name) for name in names if message.HasField(name)}
        return cls(
            **given,
            logit_bias=dict(message.logit_bias),
            bad_words=tuple(message.bad_words),
            bad_words_token_ids=tuple(tuple(sequence.ids) for sequence in message.bad_words_token_ids),
            banned_token_ids=tuple(message.banned_token_ids),
            allowed_token_ids=tuple(message.allowed_token_ids),
        )

    def to_proto(self) -> common_pb2.SamplingParams:
        """The same parameters with every field set (floats become 32-bit there)."""
        from graftree.v1 import common_pb2

        return common_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            bad_words=self.bad_words,
            bad_words_token_ids=[
                common_pb2.SamplingParams.TokenSequence(ids=sequence) for sequence in self.bad_words_token_ids
            ],
            banned_token_ids=self.banned_token_ids,
            allowed_token_ids=self.allowed_token_ids,
        )

    def validate(self, *, vocab_size: int | None = None, token_count: int = 0) -> None:
        """Check every limit of protos/graftree/v1/common.proto.

        Args:
            vocab_size: where known, token ids must be below it, and one of them must be left to choose.
            token_count: ids at or above this are padding and never chosen; 0 = none are.

        Raises:
            InvalidArgument: names `sampling.<field>`, the value and the limit.
        """
        _check("temperature", self.temperature, 0 <= self.temperature <= 100, "a number from 0 to 100")
        _check("top_k", self.top_k, 0 <= self.top_k < 2**32, "an integer from 0 (all) to 2**32 - 1")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0, at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "a number from 0 to 1")
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed < 2**64, "an integer from 0 to 2**64 - 1")
        repetition = self.repetition_penalty
        _check("repetition_penalty", repetition, 0 < repetition <= 100, "a number above 0, at most 100")
        _check("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "a number from -2 to 2")
        _check(
            "frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "a number from -2 to 2"
        )
        self._validate_lists()
        if vocab_size is not None:
            self._validate_tokens(vocab_size, token_count or vocab_size)

    def _validate_lists(self) -> None:
        _check_lengths(self)
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias[{token}]", bias, BAN <= bias <= -BAN, "a number from -100 to 100")
        for index, word in enumerate(self.bad_words):
            size = len(word.encode())
            _check(f"bad_words[{index}]", size, 1 <= size <= MAX_BAD_WORD_BYTES, f"1 to {MAX_BAD_WORD_BYTES} bytes")
        for index, sequence in enumerate(self.bad_words_token_ids):
            _check_sequence(index, len(sequence))

    def _validate_tokens(self, vocab_size: int, token_count: int) -> None:
        for name, tokens in (
            ("logit_bias", self.logit_bias),
            ("bad_words_token_ids", chain.from_iterable(self.bad_words_token_ids)),
            ("banned_token_ids", self.banned_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if outside is not None:
                _check(name, outside, False, f"token ids below the vocabulary size {vocab_size}")
        if not self.leaves_a_token(token_count):
            if self.allowed_token_ids:
                _check("allowed_token_ids", len(self.allowed_token_ids), False, "at least one that is not banned")
            name = "banned_token_ids" if self.banned_token_ids else "logit_bias"
            _check(name, len(self.banned), False, "leaves at least one token")

    def leaves_a_token(self, token_count: int, removed: Iterable[int] = ()) -> bool:
        """Whether some token below `token_count` can be chosen where those in `removed` cannot."""
        gone = self.banned.union(removed)
        if self.allowed_token_ids:
            return any(token < token_count and token not in gone for token in self.allowed_token_ids)
        return sum(token < token_count for token in gone) < token_count

    @cached_property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @cached_property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def banned(self) -> frozenset[int]:
        """Tokens that are never chosen, whatever the output is."""
        biased = (token for token, bias in self.logit_bias.items() if bias <= BAN)
        alone = (sequence[0] for sequence in self.bad_words_token_ids if len(sequence) == 1)
        return frozenset((*biased, *alone, *self.banned_token_ids))

    @cached_property
    def changes_argmax(self) -> bool:
        """Whether the most likely token may depend on more than the logits; min_new_tokens and constraints aside."""
        lists = self.logit_bias, self.bad_words_token_ids, self.banned_token_ids, self.allowed_token_ids
        return self.penalised or any(map(len, lists))

    @cached_property
    def phrases(self) -> dict[int, dict[tuple[int, ...], list[int]]]:
        """Of bad words with several tokens: length of all but the last -> these -> the last ones."""
        phrases: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for sequence in self.bad_words_token_ids:
            if len(sequence) > 1:
                phrases.setdefault(len(sequence) - 1, {}).setdefault(sequence[:-1], []).append(sequence[-1])
        return phrases

    @cached_property
    def banned_ids(self) -> NDArray[np.intp]:
        return np.array(sorted(self.banned), dtype=np.intp)

    @cached_property
    def allowed_ids(self) -> NDArray[np.intp]:
        return np.array(sorted(set(self.allowed_token_ids)), dtype=np.intp)

    @cached_property
    def biases(self) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        tokens = np.array(list(self.logit_bias), dtype=np.intp)
        values = np.array([-math.inf if bias <= BAN else bias for bias in self.logit_bias.values()], dtype=np.float64)
        return tokens, values


GREEDY = SamplingParams(temperature=0.0)


def _check_lengths(lists: Any) -> None:
    for name, most in _MOST.items():
        size = len(getattr(lists, name))
        _check(name, size, size <= most, f"at most {most} entries")


def _check_sequence(index: int, size: int) -> None:
    limit = f"1 to {MAX_BAD_SEQUENCE_TOKENS} tokens"
    _check(f"bad_words_token_ids[{index}]", size, 1 <= size <= MAX_BAD_SEQUENCE_TOKENS, limit)


def _check(name: str, value: float, holds: bool, limit: str) -> None:
    if not holds:  # comparisons with NaN are false
        raise InvalidArgument(f"sampling.{name}", value, limit)
