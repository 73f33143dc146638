"""`bench.gpu_kernels` under Triton's interpreter: every check passes and every figure is there."""

from __future__ import annotations

import json
from pathlib import Path

from bench import gpu_kernels


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
