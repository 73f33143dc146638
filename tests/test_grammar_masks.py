"""`Constraint`: masks against brute force, at every path."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from graftree.constraint import Constraint
from graftree.errors import InvalidArgument
from graftree.grammar import Grammars
from graftree.text.tokenizer import Tokenizer
from graftree.v1.common_pb2 import StructuredOutputParams

BYTE_LEVEL = "random:llama?vocab=512"
EOS = 257
BOS = 256
V = 512


@functools.lru_cache
def grammars(uri: str = BYTE_LEVEL) -> Grammars:
    return Grammars(lambda: tokenizer(uri))


@functools.lru_cache
def tokenizer(uri: str = BYTE_LEVEL) -> Tokenizer:
    return Tokenizer.load(uri)


def constrain(
    message: StructuredOutputParams,
    output: Sequence[int] = (),
    *,
    uri: str = BYTE_LEVEL,
    vocab_size: int = V,
    stops: Sequence[int] = (EOS,),
) -> Constraint:
    return grammars(uri).constrain(message, vocab_size=vocab_size, stop_token_ids=stops, output_ids=output)


def regex(source: str) -> StructuredOutputParams:
    return StructuredOutputParams(regex=source)


def choice(*options: str) -> StructuredOutputParams:
    return StructuredOutputParams(choice=StructuredOutputParams.Choice(options=options))


def ids(constraint: Constraint, path: Sequence[int] = ()) -> list[int]:
    return [int(token) for token in np.flatnonzero(constraint.allowed(path))]


def spell(text: str) -> list[int]:
    return list(text.encode())


def texts(constraint: Constraint, path: tuple[int, ...] = ()) -> Iterator[str]:
    """Every text that masks lead to, by every way of spelling it."""
    for token in ids(constraint, path):
        if token == EOS:
            yield tokenizer().decode(path)
        else:
            yield from texts(constraint, (*path, token))


LANGUAGES = {
    "choice": (choice("the", "then", "other", "oth", "é€", 'a "quoted"\\\n\x01'), None),
    "regex": (regex("(at|he)?(n|nt){1,2}[0-2]"), None),
    "lark": (
        StructuredOutputParams(grammar='start: pair ("," pair)?\npair: "x" "=" VALUE\nVALUE: "1" | "in"'),
        {f"x={a}" for a in ("1", "in")} | {f"x={a},x={b}" for a in ("1", "in") for b in ("1", "in")},
    ),
    "schema": (
        StructuredOutputParams(
            json_schema='{"type": "array", "items": {"enum": ["on", "one", 1, null]}, "maxItems": 2}',
            disable_any_whitespace=True,
        ),
        {"[]"}
        | {f"[{a}]" for a in ('"on"', '"one"', "1", "null")}
        | {f"[{a},{b}]" for a in ('"on"', '"one"', "1", "null") for b in ('"on"', '"one"', "1", "null")},
    ),
}


@functools.lru_cache
def language(name: str) -> frozenset[str]:
    message, given = LANGUAGES[name]
    if name == "choice":
        return frozenset(message.choice.options)
    if name == "regex":
        parts = [a + "".join(b) + c for a in ("", "at", "he") for b in _repeats("n", "nt") for c in "012"]
        assert all(re.fullmatch(message.regex, part) for part in parts)
        return frozenset(parts)
    assert given is not None
    return frozenset(given)


def _repeats(*atoms: str) -> Iterator[str]:
    yield from atoms
    yield from (a + b for a in atoms for b in atoms)


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_lead_to_the_language(name: str) -> None:
    """What can be said under the masks is exactly the constraint's language: nothing else, and all of it."""
    assert frozenset(texts(constrain(LANGUAGES[name][0]))) == language(name)


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_are_those_of_brute_force(name: str) -> None:
    """At every path a token is allowed iff some text of the language goes on with its bytes, EOS iff it is one."""
    vocabulary = {token: _bytes(token) for token in range(V) if tokenizer().has_text(token)}
    wanted = [text.encode() for text in language(name)]
    constraint = constrain(LANGUAGES[name][0])
    todo, seen = [()], 0
    while todo:
        path = todo.pop()
        seen += 1
        said = b"".join(vocabulary[token] for token in path)
        rests = [text[len(said) :] for text in wanted if text.startswith(said)]
        fitting = {t for t, spelt in vocabulary.items() if any(rest and rest.startswith(spelt) for rest in rests)}
        allowed = set(ids(constraint, path))
        assert allowed == fitting | ({EOS} if b"" in rests else set())
        todo += [(*path, token) for token in sorted(allowed - {EOS})[:3]]
    assert seen > 20


