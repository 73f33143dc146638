"""A training run's state in one safetensors file: tensors as they are, the rest as JSON in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graftree.distill.files import read_metadata, read_tensors, write_tensors
from graftree.errors import Incompatible


def save(
    path: Path, student: Mapping[str, Tensor], optimisers: Sequence[torch.optim.Optimizer], about: Mapping[str, Any]
) -> None:
    """Write the student's tensors, the optimisers' state and `about` (JSON values), in place of an earlier file.

    Raises:
        Unavailable: it cannot be written.
    """
    tensors = {f"student.{name}": tensor.detach().contiguous() for name, tensor in student.items()}
    groups, plain = [], []
    for number, optimiser in enumerate(optimisers):
        state = optimiser.state_dict()
        groups.append(state["param_groups"])
        values: dict[str, dict[str, Any]] = {}
        for index, entries in state["state"].items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser.{number}.{index}.{name}"] = value.detach().contiguous()
                else:
                    values.setdefault(str(index), {})[name] = value
        plain.append(values)
    metadata = {"about": json.dumps(about), "groups": json.dumps(groups), "values": json.dumps(plain)}
    write_tensors(path, tensors, metadata)


def read(path: Path) -> dict[str, Any]:
    """The `about` of a checkpoint.

    Raises:
        Incompatible: it is damaged.
    """
    try:
        about: dict[str, Any] = json.loads(read_metadata(path)["about"])
    except (KeyError, ValueError) as error:
        raise Incompatible(f"{path} is no checkpoint: delete it and run again") from error
    return about


def restore(path: Path, student: torch.nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> None:
    """Put a checkpoint's tensors into a student and optimisers made like those that were saved.

    Raises:
        Incompatible: it is damaged, or was saved of others.
    """
    tensors = read_tensors(path)
    try:
        _put(tensors, read_metadata(path), student, optimisers)
    except (KeyError, ValueError, IndexError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise Incompatible(f"{path} does not fit this student ({reason}): delete it and run again") from error


def _put(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    student: torch.nn.Module,
    optimisers: Sequence[torch.optim.Optimizer],
) -> None:
    groups, plain = json.loads(metadata["groups"]), json.loads(metadata["values"])
    own = dict(student.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.startswith("student."):
                own[name.removeprefix("student.")].copy_(tensor)
    for number, optimiser in enumerate(optimisers):
        state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in plain[number].items()}
        for key, tensor in tensors.items():
            kind, _, rest = key.partition(".")
            if kind == "optimiser" and rest.startswith(f"{number}."):
                _, index, name = rest.split(".", 2)
                state.setdefault(int(index), {})[name] = tensor
        optimiser.load_state_dict({"state": state, "param_groups": groups[number]})
