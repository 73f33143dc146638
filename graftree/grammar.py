"""Structured output: which tokens a JSON schema, regular expression, grammar or choice allows behind an output.

llguidance follows the constraint. A `Constraint` says for any path of tokens behind the committed output which
tokens may follow, so every tree node has the state that plain decoding would have there: the states are a function
of the tokens alone, and moving between two of them costs the tokens by which they differ.

Where a constraint leaves one text only, llguidance allows one token at a time: the tokenizer's own way to spell it.
Tokens that end a request may be chosen where the constraint is satisfied; where nothing else may follow they are all
that is left.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from graftree.errors import GraftreeError, InvalidArgument
from graftree.text.tokenizer import Tokenizer
from graftree.v1.common_pb2 import StructuredOutputParams

MAX_BYTES = 65_536
MAX_CHOICES = 1024
FIELD = "structured_output"

_END = "<|graftree: the output may end here|>"
_MESSAGE_LIMIT = 500  # characters of llguidance's words that travel
# Bounds on what one constraint may cost; without `verbose_errors` messages hold no output text.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def check(message: StructuredOutputParams) -> None:
    """Everything that needs no vocabulary.

    Raises:
        InvalidArgument: names structured_output.<field>, its size and the limit.
    """
    kind = message.WhichOneof("constraint")
    if kind is None:
        raise InvalidArgument(FIELD, "none", "one of json_schema, json_object, regex, grammar and choice")
    field = f"{FIELD}.{kind}"
    if message.disable_any_whitespace and kind not in ("json_schema", "json_object"):
        raise InvalidArgument(f"{FIELD}.disable_any_whitespace", True, "false without json_schema or json_object")
    if kind == "json_object":
        if not message.json_object:
            raise InvalidArgument(field, False, "true, or unset")
        return
    if kind == "choice":
        options = message.choice.options
        if not 1 <= len(options) <= MAX_CHOICES:
            raise InvalidArgument(f"{field}.options", len(options), f"1 to {MAX_CHOICES} texts")
        if not all(options):
            raise InvalidArgument(f"{field}.options[{list(options).index('')}]", "0 bytes", "at least 1 byte")
        if len(set(options)) < len(options):
            raise InvalidArgument(f"{field}.options", f"{len(options)} texts", "different ones")
        size = sum(len(option.encode()) for option in options)
    else:
        size = len(getattr(message, kind).encode())
    if not 1 <= size <= MAX_BYTES:
        raise InvalidArgument(field, f"{size} bytes", f"1 to {MAX_BYTES} bytes")


class Grammars:
    """Compiles constraints for one model's vocabulary, and keeps the ones used last. Thread-safe.

    Args:
        load: the model's tokenizer; called once, on first use.
        capacity: constraints kept.
    """

    def __init__(self, load: Callable[[], Tokenizer], *, capacity: int = 64) -> None:
        self._load, self._capacity = load, capacity
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Load the vocabulary, about 0.6 seconds for 50,000 tokens; what uses it waits for that.

        Raises:
            GraftreeError: as `Tokenizer.load`, or llguidance cannot read the tokenizer.
        """
        with self._lock:
            self._prepared()

    def compile(self, message: StructuredOutputParams) -> LLMatcher:
        """A matcher of its own, at the start of the output.

        Raises:
            InvalidArgument: names structured_output.<field>, with llguidance's message.
        """
        key = message.SerializeToString(deterministic=True)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is None:
                check(message)
                matcher = self._compiled[key] = _compile(message, self._prepared().tokenizer)
                if len(self._compiled) > self._capacity:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return matcher.deep_copy()

    def ends(self, stop_token_ids: Iterable[int]) -> frozenset[int]:
        """Those of a request's stop tokens that may follow a satisfied constraint: the model's end-of-sequence tokens
        and others without text. A stop token with text is text like any other.

        Raises:
            InvalidArgument: there is none, so the output could not end.
        """
        with self._lock:
            tokenizer = self._prepared().source
        ends = frozenset(
            token for token in stop_token_ids if token in tokenizer.eos_token_ids or not tokenizer.has_text(token)
        )
        if not ends:
            limit = "at least one: structured output ends with an end-of-sequence token, or a stop token without text"
            raise InvalidArgument("stopping.stop_token_ids", "no token to end with", limit)
        return ends

    def constrain(
        self,
        message: StructuredOutputParams,
        *,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        output_ids: Sequence[int] = (),
    ) -> Constraint:
        """The state of one sequence.

        Args:
            message: the constraint.
            vocab_size: V, rows of the model's logits: those beyond the tokenizer's table are never allowed.
            stop_token_ids: tokens that end the request.
            output_ids: tokens generated so far.

        Raises:
            InvalidArgument: the constraint cannot be compiled, the request has no token to end with, or
                `output_ids` do not follow the constraint.
        """
        matcher, ends = self.compile(message), self.ends(stop_token_ids)
        with self._lock:
            vocabulary = self._prepared()
        constraint = Constraint(
            matcher,
            end=vocabulary.end,
            vocab_size=vocab_size,
            silent=[token for token in ends if not vocabulary.source.has_text(token)],
            spoken=[token for token in ends if vocabulary.source.has_text(token)],
        )
        constraint.advance(output_ids)
        return constraint

    def _prepared(self) -> _Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._load())
        return self._vocabulary


