"""Weight-only int8: linear layers whose weights are whole numbers from -127 to 127 and one factor per output.

What is multiplied is x @ (q * s).T, sums in float32. torch's own operators do it: for the few rows of a verify step
on a CPU a kernel that reads int8 (in bfloat16; in float32 it computes element by element, and so is not used),
otherwise a product with the weight brought back to x's dtype for the moment. torchao does the latter in every case.

What it saves is memory: docs/performance.md says what it costs in time, and how far answers depart.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from graftree.errors import InvalidArgument
from graftree.models.fused import PlainLinear

WEIGHTS = ("full", "int8")
LEVELS = 127

_FEW_ROWS = 32  # above, bringing the weight back costs less than torch's kernel, which goes row by row
_INNER = 32  # the kernel is wrong where the inner dimension is no multiple of its registers


class Int8Linear(nn.Module):
    """x @ (q * s).T + bias; inference only.

    Args:
        weight: (out, in) in a floating dtype; not kept.
        bias: (out,) or None.

    Attributes:
        q: (out, in) int8.
        s: (out,) of the weight's dtype; that of a row is its largest magnitude / 127, rounded to the dtype first.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().contiguous()
        self.out_features, self.in_features = weight.shape
        largest = weight.abs().amax(1, keepdim=True).float()
        self.s = torch.where(largest > 0, largest / LEVELS, 1.0).to(weight.dtype).flatten()
        levels = torch.round(weight.float() / self.s.float()[:, None])
        self.q = levels.clamp_(-LEVELS, LEVELS).to(torch.int8)
        self._bias = None if bias is None else bias.detach()
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self._few_rows = _FEW_ROWS if on_cpu and self.in_features % _INNER == 0 else 0

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) of the weight's dtype -> (..., out)."""
        rows = x.reshape(-1, self.in_features)
        if 0 < len(rows) <= self._few_rows:
            result = torch._weight_int8pack_mm(rows, self.q, self.s)
        elif x.dtype == torch.float16:  # x @ q.T may not fit
            result = torch.mm(rows, (self.q.to(x.dtype) * self.s[:, None]).t())
        else:
            result = torch.mm(rows, self.q.t().to(x.dtype)).mul_(self.s)
        if self._bias is not None:
            result += self._bias
        return result.view(*x.shape[:-1], self.out_features)


def check(weights: str, dtype: str, device: torch.device) -> None:
    """Before a model is loaded.

    Raises:
        InvalidArgument: there are no such weights, or not there in that dtype.
    """
    if weights not in WEIGHTS:
        raise InvalidArgument("weights", weights, f"one of {', '.join(WEIGHTS)}")
    if weights == "int8" and device.type == "cpu" and dtype != "bfloat16":
        raise InvalidArgument("dtype", dtype, "bfloat16 with weights int8 on a CPU: it has no kernel for others")


def round_linears(model: nn.Module) -> None:
    """Swap a model's linear layers for int8 ones, in place; the embedding stays as it is."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, PlainLinear) or type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child.weight, child.bias))
            elif type(child) is Conv1D:
                setattr(module, name, Int8Linear(child.weight.t(), child.bias))
