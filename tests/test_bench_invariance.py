"""`bench.invariance` and `bench.int8` on a tiny model: every figure is there, and what must be exact is."""

from __future__ import annotations

import json
from pathlib import Path

from bench import int8, invariance

MODEL = "random:llama?layers=1&hidden=64&heads=2&kv_heads=1&intermediate=64&vocab=512&context=1024&scale=3"
LINES = [
    {"question_id": index, "category": f"c{index % 2}", "turns": [f"{index} what is the quick brown fox?"]}
    for index in range(4)
]


def figures(path: Path) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in json.loads(path.read_text())["figures"]}


def test_departures_and_costs(tmp_path: Path) -> None:
    """Without `deterministic` some log probabilities differ in other company, with it none does; each shape of a step
    has its ratio."""
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(map(json.dumps, LINES)))
    options = ["--model", MODEL, "--prompts", str(prompts), "--quick", "--context", "40", "--json", str(path)]
    assert invariance.main([*options, "--tokens", "8"]) == 0
    found = figures(path)
    for company in invariance.COMPANY:
        assert found[f"deterministic, {company}: log probabilities that differ"] == 0
    assert max(found[f"default, {company}: log probabilities that differ"] for company in invariance.COMPANY) > 0
    ratios = [value for name, value in found.items() if name.endswith("deterministic over default")]
    assert len(ratios) == 8
    assert min(ratios) > 0


def test_rounding(tmp_path: Path) -> None:
    """int8 takes half of bfloat16's bytes and a little for the factors, and is compared with float32's answers."""
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(map(json.dumps, LINES)))
    options = ["--model", MODEL, "--prompts", str(prompts), "--quick", "--context", "40", "--json", str(path)]
    assert int8.main([*options, "--tokens", "6"]) == 0
    found = figures(path)
    assert 0.5 < found["linear layers in int8"] / found["linear layers in bfloat16"] < 0.6
    assert (
        found["int8: mean difference of a log probability"] > found["bfloat16: mean difference of a log probability"]
    )
