"""Log lines: one JSON object each, or coloured text for people, on stderr; ours and the libraries' alike.

`bind` gives every line of a task its request and trace ids. Prompts, outputs and secrets are not logged: nobody
passes them, and what looks like one is struck out here all the same.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

STRUCK_OUT = "[not logged]"

_SECRET_NAMES = frozenset(
    {"prompt", "text", "output", "messages", "password", "secret", "api_key", "authorization", "credentials"}
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_BEARER = re.compile(r"(?i)(bearer\s+)\S+")


def configure(
    level: str,
    log_format: Literal["json", "console"],
    *,
    context: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
    libraries: bool = True,
) -> None:
    """Set up this process' logging.

    Args:
        level: debug, info, warning or error; the libraries' lines come from warning on, at debug from info on.
        context: on every line, e.g. service and pod id; what a line says itself goes first.
        stream: where to; None = stderr.
        libraries: take over the standard library's logging too; False in a process that is not ours alone.
    """
    stream = sys.stderr if stream is None else stream
    number = logging.getLevelNamesMapping()[level.upper()]
    shared = _shared(dict(context or {}))
    renderer: Processor = structlog.processors.JSONRenderer(ensure_ascii=False)
    if log_format == "console":
        # Its own way to print an exception shows local variables, and those hold prompts.
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)
    else:
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    if not libraries:
        return
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if number <= logging.DEBUG else max(number, logging.WARNING))
    logging.captureWarnings(True)


def bind(**ids: str) -> None:
    """Put ids on every line that the running task, and those it starts, log from now on; empty ones are left out."""
    structlog.contextvars.bind_contextvars(**{name: value for name, value in ids.items() if value})


def strike_out(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Processor: no secret and no text of a request passes, whoever logged it."""
    for name, value in event.items():
        if name in _SECRET_NAMES:
            event[name] = STRUCK_OUT
        elif isinstance(value, str) and ("://" in value or "earer" in value):
            event[name] = _BEARER.sub(rf"\1{STRUCK_OUT}", _URL_CREDENTIALS.sub(f"{STRUCK_OUT}@", value))
    return event


def _shared(context: dict[str, Any]) -> list[Processor]:
    def add_context(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**context, **event}

    return [
        structlog.contextvars.merge_contextvars,
        add_context,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        strike_out,
    ]
