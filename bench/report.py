"""What every benchmark shares: its command line, its table, its JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_ABSOLUTE = re.compile(r"(?<![\w.])/(?:[^/\s?=]+/)*")  # folders of this machine say nothing to anybody else
_BEGUN = time.monotonic()  # of the program, near enough
PROMPTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "spec_bench_dev.jsonl"


@dataclass(frozen=True)
class Figure:
    """One measured number; `target` is in words, `met` says whether it was reached (None = no target)."""

    name: str
    value: float | int | str
    unit: str = ""
    target: str = ""
    met: bool | None = None


@dataclass
class Report:
    """Collects figures, prints them as a table, writes them as JSON."""

    benchmark: str
    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(
        self, name: str, value: float | int | str, unit: str = "", target: str = "", met: bool | None = None
    ) -> None:
        self.figures.append(Figure(name, value, unit, target, met))

    def finish(self, path: str | None) -> int:
        """Print, write, and return the exit code: 1 when a target was missed."""
        width = max(len(figure.name) for figure in self.figures)
        print(f"\n{self.benchmark}")
        for figure in self.figures:
            value = f"{figure.value:.3f}" if isinstance(figure.value, float) else str(figure.value)
            verdict = {True: "met", False: "MISSED", None: ""}[figure.met]
            print(f"  {figure.name:<{width}}  {value:>12} {figure.unit:<10} {figure.target:<24} {verdict}".rstrip())
        if path:
            self.write(path, ended=True)
        return int(any(figure.met is False for figure in self.figures))

    def write(self, path: str, *, ended: bool = False) -> None:
        """Write what there is so far, in one piece: a file is never half of one.

        Args:
            ended: the benchmark is through. What a later end does not come to replace says that it is not.
        """
        content = {
            "benchmark": self.benchmark,
            "ended": ended,
            "seconds": round(time.monotonic() - _BEGUN, 1),
            "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
            "arguments": [_ABSOLUTE.sub("", argument) for argument in sys.argv[1:]],
            "figures": [asdict(figure) for figure in self.figures],
            "details": self.details,
        }
        partial = Path(f"{path}.part")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)


def _cpu() -> str:
    """Model name of the processor where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


def parser(description: str) -> argparse.ArgumentParser:
    """The flags every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--quick", action="store_true", help="the same code on less, in under a minute")
    result.add_argument("--json", metavar="FILE", help="write figures and targets there")
    return result


def prompts(path: Path, count: int) -> list[dict[str, Any]]:
    """`count` prompts spread evenly over the file, so over its categories.

    Each line of the file is an object with `question_id`, `category` and `turns` (Spec-Bench's format).
    """
    if not path.exists():
        raise SystemExit(f"{path} is not there; give --prompts FILE in Spec-Bench's jsonl format")
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    count = min(count, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]
