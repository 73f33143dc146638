"""`Compiler`: constraints into llguidance's matchers, none of which may take the process with it.

llguidance bounds most of what a grammar costs, but not all: it recurses as deep as rules and references chain, and it
compares every pair of a schema's patternProperties. So it compiles on threads with a deep stack, few at a time, and
nobody waits for one longer than agreed.
"""

from __future__ import annotations

import json
import threading
from queue import Empty, SimpleQueue
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from graftree.constraint import FIELD, words
from graftree.errors import InvalidArgument, ResourceExhausted
from graftree.v1.common_pb2 import StructuredOutputParams

# Without `verbose_errors` messages hold no output text. Measured: 100,000 of fuel take 0.2 s and are enough for an
# alternation of 9,000 words; the default, 1,000,000, takes 40 s where a regex makes the most of it.
LIMITS = LLParserLimits(initial_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)

_STACK_BYTES = 256 << 20  # address space, not memory; 8 MiB overflow at 3,000 rules that name each other
_EXACT = '\n%llguidance {"no_forcing": true}'
_starting = threading.Lock()  # the stack size is one setting for all threads that start


class Compiler:
    """Thread-safe.

    Args:
        seconds: longest wait for one constraint.
        threads: most constraints that compile at once, those that nobody waits for any more among them.
        limits: llguidance's own.
    """

    def __init__(self, *, seconds: float = 5.0, threads: int = 2, limits: LLParserLimits = LIMITS) -> None:
        self._seconds, self._limits = seconds, limits
        self._slots = threading.BoundedSemaphore(threads)

    def compile(self, message: StructuredOutputParams, tokenizer: LLTokenizer) -> LLMatcher | InvalidArgument:
        """A matcher at the start of the output, or why there is none.

        Args:
            message: passed `graftree.grammar.check`.

        Raises:
            ResourceExhausted: all threads are busy and stay so.
        """
        if not self._slots.acquire(timeout=self._seconds):
            raise ResourceExhausted("other requests' structured output is being compiled")
        done: SimpleQueue[LLMatcher | InvalidArgument] = SimpleQueue()

        def run() -> None:
            try:
                done.put(self.run(message, tokenizer))
            finally:
                self._slots.release()

        with _starting:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                threading.Thread(target=run, name="grammar compiler", daemon=True).start()
            finally:
                threading.stack_size(usual)
        try:
            return done.get(timeout=self._seconds)
        except Empty:
            return _refusal(message, f"one that compiles within {self._seconds:g} s")

    def run(self, message: StructuredOutputParams, tokenizer: LLTokenizer) -> LLMatcher | InvalidArgument:
        """`compile` on this thread, however long it takes."""
        try:
            grammar = json.dumps({"grammars": [{"lark_grammar": _lark(message) + _EXACT}]})
        except (ValueError, RecursionError) as error:
            return _refusal(message, f"valid JSON: {error}")
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        return _refusal(message, _clean(matcher.get_error())) if matcher.is_error() else matcher


def _lark(message: StructuredOutputParams) -> str:
    match message.WhichOneof("constraint"):
        case "json_schema":
            return "start: %json " + json.dumps(_schema(message, json.loads(message.json_schema)), allow_nan=False)
        case "json_object":
            return "start: %json " + json.dumps(_schema(message, {"type": "object"}))
        case "regex":
            wrapped = json.loads(LLMatcher.grammar_from_regex(message.regex))
            return str(wrapped["grammars"][0]["lark_grammar"])
        case "grammar":
            return message.grammar
        case _:
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in message.choice.options)


def _schema(message: StructuredOutputParams, schema: Any) -> Any:
    if message.disable_any_whitespace and isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        return schema | {"x-guidance": (own if isinstance(own, dict) else {}) | {"whitespace_flexible": False}}
    return schema


def _clean(error: str) -> str:
    """A compiler's message without what was wrapped around the user's text."""
    _, found, about_schema = error.partition("failed to compile JSON schema: ")
    if found:
        return about_schema.partition("\n")[0]
    return "\n".join(line for line in error.split("\n") if not line.endswith(_EXACT.strip()))


def _refusal(message: StructuredOutputParams, limit: str) -> InvalidArgument:
    kind = message.WhichOneof("constraint")
    assert kind is not None, "checked"
    given = getattr(message, kind)
    return InvalidArgument(
        f"{FIELD}.{kind}", f"{len(given.encode())} bytes" if isinstance(given, str) else "given", words(limit)
    )
