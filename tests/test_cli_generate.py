"""`graftree generate` against a scripted service: output, exit codes, messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graftree.cli import main
from graftree.errors import InvalidArgument, Unavailable
from graftree.v1.common_pb2 import SPECULATION_MODE_MSS_WITHOUT_REPLACEMENT
from tests.fake_generation import FakeGeneration, script

PIECES = [("He", [4]), ("", [5]), ("llo\u00e9", [6, 7])]


def test_text_on_stdout_and_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """The text alone goes to stdout, so it can be piped; one line about it to stderr."""
    with FakeGeneration(script(PIECES)) as service:
        assert main(["generate", "p", "--target", service.target]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello\u00e9\n"
    assert captured.err.count("\n") == 1
    assert "4 tokens" in captured.err
    assert "mean acceptance length 1.50" in captured.err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object with the documented keys and nothing else."""
    with FakeGeneration(script(PIECES)) as service:
        assert main(["generate", "p", "--json", "--target", service.target]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert captured.err == ""
    assert printed["text"] == "Hello\u00e9"
    assert printed["token_ids"] == [4, 5, 6, 7]
    assert printed["finish_reason"] == "length"
    assert printed["usage"] == {"prompt_tokens": 3, "completion_tokens": 4}
    assert printed["speculation"]["acceptance_histogram"] == [1, 1]
    assert printed["timings"]["total_ns"] == 3
    assert printed["seed"] == 5


def test_options_reach_the_service() -> None:
    """Flags land in the request's fields."""
    flags = ["--max-new-tokens", "3", "--temperature", "0.5", "--seed", "7", "--top-k", "2", "--stop", "a"]
    with FakeGeneration(script(PIECES)) as service:
        assert main(["generate", "p", "--target", service.target, "--no-speculation", *flags]) == 0
        assert main(["generate", "p", "--target", service.target, "--mode", "mss-without-replacement"]) == 0
    request = service.requests[0]
    assert (request.prompt, request.stopping.max_new_tokens, list(request.stopping.stop)) == ("p", 3, ["a"])
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.top_k) == (0.5, 7, 2)
    assert request.speculation.off
    assert service.requests[1].speculation.mode == SPECULATION_MODE_MSS_WITHOUT_REPLACEMENT


def test_structured_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A schema is read from its file, other constraints from the command line; a missing file exits with 2."""
    schema = tmp_path / "schema.json"
    schema.write_text("{}")
    with FakeGeneration(script(PIECES)) as service:
        assert main(["generate", "p", "--target", service.target, "--json-schema", str(schema)]) == 0
        assert main(["generate", "p", "--target", service.target, "--choice", "a", "--choice", "b"]) == 0
        assert main(["generate", "p", "--target", service.target, "--grammar", str(tmp_path / "none")]) == 2
    assert service.requests[0].structured_output.json_schema == "{}"
    assert list(service.requests[1].structured_output.choice.options) == ["a", "b"]
    assert "--grammar" in capsys.readouterr().err


def test_chat_and_target_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """--chat wraps the prompt as a user's message; GRAFTREE_TARGET stands in for --target."""
    with FakeGeneration(script(PIECES)) as service:
        monkeypatch.setenv("GRAFTREE_TARGET", service.target)
        assert main(["generate", "p", "--chat"]) == 0
        assert main(["generate", "p", "--system", "s"]) == 0
    roles = [[(each.role, each.content) for each in request.chat.messages] for request in service.requests]
    assert roles == [[("user", "p")], [("system", "s"), ("user", "p")]]


def test_prompt_from_stdin() -> None:
    """A dash reads the prompt from stdin."""
    with FakeGeneration(script(PIECES)) as service:
        command = [sys.executable, "-m", "graftree.cli", "generate", "-", "--target", service.target]
        done = subprocess.run(command, input="from a pipe", capture_output=True, text=True, check=True)
    assert done.stdout == "Hello\u00e9\n"
    assert service.requests[0].prompt == "from a pipe"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InvalidArgument("sampling.temperature", -1.0, "0 to 100"), 2, ("sampling.temperature", "-1.0", "0 to 100")),
        (Unavailable("no router"), 1, ("no router",)),
    ],
)
def test_errors_are_one_line(
    error: Exception, code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A refused request names field, value and limit on one line and exits with 2; other failures exit with 1."""
    with FakeGeneration([], error=error) as service:  # type: ignore[arg-type]
        assert main(["generate", "p", "--target", service.target]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words)


def test_what_cannot_be_sent_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A value that no request can hold is refused the same way, before anything is sent."""
    assert main(["generate", "p", "--seed", "-1", "--target", "127.0.0.1:1"]) == 2
    assert "sampling.seed = -1: an integer from 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["generate"],
        ["generate", "p", "--max-tokens", "3"],
        ["generate", "p", "--temperature", "hot"],
        ["up", "p"],
        ["models"],
        ["serve"],
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown commands, flags and values exit with 2 and one line, without a page of usage."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("setting", ["verifier", "verifier.dtype", "llm.dtype=float32", "=", "verifier=x"])
def test_a_wrong_setting_is_refused(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--set says what it wants before anything is started."""
    assert main(["up", "--set", setting]) == 2
    assert "TIER.KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--model", "m"], ["--speculator", "ngram"], ["--set", "router.port=1"]])
def test_a_target_and_a_stack_contradict(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Options of the private stack are refused where a running one is asked, not ignored."""
    assert main(["generate", "x", "--target", "127.0.0.1:1", *option]) == 2
    assert option[0] in capsys.readouterr().err


def test_interrupt_cancels_and_exits_with_130() -> None:
    """Ctrl-C cancels the generation on the service and exits with 130, without a trace."""
    with FakeGeneration(script([("He", [4])])[:-1], endless=True) as service:
        command = [sys.executable, "-m", "graftree.cli", "generate", "p", "--target", service.target]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.read(2) == "He"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in errors
        assert service.gone.wait(10)


def test_a_reader_that_leaves_is_no_trace() -> None:
    """`graftree generate ... | head -c 0` ends quietly."""
    with FakeGeneration(script(PIECES)) as service:
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "graftree.cli", "generate", "p", "--target", service.target]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
        os.close(write)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`models list` shows what is cached, as text and as JSON; `models pull` refuses what is no model."""
    monkeypatch.setenv("GRAFTREE_CACHE", str(tmp_path))
    assert main(["models", "list"]) == 0
    assert "no models" in capsys.readouterr().out
    assert main(["models", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["models", "pull", "nothing:at all"]) == 2
    assert "model" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`graftree version` names the installed version."""
    assert main(["version"]) == 0
    assert capsys.readouterr().out == "graftree 0.1.0\n"
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "graftree 0.1.0\n"


def test_a_port_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """A target's port is checked before anything is sent."""
    assert main(["generate", "p", "--target", "127.0.0.1:99999"]) == 2
    assert capsys.readouterr().err == "graftree: target = '127.0.0.1:99999': HOST:PORT with a port from 1 to 65535\n"


def test_speculators_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Two options that contradict each other are named with what was given."""
    assert main(["up", "--no-speculators", "--speculator", "ngram"]) == 2
    assert capsys.readouterr().err == "graftree: --speculator='ngram': not together with --no-speculators\n"
