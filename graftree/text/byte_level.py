"""The byte-level tokenizer of random models: any UTF-8 text round-trips, nothing is unknown.

vocabulary V                 ids
V >= 262                     0..255 the bytes, 256..261 `SPECIALS`, then merged pairs of bytes
256 <= V < 262               0..255 the bytes, then pairs; no special tokens
V < 256                      the first V bytes of `_ALPHABET`, most used first; no special tokens. Other bytes
                             are encoded as id 0, so ids still decode but not every text round-trips
"""

from __future__ import annotations

import random

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BOS, EOS = "<|bos|>", "<|eos|>"
SPECIALS = (BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
EOS_ID = 256 + SPECIALS.index(EOS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_LETTERS = b" etaoinshrdlcumwfgypbvk"
_ALPHABET = bytes(dict.fromkeys(_LETTERS + b"\n.,'xjqz" + bytes(range(32, 127)) + bytes(range(256))))


def has_specials(vocab: int) -> bool:
    """Whether a vocabulary of this size has BOS, EOS and the chat roles."""
    return vocab >= 256 + len(SPECIALS)


def id_order(vocab: int, permute: int) -> list[int]:
    """(vocab,) the id in the permuted vocabulary of each token of the plain one; special tokens keep theirs."""
    order = list(range(vocab))
    if permute:
        ordinary = [token for token in order if not _is_special(token, vocab)]
        shuffled = random.Random(permute).sample(ordinary, len(ordinary))
        for old, new in zip(ordinary, shuffled, strict=True):
            order[old] = new
    return order


def build(vocab: int, permute: int = 0) -> Tokenizer:
    """Build the tokenizer.

    Args:
        vocab: number of tokens, 2 to 65,798.
        permute: other than 0 shuffles the ids of everything but the special tokens, one order per value.
    """
    symbols = _byte_symbols()
    values = range(256) if vocab >= 256 else _ALPHABET[:vocab]
    specials = SPECIALS if has_specials(vocab) else ()
    pairs = _pairs(max(0, vocab - 256 - len(specials)))
    ordinary = [symbols[value] for value in values] + [symbols[a] + symbols[b] for a, b in pairs]
    order = id_order(vocab, permute)
    table = dict(zip(ordinary, (new for old, new in enumerate(order) if not _is_special(old, vocab)), strict=True))
    merges = [(symbols[a], symbols[b]) for a, b in pairs]
    unknown = min(table, key=table.__getitem__) if vocab < 256 else None
    model = BPE(vocab={**table, **{token: 256 + index for index, token in enumerate(specials)}}, merges=merges)
    if unknown is not None:
        model.unk_token = unknown
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def _is_special(token: int, vocab: int) -> bool:
    return has_specials(vocab) and 256 <= token < 256 + len(SPECIALS)


def _byte_symbols() -> list[str]:
    """(256,) the printable character that stands for each byte, as GPT-2's byte-level BPE has it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(rest)) for value in range(256)]


def _pairs(count: int) -> list[tuple[int, int]]:
    """The first `count` byte pairs: pairs of frequent letters, then all others."""
    chosen = [(a, b) for a in _LETTERS for b in _LETTERS][:count]
    if len(chosen) < count:
        taken = set(chosen)
        chosen += [(a, b) for a in range(256) for b in range(256) if (a, b) not in taken][: count - len(chosen)]
    return chosen
