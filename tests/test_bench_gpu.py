"""`bench/gpu.sh` and its parts on a CPU: the code runs, needs little, and tells right from wrong and from slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_summary
from bench.report import Report

ROOT = Path(__file__).parent.parent

# What a machine for GPU work need not have.
NOT_NEEDED = {"grpc", "structlog", "pydantic", "redis", "llguidance", "prometheus_client", "graftree.v1"}


def test_the_model_bench_and_what_it_imports(tmp_path: Path) -> None:
    """On a tiny model every figure is there, results are right, and nothing was imported beyond torch and
    transformers' own needs."""
    path = tmp_path / "model.json"
    program = (
        "import sys\n"
        "from bench.gpu_model import main\n"
        f"code = main(['--device', 'cpu', '--quick', '--json', {str(path)!r}])\n"
        "import bench.gpu_kernels\n"
        f"found = {sorted(NOT_NEEDED)!r}\n"
        "print('\\n', code, [name for name in found if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1].strip() == "0 []", done.stderr
    content = json.loads(path.read_text())
    figures = {figure["name"]: figure for figure in content["figures"]}
    results = [name for name in figures if name.startswith("error")]
    assert len(results) == 4
    assert all(figures[name]["met"] for name in results)
    assert figures["batch 2, context 40, 16 nodes: over a one-token step"]["value"] > 0
    assert figures["step-time model, mean error on shapes held out"]["value"] >= 0
    assert figures["recorded steps"]["value"] >= 8
    assert {"torch", "device", "python"} <= content["details"]["machine"].keys()
    assert content["details"]["notes"] == {}
    assert content["details"]["cells"] == {"measured": 8, "of": 8}


def written(path: Path, *, error: float = 1e-9, ratio: float = 1.0) -> Path:
    """A part's file with one result and one target of speed."""
    out = Report("gpu_model")
    out.details["machine"] = {"device": "a card", "driver": "1.2"}
    out.details["notes"] = {"a cell": "skipped: no time left"}
    out.add("error, replayed against as it is", f"{error:.1e}", "", "<= 1e-04", error <= 1e-4)
    out.add("64 nodes over one", ratio, "x", "<= 1.25", ratio <= 1.25)
    out.finish(str(path))
    return path


@pytest.mark.parametrize(
    ("code", "figures", "expected", "said"),
    [
        (0, {}, 0, "model: results right"),
        (1, {"ratio": 1.5}, 0, "target missed: model, 64 nodes over one: 1.5 x (<= 1.25)"),
        (1, {"error": 0.1}, 1, "wrong: model, error, replayed against as it is: 1.0e-01 (<= 1e-04)"),
        (124, None, 1, "model: ran past its time"),
        (3, None, 1, "model: failed with exit code 3"),
    ],
)
def test_wrong_results_fail_and_missed_speed_does_not(
    code: int,
    figures: dict[str, Any] | None,
    expected: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The summary's exit code and lines by what a part found, or did not live to tell."""
    path = tmp_path / "model.json"
    if figures is not None:
        written(path, **figures)
    assert gpu_summary.main(["--out", str(tmp_path / "gpu.json"), f"model:{code}:{path}"]) == expected
    printed = capsys.readouterr().out
    assert said in printed
    assert ("a cell: skipped: no time left" in printed) == (figures is not None)
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["parts"]["model"]["exit_code"] == code
    assert content["machine"] == ({"device": "a card", "driver": "1.2"} if figures is not None else {})


@pytest.mark.parametrize(
    ("code", "why"), [(124, "ran past its time"), (1, "failed with exit code 1"), (137, "failed with exit code 137")]
)
def test_a_part_that_was_ended_keeps_what_it_had(
    code: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are in the whole file; how many cells there are is said, and the exit code is no success."""
    out = Report("gpu_kernels")
    out.details["cells"] = {"measured": 2, "of": 45}
    out.add("batch 1: time", 3.0, "us")
    out.write(str(tmp_path / "kernels.json"))
    parts = [f"kernels:{code}:{tmp_path / 'kernels.json'}"]
    assert gpu_summary.main(["--out", str(tmp_path / "gpu.json"), *parts]) == 1
    assert f"kernels: results right, not all cells: 2 of 45, {why}" in capsys.readouterr().out
    content = json.loads((tmp_path / "gpu.json").read_text())["parts"]["kernels"]["content"]
    assert [figure["value"] for figure in content["figures"]] == [3.0]


FAKE = """#!/usr/bin/env bash
# Stands where Python is: notes what it is asked, writes what a part writes, runs the summary for real.
echo "$*" >> "{log}"
case "$2" in
    bench.gpu_summary) exec "{python}" "$@" ;;
    bench.gpu_model) cp "{good}" "$6"; exit 0 ;;
esac
exit {code}
"""


def shell(tmp_path: Path, *options: str, code: int = 0) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    log, fake = tmp_path / "log", tmp_path / "python"
    good = written(tmp_path / "good.json")
    fake.write_text(FAKE.format(log=log, python=sys.executable, good=good, code=code))
    fake.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "bench" / "gpu.sh"), "--out", str(tmp_path / "out"), *options],
        env={**os.environ, "PYTHON": str(fake)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, log.read_text().splitlines() if log.exists() else []


def test_the_script_runs_the_parts_and_ends_with_a_summary(tmp_path: Path) -> None:
    """Each part gets device, file and limits; one that fails without a file is told and fails the script."""
    done, asked = shell(tmp_path, "--device", "cpu", "--quick", code=7)
    out = tmp_path / "out"
    assert asked[0] == f"-m bench.gpu_model --device cpu --json {out}/model.json --quick --seconds 110"
    assert asked[1] == f"-m bench.gpu_kernels --device cpu --json {out}/kernels.json --quick --seconds 150"
    assert "kernels: failed with exit code 7" in done.stdout
    assert done.returncode == 1
    assert (out / "gpu.json").exists()


def test_the_script_without_a_gpu(tmp_path: Path) -> None:
    """It says so, measures nothing, and still ends with a summary."""
    done, asked = shell(tmp_path, code=1)
    assert done.returncode == 2
    assert "skipped: torch sees no GPU" in done.stdout
    assert "nothing was measured" in done.stdout
    assert not [line for line in asked if "bench.gpu_model" in line]


def test_the_script_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """A misspelt option ends it before anything runs; a part that was not asked for is named."""
    done, asked = shell(tmp_path, "--fast")
    assert (done.returncode, asked) == (2, [])
    done, asked = shell(tmp_path, "--device", "cpu", "--only", "model")
    assert "skipped: kernels, not asked for" in done.stdout
    assert [line.split()[1] for line in asked] == ["bench.gpu_model", "bench.gpu_summary"]


def test_it_stays_below_eight_minutes() -> None:
    """The parts' limits, and a little for Python's start and the summary."""
    text = (ROOT / "bench" / "gpu.sh").read_text()
    limits = [int(line.split()[2]) for line in text.splitlines() if line.startswith("part ") and "--seconds" in line]
    assert len(limits) == 2
    assert sum(limits) + 20 <= 480
