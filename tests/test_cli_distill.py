"""The command lines of `distill` and `boost`."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftree.cli import main
from graftree.cli.distill import read_prompts
from graftree.errors import InvalidArgument
from graftree.models.load import load

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
    path.write_text('"half')
    with pytest.raises(InvalidArgument, match="line 1"):
        read_prompts(path)
