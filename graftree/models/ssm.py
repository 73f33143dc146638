"""An SSM package: a few layers shaped like an LLM's, with a head for a part of its vocabulary.

    ssm.json            `SsmCard`: whose SSM this is and how it is built
    model.safetensors   what was trained, and `draft_ids`, the token of each row of the head
    README.md           the card for people

The embedding is the LLM's own, read from the LLM's files when the SSM is loaded, and not in the package. Every other
parameter is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from graftree.errors import Incompatible
from graftree.models.shipped import CARD

WEIGHTS, README = "model.safetensors", "README.md"
DRAFT_IDS = "draft_ids"
FORMAT = 1


@dataclass(frozen=True)
class SsmCard:
    """What `ssm.json` says.

    Attributes:
        llm: URI of the LLM that it drafts for.
        llm_identity: SHA-256 (hex) over the LLM's configuration and weights, whatever their dtype.
        layers: the LLM's layers that it has the shape of, and began with.
        head_size: rows of the head = tokens it can draft.
        format: of the package.
        measures: held-out figures, e.g. {"top1": 0.41}.
        recipe: how it was made.
        weights_sha256: SHA-256 (hex) of model.safetensors; "" in packages of before there was this entry.
    """

    llm: str
    llm_identity: str
    layers: tuple[int, ...]
    head_size: int
    format: int = FORMAT
    measures: Mapping[str, float] | None = None
    recipe: Mapping[str, Any] | None = None
    weights_sha256: str = ""

    @classmethod
    def read(cls, directory: Path) -> SsmCard:
        """Parse and check a package's card.

        Raises:
            Incompatible: it is none; names the entry, its value and what it should be.
        """
        try:
            given = json.loads((directory / CARD).read_text())
        except (OSError, ValueError) as error:
            raise Incompatible(f"{directory / CARD} cannot be read: {error}") from error
        expected = {"format": int, "llm": str, "llm_identity": str, "layers": list, "head_size": int}
        for name, kind in expected.items():
            if not isinstance(given, dict) or not isinstance(given.get(name), kind):
                raise Incompatible(f"{directory / CARD}: {name} is missing or not a {kind.__name__}")
        if given["format"] != FORMAT:
            raise Incompatible(f"{directory / CARD}: format is {given['format']}, this version reads {FORMAT}")
        layers = tuple(given["layers"])
        numbers = {layer for layer in layers if type(layer) is int and layer >= 0}
        if not layers or len(layers) > 256 or len(numbers) != len(layers):
            raise Incompatible(f"{directory / CARD}: layers is {given['layers']!r}, not a list of layer numbers")
        if not isinstance(given.get("weights_sha256", ""), str):
            raise Incompatible(f"{directory / CARD}: weights_sha256 is not a str")
        known = {field.name for field in fields(cls)}
        return cls(**{**{k: v for k, v in given.items() if k in known}, "layers": layers})

    def write(self, directory: Path) -> None:
        """Write `ssm.json`."""
        (directory / CARD).write_text(json.dumps(asdict(self), indent=1) + "\n")


def weights_digest(directory: Path) -> str:
    """SHA-256 (hex) of a package's weights. Raises Incompatible: they cannot be read."""
    try:
        with (directory / WEIGHTS).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Incompatible(f"{directory / WEIGHTS} cannot be read: {error}") from error


def check_weights(card: SsmCard, directory: Path) -> str:
    """`weights_digest`, after a look whether the weights are those that the card was written for.

    Raises:
        Incompatible: they are others, or cannot be read.
    """
    found = weights_digest(directory)
    if card.weights_sha256 not in ("", found):
        raise Incompatible(
            f"{directory / WEIGHTS} is damaged: its SHA-256 is {found[:12]}, {CARD} says {card.weights_sha256[:12]}"
        )
    return found


def digest(card: SsmCard, weights: str) -> str:
    """SHA-256 (hex) over what determines the SSM's function. weights: `weights_digest`."""
    return hashlib.sha256(f"{card.llm_identity} {card.layers} {weights}".encode()).hexdigest()


def give_head(model: PreTrainedModel, draft_ids: Sequence[int]) -> None:
    """Replace an LLM's head by its rows for `draft_ids`, in place."""
    old = model.get_output_embeddings()
    assert old is not None, "a causal language model has a head"
    head = nn.Linear(old.weight.shape[1], len(draft_ids), bias=getattr(old, "bias", None) is not None)
    index = torch.tensor(draft_ids)
    with torch.no_grad():
        head.weight.copy_(old.weight[index])
        if head.bias is not None:
            head.bias.copy_(old.bias[index])
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head.to(old.weight.device, old.weight.dtype))


def fill(model: PreTrainedModel, card: SsmCard, directory: Path) -> Tensor:
    """Put a package's tensors into a model that has the card's layers of the LLM, and its embedding.

    Returns:
        draft_ids, (H,) int64: the token of each row of the head.

    Raises:
        Incompatible: a tensor that does not fit, is missing or is not finite; names the first.
    """
    path = directory / WEIGHTS
    try:
        tensors = load_file(path)
    except Exception as error:
        raise Incompatible(f"{path} cannot be read: {error}") from error
    ids = tensors.pop(DRAFT_IDS, None)
    rows = embedding_rows(model)
    if ids is None or not _are_tokens(ids, card.head_size, rows):
        raise Incompatible(f"{path}: {DRAFT_IDS} is not {card.head_size} different tokens below {rows}")
    give_head(model, ids.tolist())
    embedding = model.get_input_embeddings().weight
    own = {name: parameter for name, parameter in model.named_parameters() if parameter is not embedding}
    if missing := sorted(own.keys() - tensors.keys()):
        raise Incompatible(f"{path}: {missing[0]} is missing, of {len(card.layers)} layers and a head")
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            raise Incompatible(f"{path}: {name} {tuple(tensor.shape)} does not fit {card.llm}")
        if not (tensor.is_floating_point() and tensor.isfinite().all()):
            raise Incompatible(f"{path}: {name} ({tensor.dtype}) is not finite numbers in floating point")
        with torch.no_grad():
            own[name].copy_(tensor)
    return ids.long()


def _are_tokens(ids: Tensor, count: int, rows: int) -> bool:
    if ids.shape != (count,) or ids.dtype not in (torch.int32, torch.int64):
        return False
    return bool(count and ids.min() >= 0 and ids.max() < rows and ids.unique().numel() == count)


def embedding_rows(model: PreTrainedModel) -> int:
    """Tokens that a model can take."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])
