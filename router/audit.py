"""`AuditLog`: one JSON line per call at the edge: who asked, what for, how it ended. Never what was said."""

from __future__ import annotations

import logging
import sys
from logging.handlers import WatchedFileHandler
from typing import Any

import structlog

from graftree.errors import ConfigError
from graftree.observe.logs import strike_out


class AuditLog:
    """Independent of the log level.

    Args:
        path: a file that lines are appended to, also after somebody moved it away; - = stderr; empty = nowhere.

    Raises:
        ConfigError: names audit_log.
    """

    def __init__(self, path: str) -> None:
        self._handler: logging.Handler | None = None
        if path == "-":
            self._handler = logging.StreamHandler(sys.stderr)
        elif path:
            try:
                self._handler = WatchedFileHandler(path, encoding="utf-8")
            except OSError as error:
                limit = f"a file that can be written ({error.strerror or error})"
                raise ConfigError("audit_log", path, limit) from None
        self._render = structlog.processors.JSONRenderer(ensure_ascii=False)
        self._stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)

    def write(self, **fields: Any) -> None:
        """Append a line."""
        if self._handler is None:
            return
        event = self._stamp(None, "", {"event": "audit", **fields})
        line = self._render(None, "", strike_out(None, "", event))
        record = logging.LogRecord("graftree.audit", logging.INFO, "", 0, str(line), None, None)
        self._handler.handle(record)

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()
