"""`Worker`: the engine's thread. The event loop submits commands, the engine answers through the streams' sinks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import structlog

from verifier_service.engine import Engine

log = structlog.get_logger(__name__)

Command: TypeAlias = Callable[[Engine], None]


class Worker:
    """Runs `Engine.iterate` as long as there is work, and sleeps on a condition when there is none.

    Commands take effect between two forwards, in the order they were submitted.
    """

    def __init__(self, engine: Engine, *, changed: Callable[[], None], died: Callable[[BaseException], None]) -> None:
        """
        Args:
            engine: only this thread touches it from `start` on.
            changed: called on this thread when the engine's load or step time may have changed; must not block.
            died: called on this thread when it ends by an exception.
        """
        self._engine, self._changed, self._died = engine, changed, died
        self._condition = threading.Condition()
        self._inbox: list[Command] = []
        self._stopping = False
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="verifier-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, *commands: Command) -> None:
        """Queue commands; from any thread, returns at once."""
        with self._condition:
            self._inbox.extend(commands)
            self._condition.notify()

    def stop(self) -> None:
        """End the thread after the forward under way and wait for it. Queued commands are dropped."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            log.exception("engine thread died")
            self._died(error)

    def _turn(self) -> bool:
        engine, before = self._engine, self._engine.news
        timeout = None if not self._busy else 0.0
        while True:
            commands = self._take(timeout)
            if commands is None:
                return False
            for command in commands:
                command(engine)
            engine.flush()  # what commands answered does not wait for the forward
            patience = engine.patience_ns()
            if not patience:
                break
            timeout = patience / 1e9
        self._busy = engine.iterate()
        engine.flush()
        if engine.news != before:
            self._changed()
        if not self._busy and not engine.sessions:
            engine.check()
        return True

    def _take(self, timeout: float | None) -> list[Command] | None:
        """What was submitted, waiting for it at most `timeout` seconds (None = for ever). None: stop."""
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or self._stopping, timeout)
            if self._stopping:
                return None
            commands, self._inbox = self._inbox, []
            return commands
