"""`Assignment`: what a student is and what it learns from; a checkpoint belongs to one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from graftree.distill import checkpoint
from graftree.distill.corpus import CorpusSettings
from graftree.errors import Incompatible

REMEDY = "take another DIR or --work, or delete it"

# Other text, or students before that learned longer, is no mistake: the same student learns anew from it.
_TEXT = ("shards", "taught")


@dataclass(frozen=True)
class Assignment:
    """Compared with what a checkpoint was made with before training goes on from it.

    Attributes:
        layers: of the LLM, that the student begins as.
        head_size: rows of its head.
        draft_ids: SHA-256 (hex) over the rows' tokens.
        corpus: how the text was written, by which LLM.
        shards: of the corpus that are used, held-out ones included.
        before: layers of the students before it, whose tokens it does not learn (`graftree boost`).
        run_length: tokens in a row that those must get; 0 = there are none before it.
        taught: epochs and minutes that those learned; () = there are none.
    """

    layers: tuple[int, ...]
    head_size: int
    draft_ids: str
    corpus: CorpusSettings
    shards: int
    before: tuple[tuple[int, ...], ...] = ()
    run_length: int = 0
    taught: tuple[float, ...] = ()

    @classmethod
    def of(cls, layers: Sequence[int], head_size: int, corpus: CorpusSettings, shards: int) -> Assignment:
        """That of a student whose head's tokens are not chosen yet."""
        return cls(tuple(layers), head_size, "", corpus, shards)

    def with_tokens(self, tokens: Sequence[int]) -> Assignment:
        """The same with a row of the head for each of `tokens`."""
        return replace(self, draft_ids=hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest())

    def about(self) -> dict[str, Any]:
        """As JSON values."""
        about: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**{f"corpus {key}": value for key, value in about.pop("corpus").items()}, **about}

    def check(self, path: Path) -> None:
        """Refuse another student's checkpoint, before there is any work; where there is none all is well.

        Raises:
            Incompatible: names what differs, both values and the way out; or the checkpoint is damaged.
        """
        if not path.exists():
            return
        before, own = self._before(path), self.about()
        for name in sorted(own.keys() - {*_TEXT, "draft_ids"}):
            if before.get(name) != own[name]:
                words, given = name.replace("_", " "), before.get(name)
                raise Incompatible(f"{path} was made with {words} {given}, now it is {own[name]}: {REMEDY}")

    def continues(self, path: Path) -> bool:
        """Whether training goes on from a checkpoint; False = it is this student's, on another amount of text.

        Raises:
            Incompatible: as `check`, or the head has other tokens.
        """
        self.check(path)
        before, own = self._before(path), self.about()
        if any(before.get(name) != own[name] for name in _TEXT):
            return False
        if before.get("draft_ids") != own["draft_ids"]:
            raise Incompatible(f"{path} was made with other tokens in the head (the corpus was changed): {REMEDY}")
        return True

    @staticmethod
    def _before(path: Path) -> dict[str, Any]:
        before = checkpoint.read(path).get("assignment")
        if not isinstance(before, dict):
            raise Incompatible(f"{path} does not say which layers and text it was made with: {REMEDY}")
        return before
