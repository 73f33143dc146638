"""Cases for the Triton kernels, and what is exact for them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import TreeLayout
from kernels.reference import tree_attention as reference
from kernels.triton_attention import INTERPRETED
from kernels.triton_attention import tree_attention as kernel
from tests.test_kernels_attention import Case

# With TRITON_INTERPRET=0 on a machine with a GPU the same tests run there.
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# Relative error of a row. float32: sums of up to some thousand products, each rounded at 2^-24, and exp2. In half
# precision the softmax weights and the output are rounded once each: to 2^-12 of their value in float16, so 2^-11
# together. For bfloat16 the interpreter cuts instead of rounding: up to 2^-7, on average 2^-8.5, and cut weights are
# too small all together, so that twice the average comes near 2^-7.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}


def attend(
    case: Case,
    *,
    layout: TreeLayout | None = None,
    scale: float = 0.35,
    sliding_window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    rows: int = 0,
) -> Tensor:
    """The kernel's answer; `rows` more than the case's are appended to the query."""
    query = torch.cat([case.query, torch.full((rows, *case.query.shape[1:]), torch.nan, dtype=case.query.dtype)])
    return kernel(
        query.to(DEVICE),
        case.keys.to(DEVICE),
        case.values.to(DEVICE),
        case.tables.to(DEVICE),
        case.contexts.to(DEVICE),
        TreeLayout.of(case.sequences) if layout is None else layout,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        splits=splits,
    ).cpu()


def exact(
    case: Case, *, scale: float = 0.35, sliding_window: int | None = None, softcap: float | None = None
) -> Tensor:
    """The reference on the same numbers in float64."""
    return reference(
        case.query.double(),
        case.keys.double(),
        case.values.double(),
        case.tables,
        case.contexts,
        TreeLayout.of(case.sequences),
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def error(got: Tensor, expected: Tensor) -> float:
    """Largest relative error of a row's output; NaN never passes a comparison."""
    if not len(expected):
        return 0.0
    off = (got.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(off.max())


def check(case: Case, **options: float | int | None) -> None:
    """The kernel equals the reference as well as the dtype allows."""
    splits = options.pop("splits", None)
    got = attend(case, splits=splits, **options)  # type: ignore[arg-type]
    assert error(got, exact(case, **options)) <= TOLERANCE[case.query.dtype]  # type: ignore[arg-type]
