"""`Grammars` and `check`: what is refused, with which words, and what is kept."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from graftree.errors import GraftreeError, InvalidArgument, ResourceExhausted
from graftree.grammar import Grammars, check
from graftree.grammar_compiler import Compiler
from graftree.text.detokenize import Detokenizer
from graftree.text.tokenizer import Tokenizer
from graftree.v1.common_pb2 import StructuredOutputParams

TOKENIZER = Tokenizer.load("random:llama?vocab=512")
EOS = TOKENIZER.eos_token_ids[0]


def message(**fields: Any) -> StructuredOutputParams:
    options = fields.pop("options", None)
    if options is not None:
        fields["choice"] = StructuredOutputParams.Choice(options=options)
    return StructuredOutputParams(**fields)


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({}, "structured_output", "one of json_schema"),
        ({"disable_any_whitespace": True}, "structured_output", "one of json_schema"),
        ({"json_schema": ""}, "structured_output.json_schema", "1 to 65536 bytes"),
        ({"json_schema": "é" * 32_769}, "structured_output.json_schema", "1 to 65536 bytes"),
        ({"json_object": False}, "structured_output.json_object", "true, or unset"),
        ({"regex": ""}, "structured_output.regex", "1 to 65536 bytes"),
        ({"regex": "a" * 65_537}, "structured_output.regex", "1 to 65536 bytes"),
        ({"grammar": ""}, "structured_output.grammar", "1 to 65536 bytes"),
        ({"options": []}, "structured_output.choice.options", "1 to 1024 texts"),
        ({"options": [str(i) for i in range(1025)]}, "structured_output.choice.options", "1 to 1024 texts"),
        ({"options": ["a", ""]}, "structured_output.choice.options[1]", "at least 1 byte"),
        ({"options": ["a", "b", "a"]}, "structured_output.choice.options", "different"),
        ({"options": ["a" * 40_000, "b" * 40_000]}, "structured_output.choice", "1 to 65536 bytes"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "structured_output.disable_any_whitespace",
            "json_schema or json_object",
        ),
    ],
)
def test_refused_without_a_vocabulary(fields: dict[str, Any], field: str, limit: str) -> None:
    """Each limit of StructuredOutputParams, before any compiling."""
    with pytest.raises(InvalidArgument) as caught:
        check(message(**fields))
    assert caught.value.field == field
    assert limit in caught.value.limit


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json_schema": "{"}, "valid JSON"),
        ({"json_schema": "[]"}, "object or boolean"),
        ({"json_schema": '{"type": "foo"}'}, "Invalid type: foo"),
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
        ({"json_schema": '{"type": "string", "format": "foo"}'}, "Unknown format: foo"),
        ({"json_schema": "false"}, "Unsatisfiable"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": 'foo: "a"'}, "start"),
        ({"grammar": '{"grammars": [{"lark_grammar": "start: "}]}'}, ""),
        ({"regex": "a?" * 30_000}, "too big"),
        ({"json_schema": '{"items": ' * 5000 + "{}" + "}" * 5000}, "recursion"),
        ({"json_schema": '{"const": NaN}'}, "valid JSON"),
        ({"json_schema": '{}\nfoo: "x"'}, "Extra data"),
    ],
)
def test_refused_by_the_compiler(fields: dict[str, Any], words: str) -> None:
    """The field and llguidance's own message about what the user wrote."""
    grammars = Grammars(lambda: TOKENIZER)
    with pytest.raises(InvalidArgument) as caught:
        grammars.compile(message(**fields))
    assert caught.value.field == f"structured_output.{next(iter(fields))}"
    assert words in caught.value.limit
    assert 0 < len(caught.value.limit) <= 510
    for word in ("state>", "non-verbose", "%json", "no_forcing"):
        assert word not in caught.value.limit
    with pytest.raises(InvalidArgument) as again:  # from the cache
        grammars.compile(message(**fields))
    assert str(again.value) == str(caught.value)


def test_messages_are_cut() -> None:
    """A compiler that quotes a long constraint does not fill the status."""
    with pytest.raises(InvalidArgument) as caught:
        Grammars(lambda: TOKENIZER).compile(message(regex="(" * 2000))
    assert len(caught.value.limit) < 510


def test_the_last_used_are_kept() -> None:
    """A bounded cache: what was used last stays, and every caller has a matcher of its own."""
    grammars = Grammars(lambda: TOKENIZER, capacity=2)
    first = grammars.compile(message(regex="a"))
    assert first.consume_token(ord("a"))
    grammars.compile(message(regex="b"))
    assert grammars.compile(message(regex="a")).consume_token(ord("a"))
    grammars.compile(message(regex="c"))
    kept = [StructuredOutputParams.FromString(key).regex for key in grammars._compiled]
    assert kept == ["a", "c"]


