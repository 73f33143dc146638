"""`Bundle`: a step's small inputs side by side in one buffer, so that one copy takes all of them to the device.

On a CUDA device the copy starts from pinned memory and the host does not wait for it. Pinned memory comes from
torch's caching allocator, which gives a piece out again only when the copies from it are over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftree.errors import GraftreeError

_ALIGNMENT = 16  # bytes; Triton compiles other code for pointers that are not

Arrays = Mapping[str, NDArray[Any]]


class Bundle:
    """Tensors of fixed shapes on a device, filled together.

    Args:
        arrays: name -> array; shapes and dtypes are fixed, and what they hold is the first content.
        device: where the tensors are.

    Attributes:
        tensors: name -> tensor; the same ones for ever, `fill` changes what they hold.
    """

    def __init__(self, arrays: Arrays, device: torch.device) -> None:
        self._size = 0
        self._places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        for name, array in arrays.items():
            self._places[name] = (self._size, array.shape, array.dtype)
            self._size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.empty(self._size, dtype=torch.uint8, device=device)
        self.tensors: dict[str, Tensor] = {}
        for name, (start, shape, dtype) in self._places.items():
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            piece = self._buffer[start : start + arrays[name].nbytes]
            self.tensors[name] = piece.view(kind).view(shape)
        self.fill(arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._size

    def fill(self, arrays: Arrays) -> None:
        """Change the content of all tensors; nothing of the former stays.

        Raises:
            GraftreeError: an array is missing, too many, or of another shape or dtype.
        """
        room = np.zeros(self._size, np.uint8)
        if arrays.keys() != self._places.keys():
            raise GraftreeError(f"a step's inputs are {', '.join(self._places)}, not {', '.join(arrays)}")
        for name, (start, shape, dtype) in self._places.items():
            array = arrays[name]
            if array.shape != shape or array.dtype != dtype:
                raise GraftreeError(f"{name} is {array.dtype}{array.shape}, not {dtype}{shape}")
            room[start : start + array.nbytes].view(dtype).reshape(shape)[...] = array
        host = torch.from_numpy(room)
        self._buffer.copy_(host.pin_memory() if self._buffer.is_cuda else host, non_blocking=True)


def to_device(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Arrays as tensors on a device, by one copy; on the CPU none is copied."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Bundle(arrays, device).tensors
