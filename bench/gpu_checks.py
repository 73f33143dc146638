"""The Triton kernels against float64, on whatever device they run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bench import report
from bench.gpu_cases import Piece, Problem, Shape
from bench.gpu_rivals import flex, flex_rows, sdpa, sdpa_rows
from kernels.rows import move_rows, write_rows

# Relative error of the whole output, |out - exact| / |exact|. Inputs are exact in their format; what rounds are the
# softmax weights (to the values' format) and the output: each by at most half an ulp, 2^-9 in bfloat16 and 2^-12 in
# float16, by a third to a half of that in the mean square. float32 sums some thousand products.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 3e-6}


@dataclass(frozen=True)
class Check:
    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    window: int | None = None
    softcap: float | None = None

    def error(self, device: torch.device) -> float:
        """Relative error; also of a second call, which must give the same bits."""
        problem = Problem(self.shape, self.pieces, device, seed=1)
        first, second = (problem.attend(window=self.window, softcap=self.softcap) for _ in range(2))
        if not torch.equal(first, second):
            return float("nan")
        return relative(first, problem.exact(self.window, self.softcap))


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def check_all(device: torch.device, out: report.Report) -> None:
    """Add a figure for each check."""
    gpu = device.type == "cuda"
    for check in _gpu_checks() if gpu else _cpu_checks():
        error, limit = check.error(device), LIMITS[check.shape.dtype]
        if not gpu and check.shape.dtype == torch.bfloat16:
            limit *= 2  # the interpreter cuts where a GPU rounds
        out.add(f"error, {check.name}", f"{error:.1e}", "", f"<= {limit:.0e}", error <= limit)
    rows = _rows_right(device)
    out.add("write and compaction", rows, "", "exact", rows == "exact")
    for name, error in _rivals(device).items():
        out.add(f"error, {name}, which the times are compared with", error)


def _gpu_checks() -> list[Check]:
    base = Shape()
    mixed = (Piece(0, 1), Piece(5, 130), Piece(4096, 64), Piece(1000, 300, chain=True), Piece(33, 0), Piece(0, 65))
    checks = [
        Check(f"context {c}, nodes {n}", base, (Piece(c, n),)) for c in (0, 1, 511, 4097, 32768) for n in (1, 64)
    ]
    checks += [
        Check(f"mixed batch, {str(dtype)[6:]}", replace(base, dtype=dtype), mixed)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    for width, dtype in ((64, "bfloat16"), (80, "bfloat16"), (112, "float16"), (256, "bfloat16"), (96, "float32")):
        shape = replace(base, heads=8, kv_heads=2, width=width, dtype=getattr(torch, dtype))
        checks.append(Check(f"head dim {width}, {dtype}", shape, mixed))
    for group in (1, 3, 8):
        checks.append(Check(f"{group} query heads a kv head", replace(base, heads=2 * group, kv_heads=2), mixed))
    checks.append(Check("window", base, mixed, window=100))
    checks.append(Check("softcap", base, mixed, softcap=5.0))
    checks.append(Check("blocks of 1", replace(base, block_size=1), mixed[:3]))
    checks.append(Check("batch 32, context 4096", base, (Piece(4096, 8),) * 32))
    return checks


def _cpu_checks() -> list[Check]:
    base = Shape(heads=2, kv_heads=1, width=16, dtype=torch.float32)
    mixed = (Piece(0, 1), Piece(5, 9), Piece(90, 3), Piece(10, 12, chain=True))
    return [
        Check("mixed batch, float32", base, mixed),
        Check("mixed batch, bfloat16", replace(base, dtype=torch.bfloat16), mixed),
        Check("window", base, mixed, window=7),
        Check("softcap", base, mixed, softcap=5.0),
    ]


def _rows_right(device: torch.device) -> str:
    """The write and the compaction kernel against plain indexing."""
    rows, kv_heads, width = 200, 2, 80
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16)

    keys, values = draw(rows, kv_heads, width), draw(rows, kv_heads, width)
    key, value = draw(kv_heads, 40, width).transpose(0, 1), draw(40, kv_heads, width)
    slots = torch.randperm(rows, generator=generator, device=device)[:40]
    expected = keys.index_copy(0, slots, key), values.index_copy(0, slots, value)
    write_rows(keys, values, slots, key, value, implementation="triton")
    if not (torch.equal(keys, expected[0]) and torch.equal(values, expected[1])):
        return "wrong write"
    planes = draw(6, rows, kv_heads, width)
    sources = torch.arange(100, 140, device=device) + torch.arange(40, device=device) // 3
    targets = torch.arange(99, 139, device=device)
    moved = planes.index_copy(1, targets, planes.index_select(1, sources))
    move_rows(planes, sources, targets, implementation="triton")
    return "exact" if torch.equal(planes, moved) else "wrong compaction"


def _rivals(device: torch.device) -> dict[str, str]:
    """That the others compute the same thing."""
    shape = Shape() if device.type == "cuda" else _cpu_checks()[0].shape
    problem = Problem(shape, [Piece(64, 9)] * 2, device)
    exact, errors = problem.exact(), {}
    for name, make, rows in (("SDPA", sdpa, sdpa_rows), ("FlexAttention", flex, flex_rows)):
        try:
            errors[name] = f"{relative(rows(problem, make(problem)(0)), exact):.1e}"
        except Exception as error:  # told, not ours
            errors[name] = f"failed: {type(error).__name__}"
    return errors