class _Vocabulary:
    """llguidance's view of a tokenizer.

    It knows one more token, the end of the output, and takes the model's own end-of-sequence tokens for tokens like
    others: which of them end a request is the request's to say.
    """

    def __init__(self, source: Tokenizer) -> None:
        self.source = source
        self.end = 1 + max(source.backend.get_vocab(with_added_tokens=True).values())
        description = json.loads(source.backend.to_str())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        description["added_tokens"].append({"id": self.end, "content": _END, "special": True, **flags})
        try:
            self.tokenizer = LLTokenizer(json.dumps(description), eos_token=self.end)
        except ValueError as error:
            raise GraftreeError(f"structured output cannot use this tokenizer: {error}") from error


class Constraint:
    """Where one sequence stands in its grammar. Used on one thread at a time.

    Args:
        matcher: at the start of the output; this object's own.
        end: bit of the matcher's mask that says whether the output may end.
        vocab_size: V.
        silent: tokens that end a request and have no text. They may be part of a grammar that names them.
        spoken: end-of-sequence tokens with text: they never stand for it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        end: int,
        vocab_size: int,
        silent: Collection[int],
        spoken: Collection[int] = (),
    ) -> None:
        self._matcher, self._end, self._vocab_size = matcher, end, vocab_size
        self._ends = frozenset((*silent, *spoken))
        self._silent, self._spoken = (
            np.array(sorted(token for token in tokens if token < vocab_size), dtype=np.intp)
            for tokens in (silent, spoken)
        )
        self._path: list[int] = []  # where the matcher stands, from the committed output
        self._ended = False

    def fork(self) -> Constraint:
        """The same state, to go another way."""
        self._move(())
        copy = object.__new__(Constraint)
        copy.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy(), _path=[])
        return copy

    def allowed(self, path: Sequence[int] = ()) -> NDArray[np.bool_]:
        """(V,) which tokens may follow the committed output and `path`.

        Behind a token that ends the request it is the ending tokens: what is said there reaches nobody.

        Raises:
            InvalidArgument: the constraint does not allow `path`, or is too complex to follow.
        """
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        if self._ended or not self._ends.isdisjoint(path):
            mask[self._silent] = mask[self._spoken] = True
            return mask
        self._move(path)
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        self._raise_if_broken()
        text = bits[: self._vocab_size].astype(np.bool_)
        mask[: text.size] = text
        if self._end < self._vocab_size:
            mask[self._end] = False
        may_end = bool(bits[self._end])
        mask[self._silent] |= may_end
        mask[self._spoken] = may_end
        if not may_end and np.count_nonzero(mask) == 1:
            # What the vocabulary cannot spell comes out as the tokenizer's word for the unknown.
            only = int(np.argmax(mask))
            mask[only] = self._matcher.validate_tokens([only]) == 1
        return mask

    def advance(self, token_ids: Sequence[int]) -> None:
        """Commit output tokens; those behind a token that ends the request do not count.

        Raises:
            InvalidArgument: the constraint does not allow one, or is too complex to follow.
        """
        if self._ended:
            return
        text = list(takewhile(lambda token: token not in self._ends, token_ids))
        self._move(text)
        self._path = []
        self._ended = len(text) < len(token_ids)

    def _move(self, path: Sequence[int]) -> None:
        """Take the matcher to `path`: back to what both have in common, then forward."""
        common = 0
        for here, there in zip(self._path, path, strict=False):
            if here != there:
                break
            common += 1
        if len(self._path) > common:
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
        consumed = self._matcher.try_consume_tokens(list(path[common:]))
        self._path += path[common : common + consumed]
        self._raise_if_broken()
        if len(self._path) < len(path):
            token = path[len(self._path)]
            raise InvalidArgument(FIELD, f"token {token}", "output that the constraint allows")

    def _raise_if_broken(self) -> None:
        if self._matcher.is_error():
            limit = f"a constraint that is simple enough to follow: {_words(self._matcher.get_error())}"
            raise InvalidArgument(FIELD, "a constraint", limit)


def _compile(message: StructuredOutputParams, tokenizer: LLTokenizer) -> LLMatcher:
    kind = message.WhichOneof("constraint")
    assert kind is not None, "checked"
    matcher, error = None, ""
    try:
        matcher = LLMatcher(tokenizer, _grammar(message, kind), log_level=0, limits=_LIMITS)
        error = matcher.get_error()
    except ValueError as invalid:
        error = str(invalid)
    if matcher is None or matcher.is_error():
        given = getattr(message, kind)
        size = f"{len(given.encode())} bytes" if isinstance(given, str) else "given"
        raise InvalidArgument(f"{FIELD}.{kind}", size, _words(error))
    return matcher


def _grammar(message: StructuredOutputParams, kind: str) -> str:
    match kind:
        case "json_schema" | "json_object":
            schema = message.json_schema if kind == "json_schema" else '{"type": "object"}'
            if message.disable_any_whitespace:
                return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
            return LLMatcher.grammar_from_json_schema(schema)
        case "regex":
            return LLMatcher.grammar_from_regex(message.regex)
        case "grammar":
            return LLMatcher.grammar_from_lark(message.grammar)
        case _:
            texts = (json.dumps(option, ensure_ascii=False) for option in message.choice.options)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))


def _words(error: str) -> str:
    """llguidance's message, without its debugging output."""
    text = error.split("\n<state>")[0].removesuffix("<non-verbose/>").strip()
    return text if len(text) <= _MESSAGE_LIMIT else text[:_MESSAGE_LIMIT] + " …"
