"""What every benchmark writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.report import Report


def test_json_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are kept without the folders of the machine; other text stays as it is."""
    path = tmp_path / "out.json"
    arguments = ["--json", str(path), "--ssm", "model:/a/b/x?llm=/a/y", "--single", "model:relative/x", "1/2"]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    report = Report("a bench")
    report.add("figure", 1.0, "x", ">= 1", True)
    assert report.finish(str(path)) == 0
    kept = json.loads(path.read_text())["arguments"]
    assert kept == ["--json", "out.json", "--ssm", "model:x?llm=y", "--single", "model:relative/x", "1/2"]


@pytest.mark.parametrize(("met", "code"), [(None, 0), (True, 0), (False, 1)])
def test_a_missed_target_is_an_exit_code(met: bool | None, code: int) -> None:
    """1 where a target was missed, whatever else was met."""
    report = Report("a bench")
    report.add("figure", 1, met=True)
    report.add("figure", 2, met=met)
    assert report.finish(None) == code