@functools.lru_cache
def _bytes(token: int) -> bytes:
    table = {symbol: value for value, symbol in enumerate(_symbols())}
    return bytes(table[symbol] for symbol in tokenizer().backend.id_to_token(token))


def _symbols() -> list[str]:
    """GPT-2's printable stand-in of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(rest)) for value in range(256)]


WANDERING = [
    regex(r"(the|there|then) [a-z]{1,5}(at|another)+"),
    StructuredOutputParams(grammar='start: ("the " | "another" | "ether")+ "end"'),
    StructuredOutputParams(
        json_schema='{"type": "object", "properties": {"name": {"type": "string", "maxLength": 5},'
        ' "kind": {"enum": ["on", "one"]}, "n": {"type": "array", "items": {"type": "integer"}}},'
        ' "required": ["name", "kind", "n"]}'
    ),
    StructuredOutputParams(json_object=True, disable_any_whitespace=True),
]


@pytest.mark.parametrize("message", WANDERING, ids=["regex", "lark", "schema", "object"])
@pytest.mark.parametrize("seed", range(5))
def test_a_mask_depends_on_the_tokens_alone(message: StructuredOutputParams, seed: int) -> None:
    """A mask is the same whichever paths were asked for before, and whether its tokens are draft or committed."""
    source = random.Random(seed)
    constraint, output = constrain(message), list[int]()
    for _ in range(12):
        path: list[int] = []
        for _ in range(source.randrange(6)):  # one branch of a tree, node by node
            options = [token for token in ids(constraint, path) if token != EOS]
            if not options:
                break
            path.append(source.choice(options))
        for cut in source.sample(range(len(path) + 1), len(path) + 1):
            expected = constrain(message, output + path[:cut]).allowed()
            assert np.array_equal(constraint.allowed(path[:cut]), expected)
            assert np.array_equal(constraint.fork().allowed(path[:cut]), expected)
        taken = path[: source.randrange(len(path) + 1)]
        constraint.advance(taken)
        output += taken


def test_forks_go_their_own_ways() -> None:
    """What one fork commits does not move the other."""
    one = constrain(choice("ab", "cd"))
    other = one.fork()
    one.advance(spell("a"))
    other.advance(spell("c"))
    assert (ids(one), ids(other)) == (spell("b"), spell("d"))


# Ends.


def test_every_end_of_sequence_token_ends() -> None:
    """A complete text leaves the model's EOS tokens and stop tokens without text, and nothing else."""
    uri = "random:llama?vocab=512&eos=257,259"
    constraint = constrain(regex("ab"), spell("ab"), uri=uri, stops=[257, 259, 260, ord("x")])
    assert ids(constraint) == [257, 259, 260]
    assert ids(constraint, [259]) == [257, 259, 260]
    constraint.advance([257, 5, 6])
    assert ids(constraint) == ids(constraint, [1, 2]) == [257, 259, 260]


def test_an_incomplete_text_does_not_end() -> None:
    """Where the text may end and may go on, both are allowed; where it may not end, no end is."""
    constraint = constrain(regex("a+"))
    assert EOS not in ids(constraint)
    assert EOS in ids(constraint, spell("a"))
    assert ord("a") in ids(constraint, spell("a"))


