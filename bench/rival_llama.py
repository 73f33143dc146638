"""llama.cpp, through either of two packages: llama-cpp-python, or xllamacpp, which has wheels.

Both read the GGUF file as it is, and copies of it in full precision that hold the same weights.
"""

from __future__ import annotations

import http.client
import importlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.rival_worker import Engine, Setup, threads

PRECISIONS = {"F32": 0, "F16": 1}  # general.file_type
BATCH = 512
_SECONDS = 170.0  # for one answer


def files(setup: Setup) -> dict[str, Path]:
    """Way -> its file; what is not there yet is made. Raises: FileNotFoundError."""
    source = setup.gguf_path()
    copies = {name: Path(setup.folder) / f"{source.stem}.{name}.gguf" for name in PRECISIONS}
    convert(source, {name: path for name, path in copies.items() if not path.is_file()})
    return {"Q4_1" if "Q4_1" in source.name else "as it is": source} | copies


def convert(source: Path, targets: Mapping[str, Path]) -> None:
    """Write copies with the same metadata: matrices in the wanted precision, vectors in F32.

    Args:
        targets: name, of `PRECISIONS` -> file.
    """
    if not targets:
        return
    gguf = importlib.import_module("gguf")  # also where Graftree is not installed
    reader = gguf.GGUFReader(source)  # takes seconds: the vocabulary is read token by token
    for name, target in targets.items():
        partial = target.with_suffix(".part")
        _write(gguf, reader, partial, name)
        partial.rename(target)


def _write(gguf: Any, reader: Any, target: Path, name: str) -> None:
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        value = PRECISIONS[name] if field.name == "general.file_type" else field.contents()
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, value, field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype("float16" if name == "F16" and values.ndim > 1 else "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCppPython(Engine):
    """llama-cpp-python."""

    def __init__(self, setup: Setup) -> None:
        self._library = importlib.import_module("llama_cpp")
        self.version = f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
        self._eos = set(setup.eos)
        self._models = {
            way: self._library.Llama(str(path), n_ctx=setup.context, n_batch=BATCH, verbose=False)
            for way, path in files(setup).items()
        }
        self.settings = {way: threads() for way in self._models}

    def generate(self, way: str, setting: dict[str, Any], token_ids: Sequence[int], tokens: int) -> list[int]:
        """As `Engine.generate`; nothing of an earlier prompt is used again."""
        model = self._models[way]
        self._library.llama_set_n_threads(model.ctx, setting["threads"], setting["threads"])
        model.reset()
        answer: list[int] = []
        for token in model.generate(list(token_ids), temp=0.0):
            answer.append(token)
            if token in self._eos or len(answer) == tokens:
                break
        return answer


class XLlamaCpp(Engine):
    """xllamacpp: llama.cpp's own server in this process, one for each file and number of threads.

    It is asked over HTTP, which adds about a millisecond to an answer.
    """

    def __init__(self, setup: Setup) -> None:
        self._library = importlib.import_module("xllamacpp")
        built = " ".join(re.findall(r"(\w+) = 1", self._library.get_system_info()))
        self.version = f"llama.cpp of xllamacpp {importlib.metadata.version('xllamacpp')} ({built})"
        self._eos, self._context = set(setup.eos), setup.context
        self._files = files(setup)
        self._servers: dict[tuple[str, int], Any] = {}
        self.settings = {way: threads() for way in self._files}
        for way, settings in self.settings.items():
            for setting in settings:  # loaded before any trial
                self._server(way, setting["threads"])

    def _server(self, way: str, count: int) -> Any:
        if (way, count) not in self._servers:
            params = self._library.CommonParams()
            params.model.path = str(self._files[way])
            params.n_ctx, params.n_batch, params.n_parallel, params.n_gpu_layers = self._context, BATCH, 1, 0
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = count
            params.cache_ram_mib, params.verbosity = 0, 0
            self._servers[way, count] = self._library.Server(params)
        return self._servers[way, count]

    def generate(self, way: str, setting: dict[str, Any], token_ids: Sequence[int], tokens: int) -> list[int]:
        """As `Engine.generate`; nothing of an earlier prompt is used again.

        Raises:
            RuntimeError: the server refuses.
        """
        request = {
            "prompt": list(token_ids),
            "n_predict": tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        # A connection of its own: the server closes those that are idle between two prompts.
        place = urlsplit(self._server(way, setting["threads"]).listening_address).netloc
        with closing(http.client.HTTPConnection(place, timeout=_SECONDS)) as connection:
            connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"llama.cpp answers {response.status}: {text[:200].decode(errors='replace')}")
        answer: list[int] = json.loads(text)["tokens"]
        ends = (place for place, token in enumerate(answer) if token in self._eos)
        return answer[: next(ends, len(answer)) + 1]


def engine(setup: Setup) -> Engine:
    """Through llama-cpp-python where it is installed, xllamacpp otherwise. Raises: ModuleNotFoundError."""
    if importlib.util.find_spec("llama_cpp") is not None:
        return LlamaCppPython(setup)
    if importlib.util.find_spec("xllamacpp") is None:
        raise ModuleNotFoundError("No module named 'llama_cpp' or 'xllamacpp'")
    return XLlamaCpp(setup)
