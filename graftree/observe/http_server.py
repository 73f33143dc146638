"""`WsgiServer`: a small HTTP server that connections which say nothing, or say it slowly, cannot wear out.

A thread a connection, one request a connection. Who is silent for too long is left; where too many are there, the one
that has been there longest goes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

SILENT_SECONDS = 10.0
MOST_CONNECTIONS = 32


class WsgiServer(ThreadingMixIn, WSGIServer):
    """Serves from threads of its own; see `serve`."""

    daemon_threads = True
    request_queue_size = 4 * MOST_CONNECTIONS

    def __init__(self, *args: Any, **options: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}  # by id, oldest first
        super().__init__(*args, **options)

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._open)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection; the oldest one makes room for it."""
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = self._open.pop(next(iter(self._open)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """It is over."""
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody who left in the middle is no news."""


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def get_stderr(self) -> Any:
        """Where wsgiref writes the trace of a connection that broke: nowhere."""
        return _Nowhere()


class _Nowhere:
    def write(self, text: str) -> None:
        """Drop it."""

    def flush(self) -> None:
        """There is nothing."""


def serve(app: Callable[..., Any], host: str, port: int) -> WsgiServer:
    """Listen and serve until `shutdown`.

    Raises:
        OSError, OverflowError: it cannot listen there.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    server_class = type("Server", (WsgiServer,), {"address_family": family})
    server: WsgiServer = make_server(str(address[0]), port, app, server_class, handler_class=_Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
