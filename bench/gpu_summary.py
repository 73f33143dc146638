"""What the parts of bench/gpu.sh found, in one file and a few lines.

    python -m bench.gpu_summary --out gpu.json NAME:EXIT_CODE:FILE.json ...

The exit code is 1 where a result was wrong or a part did not end by itself, else 0: missed targets of speed are told,
and are no failure. What a part had measured when it was ended is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMED_OUT = 124  # the exit code of `timeout`
_SHOWN = 20  # missed targets


@dataclass(frozen=True)
class Part:
    """One program's exit code and what it wrote; None = nothing."""

    name: str
    code: int
    content: dict[str, Any] | None

    @classmethod
    def of(cls, text: str) -> Part:
        name, code, path = text.split(":", 2)
        file = Path(path)
        return cls(name, int(code), json.loads(file.read_text()) if file.exists() else None)

    @property
    def missed(self) -> list[dict[str, Any]]:
        """Figures that did not reach their target."""
        return [figure for figure in (self.content or {}).get("figures", ()) if figure["met"] is False]

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """Of these, the ones that say a result is wrong."""
        return [f for f in self.missed if f["name"].startswith("error") or f["target"] == "exact"]

    @property
    def ended(self) -> bool:
        """Whether the file is the last one it wanted to write."""
        return bool((self.content or {}).get("ended"))

    @property
    def state(self) -> str:
        end = "ran past its time" if self.code == TIMED_OUT else f"failed with exit code {self.code}"
        if self.content is None:
            return end
        told = [f"WRONG in {len(self.wrong)} figures" if self.wrong else "results right"]
        cells = self.content["details"].get("cells", {})
        if cells and cells["measured"] < cells["of"]:
            told.append(f"not all cells: {cells['measured']} of {cells['of']}")
        return ", ".join(told if self.ended else [*told, end])


def summary(parts: Sequence[Part]) -> list[str]:
    """Lines to print."""
    lines = [f"{part.name}: {part.state}" for part in parts]
    for part in parts:
        lines += [f"  wrong: {part.name}, {_told(figure)}" for figure in part.wrong]
    slow = [(part, figure) for part in parts for figure in part.missed if figure not in part.wrong]
    lines += [f"  target missed: {part.name}, {_told(figure)}" for part, figure in slow[:_SHOWN]]
    if len(slow) > _SHOWN:
        lines.append(f"  and {len(slow) - _SHOWN} more")
    notes = [note for part in parts for note in (part.content or {}).get("details", {}).get("notes", {}).items()]
    return lines + [f"  {key}: {note}" for key, note in notes]


def _told(figure: dict[str, Any]) -> str:
    value = f"{figure['value']:.3g}" if isinstance(figure["value"], float) else figure["value"]
    return f"{figure['name']}: {value} {figure['unit']} ({figure['target']})".replace("  ", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, help="the JSON file with everything")
    parser.add_argument("parts", nargs="*", type=Part.of, metavar="NAME:EXIT_CODE:FILE")
    options = parser.parse_args(arguments)
    machines = [part.content["details"].get("machine") for part in options.parts if part.content]
    content = {
        "benchmark": "gpu",
        "machine": next((machine for machine in machines if machine), {}),
        "parts": {part.name: {"exit_code": part.code, "content": part.content} for part in options.parts},
    }
    Path(options.out).write_text(json.dumps(content, indent=1) + "\n")
    print("\nsummary")
    print("\n".join(summary(options.parts) or ["nothing was measured"]))
    print(f"everything: {options.out}")
    return int(any(not part.ended or part.wrong for part in options.parts))


if __name__ == "__main__":
    sys.exit(main())