def test_a_stop_token_with_text_is_text() -> None:
    """It is allowed where its text is, not instead of it."""
    constraint = constrain(regex("a[xy]"), stops=[EOS, ord("x")])
    assert ids(constraint, spell("a")) == spell("xy")
    assert ids(constraint, spell("ay")) == [EOS]


def test_an_end_of_sequence_token_with_text_is_no_text() -> None:
    """It would end the request in the middle."""
    uri = f"random:llama?vocab=512&eos={ord('x')}"
    constraint = constrain(regex("a[xy]"), uri=uri, stops=[ord("x")])
    assert ids(constraint, spell("a")) == spell("y")
    assert ids(constraint, spell("ay")) == spell("x")


def test_a_request_that_cannot_end_is_refused() -> None:
    """No end-of-sequence token (ignore_eos) and no stop token without text."""
    for stops in ([], [ord("x")]):
        with pytest.raises(InvalidArgument, match=r"stopping\.stop_token_ids") as caught:
            constrain(regex("a"), stops=stops)
        assert caught.value.field == "stopping.stop_token_ids"


def test_grammars_may_name_special_tokens() -> None:
    """Otherwise special tokens are never text."""
    assert BOS not in ids(constrain(regex("(?s:.)*")))
    constraint = constrain(StructuredOutputParams(grammar='start: "a" <|bos|> "b"'))
    assert ids(constraint, spell("a")) == [BOS]
    assert ids(constraint, [*spell("a"), BOS]) == spell("b")


# Vocabularies.


def test_padding_is_never_allowed() -> None:
    """Rows of the logits beyond the tokenizer's table, of which one is where llguidance keeps its own end."""
    constraint = constrain(regex("(?s:.)*"), vocab_size=V + 40)
    mask = constraint.allowed()
    assert mask.shape == (V + 40,)
    assert not mask[V:].any()
    assert mask[EOS]


def test_a_model_may_have_fewer_rows_than_the_tokenizer() -> None:
    """Tokens it cannot say do not exist."""
    mask = constrain(regex("(?s:.)*"), vocab_size=300).allowed()
    assert mask.shape == (300,)
    assert mask[ord("a")]


def test_ids_in_another_order() -> None:
    """The table, not the id, says what a token spells."""
    uri = "random:llama?vocab=512&permute=3"
    constraint, wanted = constrain(choice("the end"), uri=uri), tokenizer(uri).encode("the end")
    for cut, token in enumerate(wanted):
        assert token in ids(constraint, wanted[:cut])
    assert ids(constraint, wanted) == [EOS]


def test_what_the_vocabulary_cannot_spell_is_a_dead_end() -> None:
    """It leaves nothing, rather than the token that stands for the unknown."""
    uri = "random:llama?vocab=20"
    known = tokenizer(uri).encode("e")
    constraint = constrain(regex("eZ|t"), uri=uri, vocab_size=20, stops=[25])
    for _ in range(2):
        assert ids(constraint) == [*known, *tokenizer(uri).encode("t")]
        assert ids(constraint, known) == []
    constraint.advance(known)
    assert ids(constraint) == ids(constraint.fork()) == []


# Failures.


def test_a_path_that_is_not_allowed_is_an_error() -> None:
    """And the constraint is where it was."""
    constraint = constrain(regex("abc"))
    with pytest.raises(InvalidArgument, match="token 120"):
        constraint.allowed(spell("ax"))
    assert ids(constraint, spell("ab")) == spell("c")
    constraint.advance(spell("ax"))
    with pytest.raises(InvalidArgument, match="token 120"):
        constraint.allowed()


def test_an_output_that_is_not_allowed_is_refused() -> None:
    """A session that is opened with it was never under this constraint."""
    with pytest.raises(InvalidArgument, match="structured_output"):
        constrain(regex("abc"), spell("abd"))
