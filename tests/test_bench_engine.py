"""`bench.engine` on a tiny model: every figure is there, whatever the machine reaches."""

from __future__ import annotations

import json
from pathlib import Path

from bench import engine

MODEL = "random:llama?layers=1&hidden=32&heads=2&kv_heads=1&vocab=300&context=1024"


def test_every_figure_is_there(tmp_path: Path) -> None:
    """Plain decoding, both curves and the step-time model end in the JSON file, as positive numbers."""
    path = tmp_path / "engine.json"
    code = engine.main(
        ["--model", MODEL, "--quick", "--context", "20", "--measure-seconds", "5", "--json", str(path)]
    )
    content = json.loads(path.read_text())
    figures = {figure["name"]: figure for figure in content["figures"]}
    for name in ("plain decoding, share of the bandwidth", "plain decoding over generate"):
        assert figures[name]["value"] > 0
        assert figures[name]["target"]
    for sequences in ("1 sequence", "16 sequences"):
        ratios = [figures[f"{sequences}, {nodes} nodes: over a one-token step"]["value"] for nodes in engine.NODES]
        assert ratios[0] == 1
        assert min(ratios) > 0
    assert figures["step-time model, largest error"]["value"] >= 0
    assert len(content["details"]["held out"]) == len(engine.HELD_OUT)
    assert code == int(any(figure["met"] is False for figure in content["figures"]))
