"""Tensors in a file: written whole or not at all, and read with an error that says what to do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftree.errors import Incompatible, InvalidArgument, Unavailable


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file in place of an earlier one.

    Raises:
        Unavailable: it cannot be written, e.g. the disk is full; an earlier file stays.
    """
    partial = path.with_suffix(".partial")
    try:
        save_file(dict(tensors), partial, metadata=dict(metadata) if metadata else None)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        raise Unavailable(f"{path} cannot be written: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU.

    Raises:
        Incompatible: it is missing, cut or no safetensors file.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def read_metadata(path: Path) -> dict[str, str]:
    """What a file says of itself. Raises Incompatible as `read_tensors`: a file that was cut is seen here, too."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> Incompatible:
    return Incompatible(f"{path} is damaged ({error}): delete it and run again")


def check_directory(field: str, directory: Path) -> None:
    """Refuse a directory that cannot be made or written to, before there is anything to write.

    Raises:
        InvalidArgument: names `field` and why.
    """
    try:
        there = directory.absolute()
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            raise InvalidArgument(field, str(directory), f"a directory; {there} is none")
        with tempfile.TemporaryDirectory(dir=there, prefix=".graftree-"):
            pass
    except OSError as error:
        raise InvalidArgument(field, str(directory), f"a directory to write to: {error.strerror}") from error
