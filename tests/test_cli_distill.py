"""The command lines of `distill` and `boost`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graftree.cli import main
from graftree.cli.distill import read_prompts
from graftree.distill.run import DistillSettings, begin
from graftree.distill.streams import Script
from graftree.errors import InvalidArgument
from graftree.models.load import load
from graftree.progress import Bar

SMALL = [
    "--model", "random:llama?layers=2&hidden=32&vocab=64&scale=3&eos=9", "--tokens", "64", "--streams", "2",
    "--length", "24", "--epochs", "1", "--batch", "2", "--micro", "2", "--head-size", "50", "--quiet",
    "--device", "cpu",
]  # fmt: skip


def test_distill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A package comes out of the command; its progress is told on stderr."""
    assert main(["distill", *SMALL, "--layers", "1", str(tmp_path / "ssm")]) == 0
    assert load(str(tmp_path / "ssm")).draft_ids is not None
    assert "held out: top1" in capsys.readouterr().err


def test_boost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packages and the report come out of the command."""
    arguments = ["--ssm", "0", "--ssm", "1", "--single", "0,1", "--run-length", "2", str(tmp_path / "out")]
    assert main(["boost", *SMALL, *arguments]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"ssm-1", "ssm-2", "single"}
    assert "one of the same size" in capsys.readouterr().out


def _last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_more_text_is_learned_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A larger corpus on the same work directory gives the package, draft ids too, of a run that began with it."""
    small, work = [*SMALL, "--layers", "1"], ["--work", str(tmp_path / "work")]
    assert main(["distill", *small, *work, str(tmp_path / "a")]) == 0
    assert main(["distill", *small, "--tokens", "140", *work, str(tmp_path / "a")]) == 0
    assert "training begins anew" in capsys.readouterr().err
    assert main(["distill", *small, "--tokens", "140", str(tmp_path / "b")]) == 0
    grown, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    for name, tensor in whole.items():
        torch.testing.assert_close(grown[name], tensor, rtol=1e-2, atol=1e-3)
    assert json.loads((tmp_path / "a" / "ssm.json").read_text())["recipe"]["trained_tokens"] == 96


