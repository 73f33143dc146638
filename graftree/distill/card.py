"""The finished package: weights in float16, `ssm.json`, and a card that people read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from graftree.distill.files import write_tensors
from graftree.errors import Incompatible, Unavailable
from graftree.models.ssm import DRAFT_IDS, README, WEIGHTS, SsmCard, weights_digest


def package(student: PreTrainedModel, draft_ids: list[int], card: SsmCard, directory: Path, notes: str = "") -> None:
    """Write what was trained, and what it is, to a directory.

    Args:
        notes: further text for the card, e.g. what else was tried.

    Raises:
        Incompatible: the student has weights that float16 does not hold.
        Unavailable: the files cannot be written.
    """
    tensors = {
        name: parameter.detach().to("cpu", torch.float16).contiguous()
        for name, parameter in student.named_parameters()
        if parameter.requires_grad
    }
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise Incompatible(f"{name} is not finite in float16: training went astray; take smaller learning rates")
    tensors[DRAFT_IDS] = torch.tensor(draft_ids, dtype=torch.int32)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_tensors(directory / WEIGHTS, tensors)
        (directory / WEIGHTS).chmod(0o644)  # the library writes files for their owner alone
        replace(card, weights_sha256=weights_digest(directory)).write(directory)
        size = (directory / WEIGHTS).stat().st_size / 1e6
        (directory / README).write_text(_text(card, size, notes))
    except OSError as error:
        raise Unavailable(f"{directory} cannot be written: {error}") from error


def _text(card: SsmCard, megabytes: float, notes: str) -> str:
    begun = ", ".join(map(str, card.layers))
    lines = [
        f"# SSM for {card.llm}",
        "",
        f"{len(card.layers)} layers shaped like the LLM's (begun as its layers {begun}), a head for {card.head_size}",
        f"tokens, the LLM's own embedding (not in here). float16, {megabytes:.1f} MB.",
        "",
        f"It drafts for the LLM whose configuration and weights have the SHA-256 `{card.llm_identity}`;",
        "for another it is refused. Load it as `model:<this directory>`.",
        "",
    ]
    if card.measures:
        lines += ["| held-out measure | value |", "|---|---|", *_rows(card.measures, "{:.4g}"), ""]
    if card.recipe:
        lines += ["| recipe | |", "|---|---|", *_rows(card.recipe, "{}"), ""]
    return "\n".join([*lines, *([notes.strip(), ""] if notes else [])])


def _rows(entries: Mapping[str, Any], form: str) -> list[str]:
    return [f"| {name.replace('_', ' ')} | {form.format(value)} |" for name, value in entries.items()]
