"""`ProcessPod`: how a child process starts, fails, ends, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graftree.errors import ConfigError, Incompatible, Unavailable
from graftree.local import processes
from graftree.local.folder import Folder
from graftree.local.pod import LocalPod
from graftree.local.processes import ProcessPod, Spawner, child_environ

Maker = Callable[[str], ProcessPod]


@pytest.fixture
def ends() -> list[str]:
    """What the pods reported as unexpected ends."""
    return []


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str]) -> Iterator[Maker]:
    """Makes pods that run `tests.fake_pod`; kills what is left of them."""
    monkeypatch.setitem(processes.MODULES, "speculator", "tests.fake_pod")
    spawner = Spawner()
    pods: list[ProcessPod] = []

    def make(what: str) -> ProcessPod:
        values = {"pod_id": "p", "drafter": what, "drain_seconds": 0.2}

        def on_exit(pod: LocalPod, reason: str) -> None:
            ends.append(reason)

        pod = ProcessPod(
            "speculator", 3, values, on_exit, spawner=spawner, log=tmp_path / f"{len(pods)}.log", environ={}
        )
        pods.append(pod)
        pod.start()
        return pod

    yield make
    for pod in pods:
        pod.kill()
    spawner.close()


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends, or is a zombie that waits for its parent, within some time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_ready_and_stop(make: Maker, ends: list[str]) -> None:
    """A pod is ready with the address it printed; stop ends it, and nobody is told of an end that was asked for."""
    pod = make("wait")
    assert pod.wait() == f"127.0.0.1:{pod.pid}"
    assert pod.alive
    assert os.getsid(pod.pid) == pod.pid  # so that a terminal's Ctrl-C goes to the owner alone
    pod.stop()
    assert not pod.alive
    assert ends == []


def test_output_is_drained(make: Maker) -> None:
    """A pod that prints more than a pipe holds, before and after it is ready, is not held up."""
    pod = make("noisy")
    pod.wait()
    assert pod.alive


def test_own_words(make: Maker) -> None:
    """A pod that says why it will not start raises that very error here."""
    with pytest.raises(ConfigError) as caught:
        make("complain").wait()
    assert (caught.value.key, caught.value.value, caught.value.limit) == ("speculator 3: port", "x", "a number")
    with pytest.raises(Incompatible, match="speculator 3: other vocabulary"):
        make("refuse").wait()


def test_crash_shows_the_log(make: Maker, ends: list[str]) -> None:
    """A pod that crashes during its start raises Unavailable with the end of its log."""
    with pytest.raises(Unavailable, match=r"(?s)speculator 3 exited with code 1.*broken in some way"):
        make("crash").wait()
    assert ends == []  # the caller has been told


def test_stubborn(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that ignores SIGTERM is killed after its drain time."""
    monkeypatch.setattr(processes, "_KILL_MARGIN_SECONDS", 0.1)
    pod = make("stubborn")
    pod.wait()
    pod.stop()
    assert not pod.alive


def test_unexpected_end_is_reported(make: Maker, ends: list[str]) -> None:
    """An end that nobody asked for is reported with its signal, at once."""
    pod = make("wait")
    pod.wait()
    os.kill(pod.pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while not ends and time.monotonic() < end:
        time.sleep(0.01)
    assert ends == ["speculator 3 was ended by SIGKILL"]
    pod.stop()  # and stopping it now is no error


def test_pause_and_resume(make: Maker) -> None:
    """A paused pod is alive and stopped; a killed one need not be resumed first."""
    pod = make("wait")
    pod.wait()

    def state() -> str:
        return Path(f"/proc/{pod.pid}/stat").read_text().rpartition(")")[2].split()[0]

    pod.pause()
    end = time.monotonic() + 20
    while state() != "T" and time.monotonic() < end:
        time.sleep(0.01)
    assert (state(), pod.alive) == ("T", True)
    pod.resume()
    while state() == "T" and time.monotonic() < end:
        time.sleep(0.01)
    assert state() != "T"
    pod.pause()
    pod.kill()
    assert not pod.alive


def test_started_from_a_thread_that_ends(make: Maker) -> None:
    """The kernel ties a child to the thread that started it: that is the spawner's, not the caller's."""
    made: list[ProcessPod] = []
    thread = threading.Thread(target=lambda: made.append(make("wait")))
    thread.start()
    thread.join()
    made[0].wait()
    time.sleep(0.2)
    assert made[0].alive


def test_dies_with_its_owner(tmp_path: Path) -> None:
    """When the owner is killed, the child goes too."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from graftree.local import processes\n"
        "processes.MODULES['speculator'] = 'tests.fake_pod'\n"
        "spawner = processes.Spawner()\n"
        "pod = processes.ProcessPod('speculator', 0, {'drafter': 'wait'}, print, spawner=spawner,\n"
        "                           log=Path(sys.argv[1]), environ={})\n"
        "pod.start(); pod.wait(); print(pod.pid, flush=True); time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not gone(pid, seconds=0.1)
    owner.kill()
    owner.communicate()
    assert gone(pid)


def test_environment_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child is configured by its flags alone: variables meant for other pods stay out, those asked for go in."""
    monkeypatch.setenv("GRAFTREE_PORT", "1")
    monkeypatch.setenv("GRAFTREE_CACHE", "/cache")
    environ = child_environ({"OMP_NUM_THREADS": "1"})
    assert "GRAFTREE_PORT" not in environ
    assert environ["GRAFTREE_CACHE"] == "/cache"
    assert environ["OMP_NUM_THREADS"] == "1"


def test_what_a_killed_stack_leaves_is_removed(tmp_path: Path) -> None:
    """A folder goes with its stack; one whose owner was killed goes when the next is made; one in use stays."""
    hold = "from graftree.local.folder import Folder; import sys, time; from pathlib import Path\n"
    hold += "folder = Folder(Path(sys.argv[1])).__enter__(); print(folder.path, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        with Folder(tmp_path) as folder:
            assert theirs.is_dir()
            assert folder.path.is_dir()
        assert not folder.path.exists()
        process.kill()
    assert theirs.is_dir()
    with Folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder.path]