def test_the_vocabulary_is_loaded_once() -> None:
    """However many threads ask first."""
    loads: list[int] = []

    def load() -> Tokenizer:
        loads.append(1)
        return TOKENIZER

    grammars = Grammars(load)
    threads = [threading.Thread(target=grammars.compile, args=(message(regex="a{3}"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


def test_a_tokenizer_that_cannot_be_loaded() -> None:
    """Its error is the caller's, each time."""

    def load() -> Tokenizer:
        raise GraftreeError("none")

    grammars = Grammars(load)
    for _ in range(2):
        with pytest.raises(GraftreeError, match="none"):
            grammars.compile(message(regex="a"))


def test_a_constraint_too_complex_to_follow() -> None:
    """A limit that is hit on the way is an error of the request, not a hang and not a wrong token."""
    compiler = Compiler(limits=LLParserLimits(max_items_in_row=5, verbose_errors=False))
    ambiguous = message(grammar='start: x+\nx: "a" | x x | "b" x')
    constraint = Grammars(lambda: TOKENIZER, compiler).constrain(ambiguous, vocab_size=512, stop_token_ids=[EOS])

    def follow() -> None:
        for length in range(30):
            constraint.allowed([ord("a")] * length)

    for _ in range(2):
        with pytest.raises(InvalidArgument, match="simple enough"):
            follow()
    assert constraint.allowed()[ord("a")]
    constraint.advance([ord("a")] * 30)
    assert constraint.error is not None


def test_rules_that_chain_deeply() -> None:
    """More recursion than a usual thread's stack holds."""
    chain = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(4500)), 'a4500: "b"'])
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1500)}
    schema = {"$ref": "#/$defs/a0", "$defs": links | {"a1500": {"const": "b"}}}
    for fields, first in (({"grammar": chain}, "b"), ({"json_schema": json.dumps(schema)}, '"')):
        grammars = Grammars(lambda: TOKENIZER)
        assert grammars.constrain(message(**fields), vocab_size=512, stop_token_ids=[EOS]).allowed()[ord(first)]
    assert threading.stack_size() == 0


def test_forced_text_is_not_looked_at_before_its_time() -> None:
    """However much of it there is: 10^18 characters here."""
    endless = message(regex="((((((a{1000}){1000}){1000}){1000}){1000}){1000})")
    constraint = Grammars(lambda: TOKENIZER).constrain(endless, vocab_size=512, stop_token_ids=[EOS])
    assert TOKENIZER.decode(np.flatnonzero(constraint.allowed()).tolist()) == "aaa"  # "a" and "aa"


class Stuck(Compiler):
    """Compiles when it is released."""

    def __init__(self) -> None:
        super().__init__(seconds=0.05, threads=1)
        self.released = threading.Event()

    def run(self, *arguments: Any) -> Any:
        assert self.released.wait(20)
        return super().run(*arguments)


def test_a_constraint_that_takes_too_long() -> None:
    """Its request is refused, others are told to come again while it goes on, and all is well when it is done."""
    compiler = Stuck()
    grammars = Grammars(lambda: TOKENIZER, compiler)
    with pytest.raises(InvalidArgument, match=r"structured_output\.regex.*compiles within 0\.05 s"):
        grammars.compile(message(regex="a"))
    with pytest.raises(ResourceExhausted):
        grammars.compile(message(regex="b"))
    compiler.released.set()
    compiler._seconds = 20
    assert grammars.compile(message(regex="b")).consume_token(ord("b"))


def test_schemas_may_choose_their_white_space() -> None:
    """`disable_any_whitespace` overrules a schema's own `x-guidance`; unset leaves it to the schema."""
    grammars = Grammars(lambda: TOKENIZER)
    base = {"type": "array", "items": {"type": "null"}, "minItems": 1}
    tight = json.dumps(base | {"x-guidance": {"whitespace_flexible": False}})
    for fields, spaces in (
        ({"json_schema": json.dumps(base)}, True),
        ({"json_schema": json.dumps(base), "disable_any_whitespace": True}, False),
        ({"json_schema": tight}, False),
        ({"json_object": True}, True),
        ({"json_object": True, "disable_any_whitespace": True}, False),
    ):
        constraint = grammars.constrain(message(**fields), vocab_size=512, stop_token_ids=[EOS])
        begin = [ord("{" if "json_object" in fields else "[")]
        assert constraint.allowed(begin)[ord(" ")] == spaces


def test_bytes_of_a_sentencepiece_vocabulary() -> None:
    """Words with a mark for the space, and single bytes for the rest, as Llama 2 has it: any text can be spelled."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁a", "b", "▁word", "s"]
    tokens = [*words, *(f"<0x{value:02X}>" for value in range(256))]
    backend = Backend(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = Tokenizer(backend, eos_token_ids=[2])
    for text in (" words", "é a b€", "x"):
        constraint = Grammars(lambda: tokenizer).constrain(
            message(options=[text]), vocab_size=len(tokens), stop_token_ids=[2]
        )
        output: list[int] = []
        while (token := int(np.flatnonzero(constraint.allowed(output))[-1])) != 2:
            output.append(token)
        detokenizer = Detokenizer(tokenizer, [5, 5])
        assert "".join(detokenizer.push(token) for token in output) + detokenizer.flush() == text
