"""`Rival`: another engine's process (`bench.rival_worker`), or why there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from bench.rival_worker import Setup

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS, ANSWER_SECONDS = 300.0, 180.0  # the first start converts files


class RivalError(Exception):
    """An engine that is not there, or gave up."""


class Rival:
    """Starts at once; `await_ready` before anything else.

    Args:
        kind: of `bench.rival_worker`.
        python: the interpreter that has the engine.

    Attributes:
        name: for people.
        version: its own word, once it is ready.
        settings: way -> the fastest setting.
    """

    def __init__(self, name: str, kind: str, setup: Setup, python: str = sys.executable) -> None:
        self.name, self.version = name, ""
        self.settings: dict[str, dict[str, Any]] = {}
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONHOME"}
        self._process = subprocess.Popen(
            [python, "-m", "bench.rival_worker", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environ | {"PYTHONPATH": str(ROOT)},
        )
        self._setup = setup

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.kill()
        self._process.wait()

    def await_ready(self) -> None:
        """Load, and find the fastest settings.

        Raises:
            RivalError: with the reason why it does not run here.
        """
        answer = self._ask(asdict(self._setup), START_SECONDS)
        self.version = answer["version"]
        self.settings = {way: entry["setting"] for way, entry in answer["ways"].items()}

    def generate(self, way: str, token_ids: Sequence[int], max_new_tokens: int) -> tuple[tuple[int, ...], float]:
        """Tokens of a greedy answer, and the seconds it took by the engine's own clock.

        Raises:
            RivalError: there is none.
        """
        request = {"way": way, "token_ids": list(token_ids), "max_new_tokens": max_new_tokens}
        answer = self._ask(request, ANSWER_SECONDS)
        return tuple(answer["token_ids"]), answer["seconds"]

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._at_most(seconds):
            with suppress(BrokenPipeError):  # what it said before its end is still to be read
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended without a word"}
        if "error" in answer:
            raise RivalError(answer["error"])
        return answer

    @contextmanager
    def _at_most(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