def test_another_students_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other layers or another head on the same work directory: one line with both values and the way out; the
    package stays. A damaged shard is written again; a damaged checkpoint is named."""
    command = ["distill", *SMALL, "--layers", "1", str(tmp_path / "ssm")]
    assert main(command) == 0
    before = (tmp_path / "ssm" / "model.safetensors").read_bytes()
    for option, value, words in (
        ("--layers", "0", "layers [1], now it is [0]"),
        ("--layers", "0,1", "layers [1], now it is [0, 1]"),
        ("--head-size", "40", "head size 50, now it is 40"),
        ("--batch", "4", "batch 2, now it is 4"),
    ):
        capsys.readouterr()
        assert main([*command, option, value]) == 1
        line = _last_line(capsys)
        assert words in line
        assert "--work" in line
    assert (tmp_path / "ssm" / "model.safetensors").read_bytes() == before
    shard = tmp_path / "ssm.work" / "corpus" / "shard-00001.safetensors"
    written = load_file(shard)["token_ids"].clone()
    shard.write_bytes(shard.read_bytes()[:100])
    assert main(command) == 0
    assert "shard-00001.safetensors is damaged: it is written again" in capsys.readouterr().err
    assert torch.equal(load_file(shard)["token_ids"], written)
    (tmp_path / "ssm.work" / "checkpoint.safetensors").write_bytes(b"")
    assert main(command) == 1
    assert "checkpoint.safetensors is damaged" in (line := _last_line(capsys))
    assert "delete it and run again" in line


def test_another_boosts_checkpoints_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other layers, or another run length, on the same work directory: refused before any of them is trained on."""
    out = str(tmp_path / "out")
    assert main(["boost", *SMALL, "--ssm", "0", "--ssm", "1", out]) == 0
    assert main(["boost", *SMALL, "--ssm", "0", "--ssm", "1", "--run-length", "2", out]) == 1
    assert "ssm-2.safetensors was made with run length 1, now it is 2" in _last_line(capsys)
    assert main(["boost", *SMALL, "--ssm", "1", "--ssm", "1", out]) == 1
    assert "ssm-1.safetensors was made with layers [0], now it is [1]" in _last_line(capsys)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["distill", "--layers", "0,9", "ssm"], "layers = 9: below the LLM's 2"),
        (["distill", "--layers", "0,0", "ssm"], "layers = '0,0': each layer once"),
        (["boost", "--ssm", "0", "--ssm", "9", "ssm"], "layers = 9"),
        (["boost", "--ssm", "0", "--single", "0,9", "ssm"], "layers = 9"),
        (["distill", "--length", "257", "ssm"], "length = 257: at most the LLM's context, 256 tokens"),
        (["distill", "--device", "foo", "ssm"], "device = 'foo'"),
        (["distill", "file"], "DIR = 'file': a directory"),
        (["distill", "file/below"], "DIR = 'file/below': a directory"),
        (["distill", "--work", "file", "ssm"], "work = 'file': a directory"),
        (["distill", "/proc/x"], "DIR = '/proc/x': a directory to write to"),
        (["distill", "."], "DIR = '.': a directory with a name of its own"),
        (["distill", "/"], "DIR = '/': a directory with a name of its own"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    named: str,
) -> None:
    """Layers that the LLM lacks, a dialogue beyond its context, no device, no directory: exit code 2, one line, and
    nothing was written."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main([command[0], *SMALL, *command[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"graftree: {named}")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_threads_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What both commands begin with sets torch's threads, and makes the path of an LLM absolute."""
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr("graftree.distill.run.check_llm", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    llm = begin(DistillSettings("./llm", threads=2), tmp_path / "out", tmp_path / "work", [])
    assert set_to == [2]
    assert str(llm) == f"directory:{tmp_path}/llm"
    assert str(begin(DistillSettings("pypi:x"), tmp_path / "out", tmp_path / "work", [])) == "pypi:x"


def test_dropped_prompts_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts that are longer than a dialogue, those that found no room, and all where there are no turns: told."""
    path, command = tmp_path / "prompts.txt", ["distill", *SMALL, "--layers", "1", "--prompts"]
    path.write_text("a\n" * 9 + "long " * 50 + "\n")
    assert main([*command, str(path), str(tmp_path / "plain")]) == 0
    assert "all 10 prompts were dropped: the LLM has no chat template" in capsys.readouterr().err
    turns = Script((1,), (9, 3), (9, 4), frozenset({9}), ((),), True)
    monkeypatch.setattr(Script, "of", lambda _: turns)
    monkeypatch.setattr("graftree.distill.run.check_answers", lambda *_: None)
    assert main([*command, str(path), str(tmp_path / "chat")]) == 0
    error = capsys.readouterr().err
    assert "1 of 10 prompts were dropped: with an answer they are longer than a dialogue of 24" in error
    dropped = re.search(r"(\d) of 10 prompts were dropped: the dialogues had no room for them", error)
    assert dropped is not None
    assert 1 <= int(dropped[1]) <= 5  # two shards of two dialogues take one each at least


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Where stderr is no terminal a quick bar is two lines, the first and the last."""
    with Bar(total=1000) as bar:
        for _ in range(1000):
            bar.update()
            bar.refresh()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "1000/1000" in lines[1]


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--epochs", "0", "epochs"), ("--tokens", "0", "tokens"), ("--layers", "0,x", "layers"),
        ("--layers", "9", "9"), ("--model", "nokind:x", "model"), ("--prompts", "/nowhere", "prompts"),
        ("--streams", "0", "streams"),
        ("--head-size", "1", "head_size"), ("--learning-rate", "-1", "learning_rate"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, named: str
) -> None:
    """A value out of range ends with exit code 2 and one line that names it."""
    assert main(["distill", *SMALL, option, value, str(tmp_path / "ssm")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("graftree: ")
    assert named in error


def test_prompt_files(tmp_path: Path) -> None:
    """A line is a prompt; one that begins with a quote is a JSON string; empty lines are none; bad ones are named."""
    path = tmp_path / "prompts.txt"
    path.write_text('What is a tree?\n\n"two\\nlines"\n')
    assert read_prompts(path) == ["What is a tree?", "two\nlines"]
    for text, named in (('"half', "line 1"), ('ok\n"\\ud800abc"', "line 2"), (" \n", "at least one prompt")):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=named):
            read_prompts(path)
