"""`bench.gpu_kernels` under Triton's interpreter: every check passes and every figure is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpu_kernels
from bench.gpu_cases import Shape
from bench.gpu_kernels import Cell, Run
from bench.report import Report


def test_everything_runs_without_a_gpu(tmp_path: Path) -> None:
    """Checks against float64, ceilings, times, both rivals; nothing is skipped, no time has a target."""
    path = tmp_path / "kernels.json"
    assert gpu_kernels.main(["--device", "cpu", "--quick", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    figures = {figure["name"]: figure for figure in content["figures"]}
    checks = [figure for name, figure in figures.items() if name.startswith("error, ") and figure["target"]]
    assert len(checks) >= 4
    assert all(figure["met"] for figure in checks)
    assert figures["write and compaction"]["value"] == "exact"
    for batch in (1, 2):
        for nodes in (1, 8):
            cell = f"batch {batch}, context 40, nodes {nodes}"
            assert figures[f"{cell}: time"]["value"] > 0
            assert figures[f"{cell}: share of copy bandwidth"]["met"] is None
            for rival in ("SDPA", "FlexAttention"):
                assert figures[f"{cell}: {rival} over triton"]["value"] > 0
                assert float(figures[f"error, {rival}, which the times are compared with"]["value"]) < 1e-5
    assert content["details"]["notes"] == {}
    assert content["details"]["cells"] == {"measured": 4, "of": 4}
    assert content["ended"]


def test_a_run_that_is_ended_leaves_the_cells_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has what was measured until then, as figures and in tables, and says that there is more."""
    path = tmp_path / "kernels.json"
    cells = [Cell(1, 40, 1), Cell(1, 40, 8), Cell(2, 40, 8)]

    def cell(run: Run, each: Cell) -> None:
        assert json.loads(path.read_text())["details"]["cells"]["measured"] == cells.index(each)
        if each == cells[2]:
            raise KeyboardInterrupt
        run.times[each] = {"triton": 2e-6, "SDPA": 4e-6}
        run.bounds[each] = (1e-6, 0.0)

    monkeypatch.setattr(Run, "cell", cell)
    run = Run(torch.device("cpu"), Shape(), rounds=1, deadline=0.0, out=Report("gpu_kernels"))
    with pytest.raises(KeyboardInterrupt):
        run.all_cells(cells, str(path))
    content = json.loads(path.read_text())
    assert not content["ended"]
    assert content["details"]["cells"] == {"measured": 2, "of": 3}
    figures = {figure["name"]: figure["value"] for figure in content["figures"]}
    assert len(figures) == 6
    assert figures["batch 1, context 40, nodes 8: SDPA over triton"] == 2.0
    assert content["details"]["tables"][0]["rows"] == {"batch 1, context 40": [2.0, 2.0]}
    assert list(tmp_path.iterdir()) == [path]
