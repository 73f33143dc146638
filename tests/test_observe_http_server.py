"""The HTTP server of the metrics: connections that say nothing or nonsense take no room from those that ask."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from graftree.observe import http_server
from graftree.observe.http_server import WsgiServer, serve


@pytest.fixture
def server() -> Iterator[WsgiServer]:
    """Says yes to everything."""

    def app(environ: object, start: Callable[..., object]) -> list[bytes]:
        start("200 OK", [("Content-Type", "text/plain")])
        return [b"yes"]

    running = serve(app, "127.0.0.1", 0)
    yield running
    running.shutdown()
    running.server_close()


def ask(server: WsgiServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=20) as answer:
        return bytes(answer.read())


def connect(server: WsgiServer, begun: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    connection.sendall(begun)
    return connection


def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("never")


def test_silent_connections_make_room(server: WsgiServer) -> None:
    """Of twice as many as there may be the oldest are closed; who asks is answered; no thread stays behind."""
    threads = threading.active_count()
    silent = [connect(server, begun) for begun in (b"", b"GET / HT") * http_server.MOST_CONNECTIONS]
    until(lambda: server.connections == http_server.MOST_CONNECTIONS)
    assert ask(server) == b"yes"
    assert silent[0].recv(10) == b""
    for connection in silent:
        connection.close()
    until(lambda: server.connections == 0)
    until(lambda: threading.active_count() <= threads)


def test_who_says_nothing_is_left(server: WsgiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, whatever it has begun to say."""
    monkeypatch.setattr(http_server._Handler, "timeout", 0.1)
    for begun in (b"", b"GET / HTTP/1.1\r\nHost"):
        with connect(server, begun) as connection:
            assert connection.recv(10) == b""


def test_nonsense_is_answered_and_not_written_about(server: WsgiServer, capfd: pytest.CaptureFixture[str]) -> None:
    """Requests that are none, and connections that break before the answer, leave no trace on stderr."""
    for begun in (
        b"\x00\xff\x16\r\n\r\n",
        b"GET\r\n\r\n",
        b"X / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b"\r\n\r\n",
    ):
        connect(server, begun).close()
    assert ask(server) == b"yes"
    until(lambda: server.connections == 0)
    assert capfd.readouterr().err == ""
