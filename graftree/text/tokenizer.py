"""`Tokenizer`: text to token ids and back, with the `tokenizers` library alone (no torch, no transformers)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from graftree.errors import Incompatible, InvalidArgument
from graftree.models.pull import pull
from graftree.models.spec import eos_token_ids
from graftree.models.uri import ModelUri
from graftree.text import byte_level
from graftree.text.chat import ChatTemplate

_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer and chat template.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        vocab_size: tokens really in the table (a model's embedding may have more rows).
        token_count: ids at or above this are not in the table.
        vocab_fingerprint: SHA-256 (hex) over the (id, token) table, the same for models that differ in padding only.
        bos_token_id: None where there is none.
        eos_token_ids: every token that ends a text, ascending.
        has_chat_template: whether `render_chat` works.
        byte_fallback: token id -> byte of the tokens that stand for one byte each and are decoded a run at a time, as
            SentencePiece's are; empty for byte-level vocabularies.
        anchor: some token with text that is none of these; None for byte-level vocabularies.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._template_source = chat_template
        self._template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        table = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = len(table)
        self.token_count = 1 + max(table.values(), default=-1)
        self.vocab_fingerprint = _fingerprint(table)
        special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._text_ids = frozenset(table.values()) - special
        self.byte_fallback = _byte_fallback(backend)
        self.anchor = self._word() if self.byte_fallback else None
        bos = self.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)

    @classmethod
    def load(cls, uri: str | ModelUri) -> Tokenizer:
        """The tokenizer of a model; the model is pulled where it must be.

        Raises:
            InvalidArgument: the URI is none, or its directory has no tokenizer.json.
            Unavailable: the model could not be downloaded or converted.
        """
        parsed = ModelUri.parse(uri)
        if parsed.kind == "standin":
            parsed = ModelUri.parse(f"random:llama?vocab={parsed.integer('vocab')}")
        if parsed.kind == "random":
            return cls._byte_level(parsed)
        return cls.from_directory(pull(parsed, progress=False, weights=False))

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and the configurations' EOS ids.

        Raises:
            InvalidArgument: there is no tokenizer.json that can be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidArgument("model", directory.name, "a directory with tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise InvalidArgument("model", directory.name, f"a tokenizer.json that can be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        special = {name: text for name in _TOKEN_VARIABLES if (text := _token_text(config.get(name))) is not None}
        ends = set(
            eos_token_ids(_read_json(directory / "config.json"), _read_json(directory / "generation_config.json"))
        )
        if not ends and "eos_token" in special and (end := backend.token_to_id(special["eos_token"])) is not None:
            ends.add(end)
        return cls(
            backend,
            eos_token_ids=tuple(ends),
            special_tokens=special,
            chat_template=_read_template(directory, config),
        )

    @classmethod
    def _byte_level(cls, uri: ModelUri) -> Tokenizer:
        vocab, eos = uri.integer("vocab"), uri.options["eos"]
        specials = byte_level.has_specials(vocab)
        if eos is None:
            eos = (byte_level.EOS_ID,) if specials else ()
        assert isinstance(eos, tuple)
        return cls(
            byte_level.build(vocab, uri.integer("permute")),
            eos_token_ids=eos,
            special_tokens={"bos_token": byte_level.BOS, "eos_token": byte_level.EOS} if specials else {},
            chat_template=byte_level.CHAT_TEMPLATE if specials else None,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with or without the special tokens the model's tokenizer adds by itself (e.g. BOS)."""
        return list(self.backend.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; special tokens and ids outside the table give nothing, broken UTF-8 gives U+FFFD."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=True))

    def has_text(self, token_id: int) -> bool:
        """Whether a token takes part in `decode`: it is in the table and no special token."""
        return token_id in self._text_ids

    def _word(self) -> int | None:
        words = (token for token in sorted(self._text_ids) if token not in self.byte_fallback)
        return next((token for token in words if self.decode([token]).strip(" \ufffd")), None)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a conversation (each message with `role` and `content`).

        Raises:
            InvalidArgument: the template refuses these messages.
            Incompatible: the model has no chat template.
        """
        if self._template is None:
            raise Incompatible("the model has no chat template; send a prompt instead")
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of `render_chat`; the template itself writes what special tokens there are."""
        return list(self.backend.encode(self.render_chat(messages), add_special_tokens=False).ids)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja as transformers reads them."""
        self.backend.save(str(directory / "tokenizer.json"))
        config = {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
        (directory / "tokenizer_config.json").write_text(
            json.dumps({**config, **self.special_tokens}, indent=1) + "\n"
        )
        if self._template_source is not None:
            (directory / "chat_template.jinja").write_text(self._template_source)


def _fingerprint(table: Mapping[str, int]) -> str:
    digest = hashlib.sha256()
    for token, token_id in sorted(table.items(), key=lambda entry: (entry[1], entry[0])):
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(token_id.to_bytes(8, "little") + len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _byte_fallback(backend: tokenizers.Tokenizer) -> dict[int, int]:
    found = {value: backend.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    if found[0x41] is None or backend.decode([found[0x41]]) != "A":
        return {}
    return {token_id: value for value, token_id in found.items() if token_id is not None}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument("model", path.name, f"valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_text(entry: Any) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _read_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    entry = config.get("chat_template")
    if isinstance(entry, list):  # several named templates
        named = {item["name"]: item["template"] for item in entry if isinstance(item, dict) and len(item) >= 2}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None
