"""`ModelSpec`: what the tiers must know of a model without loading it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Facts of a config.json that say nothing about the model's function.
_IRRELEVANT = frozenset(
    {"_name_or_path", "_model_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)


@dataclass(frozen=True)
class ModelSpec:
    """A model's identity and limits.

    Attributes:
        name: canonical URI.
        fingerprint: SHA-256 (hex) over configuration, weights' digest and dtype: equal = same function.
        vocab_fingerprint: SHA-256 (hex) over the token table without padding: equal = same tokens.
        vocab_size: rows of the embedding, so the length of a logits row; ids of `token_count` and above are padding.
        token_count: the tokenizer's ids end before this.
        max_context: longest sequence, in tokens.
        eos_token_ids: every token that ends a text, ascending.
    """

    name: str
    fingerprint: str
    vocab_fingerprint: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    token_count: int = 0


def model_fingerprint(identity: Mapping[str, Any], dtype: str) -> str:
    """SHA-256 (hex) over a canonical form of what determines a model's function, and its dtype."""
    text = json.dumps({"dtype": dtype, **identity}, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the entries that say nothing about the model's function."""
    return {key: value for key, value in config.items() if key not in _IRRELEVANT}


def max_context(config: Mapping[str, Any]) -> int:
    """Longest sequence of a model in tokens; 0 = its configuration names no limit."""
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return 0


def eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Union of the `eos_token_id` entries (a number, a list or absent) of several configurations, ascending."""
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        entries: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
        found.update(entry for entry in entries if isinstance(entry, int))
    return tuple(sorted(found))
