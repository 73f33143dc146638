"""`ProcessPod`: a pod as a child process, and `Spawner`, the thread that all children hang on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from graftree import errors
from graftree.errors import ConfigError, GraftreeError, InvalidArgument, Unavailable
from graftree.local.pod import MODULES, LocalPod, Tier

T = TypeVar("T")

_TAIL_BYTES = 4000
_KILL_MARGIN_SECONDS = 5.0
# Drafts are worth having in time that nobody else wants: on shared cores a verify step goes before them.
_NICENESS: dict[Tier, int] = {"speculator": 10}


class Spawner:
    """Runs functions on one thread that lives as long as the stack.

    The kernel's death signal is tied to the *thread* that started a child, so whoever calls `LocalStack.add` must
    not be that thread.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graftree-spawner")

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` on the thread and wait for what it returns."""
        return self._executor.submit(function).result()

    def close(self) -> None:
        """End the thread, and with it any child that is left."""
        self._executor.shutdown()


class ProcessPod(LocalPod):
    """`python -m <tier> --flags`, in a session of its own so that a terminal's Ctrl-C reaches the parent only."""

    def __init__(
        self,
        tier: Tier,
        index: int,
        values: Mapping[str, Any],
        on_exit: Callable[[LocalPod, str], None],
        *,
        spawner: Spawner,
        log: Path,
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(tier, index, values, on_exit)
        self.log = log
        self._spawner, self._environ = spawner, environ
        self._process: subprocess.Popen[str] | None = None
        self._watcher = threading.Thread(target=self._watch, name=f"watch {self.name}", daemon=True)

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process."""
        command = [sys.executable, "-m", "graftree.local.child", str(os.getpid()), MODULES[self.tier]]
        environ = child_environ(self._environ)
        for name, value in self.values.items():
            if name in ("redis", "kv_redis"):  # may hold a password, and everybody can read a command line
                environ[f"GRAFTREE_{name.upper()}"] = str(value)
            else:
                command += [f"--{name.replace('_', '-')}", str(value)]

        def spawn() -> subprocess.Popen[str]:
            with self.log.open("ab") as stderr:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env=environ,
                    start_new_session=True,
                )

        self._process = self._spawner.run(spawn)
        if self.tier in _NICENESS:
            _yield_to_others(self._process.pid, _NICENESS[self.tier])
        self._watcher.start()

    def _watch(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not self._settled.is_set() and (address := _ready(line)):
                self._became_ready(address)
        code = self._process.wait()
        self._process.stdout.close()
        tail = self.tail()
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        elif (error := _own_words(self.name, tail)) is not None:
            self._ended(error)
            return
        else:
            how = f"exited with code {code}"
        self._ended(Unavailable(f"{self.name} {how}" + (f"; its log ends with:\n{tail}" if tail else "")))

    def tail(self) -> str:
        """The end of its log."""
        try:
            with self.log.open("rb") as log:
                return _last_bytes(log).decode(errors="replace").strip()
        except OSError:
            return ""

    def stop(self, drain_seconds: float | None = None) -> None:
        """SIGTERM, which drains as long as the pod's own configuration says; SIGKILL if it stays beyond that."""
        self._asked = True
        if drain_seconds is None:
            drain_seconds = self.config.drain_seconds
        self._signal(signal.SIGTERM)
        self._watcher.join(drain_seconds + _KILL_MARGIN_SECONDS)
        self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        self._asked = True
        self._signal(signal.SIGKILL)
        if self._watcher.ident is not None:
            self._watcher.join()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self.alive:
            self._process.send_signal(number)


def child_environ(extra: Mapping[str, str]) -> dict[str, str]:
    """This process' environment for a child, with its import path and without configuration meant for others."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith("GRAFTREE_") or key == "GRAFTREE_CACHE"
    }
    return {**inherited, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **extra}


def _yield_to_others(pid: int, niceness: int) -> None:
    """Lower a process' claim on the processor by so much; where the system does not let us, it keeps its own."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + niceness)
    with suppress(OSError):  # Linux may share time among sessions first, and each pod is one
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def _ready(line: str) -> str:
    try:
        message = json.loads(line)
    except ValueError:
        return ""
    return str(message.get("ready", "")) if isinstance(message, dict) else ""


def _own_words(name: str, tail: str) -> GraftreeError | None:
    """The error a pod's last line reports as "Class: message" (see `graftree.process.main`), or None."""
    word, _, message = tail.rpartition("\n")[2].partition(": ")
    cls = getattr(errors, word, None)
    if not isinstance(cls, type) or not issubclass(cls, GraftreeError):
        return None
    if issubclass(cls, ConfigError):
        key, _, rest = message.partition("=")
        value, _, limit = rest.partition(": ")
        return ConfigError(f"{name}: {key}", value.strip("'"), limit)
    if issubclass(cls, InvalidArgument):
        field, _, rest = message.partition(" = ")
        value, _, limit = rest.partition(": ")
        return InvalidArgument(f"{name}: {field}", value.strip("'"), limit)
    return cls(f"{name}: {message}")


def _last_bytes(log: IO[bytes]) -> bytes:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _TAIL_BYTES))
    return log.read()
