"""Linear layers in the weight layout that oneDNN's kernels read fastest."""

from __future__ import annotations

from torch import nn


def pack_linears(model: nn.Module) -> None:
    """Swap a model's linear layers for packed ones, in place."""
