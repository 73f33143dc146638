"""Linear layers whose weights lie the way oneDNN's kernels read them fastest.

A plain `nn.Linear` lets oneDNN or MKL re-arrange the weight at every call; for a handful of rows, a verify step's
size, that costs as much as the product. Packing once removes it. In bfloat16 a step reads half the bytes, which is
what an SSM wants; an LLM stays in the precision that was asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# oneDNN takes longer for one to three rows than for four: its kernels for those leave registers empty.
_LEAST_ROWS = 4
_EXACT_ROWS = 32  # up to here any number of rows runs as it is


class PackedLinear(nn.Module):
    """x @ weight.T + bias with a packed weight; inference only.

    Args:
        weight: (out, in) float32 or bfloat16 on the CPU; not kept.
        bias: (out,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) of the weight's dtype -> (..., out)."""
        rows = x.numel() // self.in_features
        missing = padded_rows(rows) - rows
        if not missing:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        padded = torch.nn.functional.pad(x.reshape(rows, -1), (0, 0, 0, missing))
        result = torch.ops.mkldnn._linear_pointwise(padded, self._packed, self._bias, "none", [], "")
        return result[:rows].view(*x.shape[:-1], self.out_features)


def padded_rows(rows: int) -> int:
    """How many rows a product of so many is run with, at most a sixteenth more behind the first few.

    For every shape that it has not seen oneDNN writes code, which takes as long as a small product, and 0.5 to 1 MB,
    some of it for good. Steps have any number of rows, so without this a process would grow by hundreds of MB over
    its first hours.
    """
    if rows <= _EXACT_ROWS:
        return max(rows, _LEAST_ROWS) if rows else 0
    unit = 1 << (rows - 1).bit_length() - 5  # sixteen sizes from one power of two to the next
    return -(-rows // unit) * unit


def can_pack(model: Any) -> bool:
    """Whether the model is on the CPU, this torch has oneDNN, and oneDNN computes in the model's dtype here."""
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if model.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(model.dtype == torch.float32)


def pack_linears(model: nn.Module) -> None:
    """Swap a model's linear layers for packed ones, in place.

    A weight that nothing else holds is dropped as soon as its layer is packed; one tied to the embedding stays,
    for the embedding.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child.weight, child.bias))
            elif type(child) is Conv1D:
                setattr(module, name, PackedLinear(child.weight.t(), child.bias))
