"""Structured output: from a JSON schema, regular expression, grammar or choice to a `Constraint`.

A token is allowed wherever the text can still become one that satisfies the constraint; llguidance's own default
would allow, where the text is forced, the tokenizer's way of spelling it alone. Tokens that end a request may be
chosen where the constraint is satisfied; where nothing else may follow they are all that is left.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from llguidance import LLMatcher, LLTokenizer

from graftree.constraint import FIELD, Constraint
from graftree.errors import GraftreeError, InvalidArgument
from graftree.grammar_compiler import Compiler
from graftree.text.tokenizer import Tokenizer
from graftree.v1.common_pb2 import StructuredOutputParams

MAX_BYTES = 65_536
MAX_CHOICES = 1024

_END = "<|graftree: the output may end here|>"


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
        compiler: how they are compiled.
        capacity: constraints kept, those that were refused among them.
    """

    def __init__(
        self, load: Callable[[], Tokenizer], compiler: Compiler | None = None, *, capacity: int = 64
    ) -> None:
        self._load, self._compiler, self._capacity = load, compiler or Compiler(), capacity
        self._vocabulary: _Vocabulary | None = None
        self._loading = threading.Lock()
        self._compiled: OrderedDict[bytes, LLMatcher | InvalidArgument] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Load the vocabulary, about 0.6 seconds for 50,000 tokens; what uses it waits for that.

        Raises:
            GraftreeError: as `Tokenizer.load`, or llguidance cannot read the tokenizer.
        """
        self._prepared()

    def compile(self, message: StructuredOutputParams) -> LLMatcher:
        """A matcher of its own, at the start of the output.

        Raises:
            InvalidArgument: names structured_output.<field>, with llguidance's message.
            ResourceExhausted: other constraints are taking their time.
        """
        key = message.SerializeToString(deterministic=True)
        with self._lock:
            known = self._compiled.get(key)
            if known is not None:
                self._compiled.move_to_end(key)
        if known is None:
            check(message)
            known = self._compiler.compile(message, self._prepared().tokenizer)
            with self._lock:
                self._compiled[key] = known
                if len(self._compiled) > self._capacity:
                    self._compiled.popitem(last=False)
        if isinstance(known, InvalidArgument):
            raise InvalidArgument(known.field, known.value, known.limit)
        return known.deep_copy()

    def ends(self, stop_token_ids: Iterable[int]) -> frozenset[int]:
        """Those of a request's stop tokens that may follow a satisfied constraint: the model's end-of-sequence tokens
        and others without text. A stop token with text is text like any other.

        Raises:
            InvalidArgument: there is none, so the output could not end.
        """
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
        matcher, ends, vocabulary = self.compile(message), self.ends(stop_token_ids), self._prepared()
        constraint = Constraint(
            matcher,
            end=vocabulary.end,
            vocab_size=vocab_size,
            silent=[token for token in ends if not vocabulary.source.has_text(token)],
            spoken=[token for token in ends if vocabulary.source.has_text(token)],
        )
        constraint.advance(output_ids)
        if constraint.error is not None:
            raise constraint.error
        return constraint

    def _prepared(self) -> _Vocabulary:
        with self._loading:
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
