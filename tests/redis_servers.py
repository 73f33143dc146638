"""Real servers for what one socket cannot show: a cluster of one node, a primary and a replica with a Sentinel."""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from graftree.store.embedded import EmbeddedRedis


class Server:
    """One valkey-server on a TCP port. `stop` ends it as SIGKILL does, `start` starts it again, empty."""

    def __init__(self, *options: str, sentinel: str = "") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="graftree-servers-"))
        self.port = free_port()
        settings = [f"port {self.port}", f"dir {self._folder}", "bind 127.0.0.1", "logfile log"]
        settings += [sentinel] if sentinel else ['save ""', "appendonly no", "repl-diskless-sync-delay 0", *options]
        self._settings, self._mode = "\n".join(settings) + "\n", ["--sentinel"] if sentinel else []
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> Server:
        config = self._folder / "server.conf"
        config.write_text(self._settings)
        binary = str(EmbeddedRedis()._binary)
        self._process = subprocess.Popen(
            [binary, str(config), *self._mode],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(lambda: bool(self.ask("PING")), f"server on port {self.port}")
        return self

    def ask(self, *command: str) -> object:
        """A command's reply; None where there is none."""
        try:
            with Redis(port=self.port, socket_timeout=2.0, decode_responses=True) as redis:
                return redis.execute_command(*command)
        except (RedisError, OSError):
            return None

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)


class ClusterNode(Server):
    """A cluster of one node, which has all slots."""

    def __init__(self) -> None:
        super().__init__("cluster-enabled yes", f"cluster-port {free_port()}", "cluster-node-timeout 500")

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.port}"

    def start(self) -> ClusterNode:
        super().start()
        self.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        eventually(lambda: "cluster_state:ok" in str(self.ask("CLUSTER", "INFO")), "the cluster")
        return self


class Watched:
    """A primary, a replica of it, and the Sentinel that puts the replica in its place.

    Attributes:
        url: of whichever of the two is the primary.
    """

    def __init__(self, primary: Server, replica: Server, sentinel: Server) -> None:
        self.primary, self.replica, self.sentinel = primary, replica, sentinel
        self.url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"

    def failed_over(self) -> bool:
        """Whether the replica is the primary now."""
        role = self.replica.ask("ROLE")
        return isinstance(role, list) and role[0] == "master"


@contextmanager
def watched() -> Iterator[Watched]:
    """All three, in sync; they end with the block."""
    with ExitStack() as stack:

        def begin(server: Server) -> Server:
            stack.callback(server.close)
            return server.start()

        primary = begin(Server())
        replica = begin(Server(f"replicaof 127.0.0.1 {primary.port}"))
        eventually(lambda: "master_link_status:up" in _info(replica), "replication")
        monitor = f"sentinel monitor main 127.0.0.1 {primary.port} 1"
        sentinel = begin(
            Server(
                sentinel=f"{monitor}\nsentinel down-after-milliseconds main 300\nsentinel failover-timeout main 1000"
            )
        )
        eventually(lambda: len(_replicas(sentinel)) == 1, "the Sentinel")
        yield Watched(primary, replica, sentinel)


def eventually(condition: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _info(server: Server) -> str:
    info = server.ask("INFO", "replication")
    return "\n".join(f"{key}:{value}" for key, value in info.items()) if isinstance(info, dict) else ""


def _replicas(sentinel: Server) -> list[object]:
    found = sentinel.ask("SENTINEL", "REPLICAS", "main")
    return found if isinstance(found, list) else []
