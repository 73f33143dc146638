"""`graftree up` and a `generate` of its own stack, as real processes on a stand-in model."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graftree.cli import main
from tests.test_local_stack_processes import gone

COMMAND = [sys.executable, "-m", "graftree.cli"]
STACK = ["--model", "standin:?step_ms=1", "--speculator", "standin", "--set", "verifier.threads=1"]


def children(pid: int) -> dict[str, int]:
    """Tier of each child process of `pid`, and its process id."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            arguments = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            found[arguments[4] if "graftree.local.child" in arguments else "redis"] = int(child)
    return found


def test_up_serves_reports_and_drains(capsys: pytest.CaptureFixture[str]) -> None:
    """`up` prints an endpoint and a line that works when pasted, reports a pod that dies, goes on without it, and
    ends everything on SIGTERM with exit code 0."""
    up = subprocess.Popen(
        [*COMMAND, "up", *STACK, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert up.stdout is not None
        assert up.stderr is not None
        endpoint = up.stdout.readline().split()
        assert endpoint[0] == "endpoint"
        line = shlex.split(up.stdout.readline())
        assert line[:4] == ["graftree", "generate", "--target", endpoint[1]]
        assert main([*line[1:], "--max-new-tokens", "9", "--json", "--ignore-eos"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["usage"]["completion_tokens"] == 9

        pids = children(up.pid)
        assert set(pids) == {"router", "verifier_service", "speculator_service", "redis"}
        os.kill(pids["speculator_service"], signal.SIGKILL)
        for message in up.stderr:
            if "ended" in message:
                break
        assert message == "graftree: speculator 0 was ended by SIGKILL\n"
        assert main([*line[1:], "--max-new-tokens", "9", "--json", "--ignore-eos"]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == answer["token_ids"]

        up.send_signal(signal.SIGTERM)
        _, errors = up.communicate(timeout=60)
        assert up.returncode == 0
        assert "draining" in errors
        assert "Traceback" not in errors
        assert all(gone(pid) for pid in pids.values())
    finally:
        up.kill()
        up.communicate()


def test_generate_with_a_private_stack(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a target, `generate` starts a stack, says so on stderr, answers on stdout, and takes the stack away."""
    monkeypatch.delenv("GRAFTREE_TARGET", raising=False)
    before = children(os.getpid())  # other tests' servers
    assert main(["generate", "x", "--json", "--max-new-tokens", "5", "--ignore-eos", *STACK]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["usage"]["completion_tokens"] == 5
    assert "verifier 0 is ready" in captured.err
    assert children(os.getpid()) == before


def test_up_that_cannot_start(capfd: pytest.CaptureFixture[str]) -> None:
    """A mistake in the configuration of a tier is one line that names the key, and exit code 2."""
    before = children(os.getpid())
    assert main(["up", "--model", "standin:?step_ms=1", "--no-speculators", "--set", "router.tree_budget=-1"]) == 2
    errors = capfd.readouterr().err
    assert "tree_budget" in errors
    assert "Traceback" not in errors
    assert children(os.getpid()) == before
