"""Other engines' adapters, without the engines: what they are asked, and the copies of a GGUF file they read."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from bench import rival_llama
from bench.rival_worker import Setup
from graftree.models.load import load
from tests.tiny_gguf import write_gguf


def quantised(source: Path, target: Path) -> Path:
    """The file with every matrix whose rows are whole Q4_1 blocks in Q4_1."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "plain.gguf")
    return quantised(tmp_path / "plain.gguf", tmp_path / "tiny.Q4_1.gguf")


def setup(source: Path, eos: tuple[int, ...] = ()) -> Setup:
    return Setup("", "", str(source), eos, 128, 3, (1, 2, 3), str(source.parent))


def test_copies_hold_the_same_weights(source: Path) -> None:
    """F32 gives the logits of the quantised file bit by bit, F16 rounded matrices; metadata but the type stays."""
    found = rival_llama.files(setup(source))
    assert set(found) == {"Q4_1", "F32", "F16"}
    assert found["Q4_1"] == source
    x = torch.tensor([[1, 2, 3]])
    assert torch.equal(load(str(found["F32"])).model(x).logits, load(str(source)).model(x).logits)
    old, half = gguf.GGUFReader(source), gguf.GGUFReader(found["F16"])
    for before, after in zip(old.tensors, half.tensors, strict=True):
        values = gguf.quants.dequantize(before.data, before.tensor_type)
        assert (after.name, after.data.dtype) == (before.name, np.float16 if values.ndim > 1 else np.float32)
        assert np.array_equal(after.data, values.astype(after.data.dtype))
    told = {field.name: field.contents() for field in old.fields.values() if not field.name.startswith("GGUF.")}
    kept = {field.name: field.contents() for field in half.fields.values() if not field.name.startswith("GGUF.")}
    assert kept == told | {"general.file_type": 1}
    stamps = [path.stat().st_mtime_ns for path in found.values()]
    assert [path.stat().st_mtime_ns for path in rival_llama.files(setup(source)).values()] == stamps


class Completions(BaseHTTPRequestHandler):
    """llama.cpp's `/completion`: as many tokens as wanted, counted up behind the prompt's last."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(request)
        last = request["prompt"][-1]
        refused = last < 0
        text = json.dumps({"tokens": [last + 1 + i for i in range(request["n_predict"])]} if not refused else {})
        self.send_response(400 if refused else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A module `xllamacpp` whose servers are `Completions`; the list has their parameters."""
    made: list[Any] = []
    running: list[ThreadingHTTPServer] = []

    def params() -> Any:
        spaces = {name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")}
        return SimpleNamespace(**spaces)

    def server(given: Any) -> Any:
        given.asked = []
        http = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Completions,), {"asked": given.asked}))
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        made.append(given)
        running.append(http)
        return SimpleNamespace(listening_address=f"http://127.0.0.1:{http.server_address[1]}")

    library = SimpleNamespace(
        CommonParams=params, Server=server, get_system_info=lambda: "AVX = 1 | AMX = 0 | FMA = 1"
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", library)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2")
    here = {"llama_cpp": None, "xllamacpp": object()}
    monkeypatch.setattr(importlib.util, "find_spec", here.__getitem__)
    yield made
    for http in running:
        http.shutdown()
        http.server_close()


def test_the_server_of_a_file_and_number_of_threads_is_asked_greedily(source: Path, servers: list[Any]) -> None:
    """Every setting has its own server, loaded at once; nothing is kept of a prompt; an answer ends with eos."""
    engine = rival_llama.engine(setup(source, eos=(9,)))
    assert engine.version == "llama.cpp of xllamacpp 1.2 (AVX FMA)"
    wanted = [
        (str(path), each["threads"])
        for way, path in rival_llama.files(setup(source)).items()
        for each in engine.settings[way]
    ]
    assert [(each.model.path, each.cpuparams.n_threads) for each in servers] == wanted
    assert [each.cpuparams_batch.n_threads for each in servers] == [count for _, count in wanted]
    setting = engine.settings["F16"][-1]
    assert engine.generate("F16", setting, [1, 2], 3) == [3, 4, 5]
    assert engine.generate("F16", setting, [1, 7], 5) == [8, 9]
    asked = next(
        each.asked
        for each, place in zip(servers, wanted, strict=True)
        if place == (str(rival_llama.files(setup(source))["F16"]), setting["threads"])
    )
    assert [request["prompt"] for request in asked] == [[1, 2], [1, 7]]
    assert {(request["cache_prompt"], request["temperature"]) for request in asked} == {(False, 0.0)}
    with pytest.raises(RuntimeError, match="400"):
        engine.generate("F16", setting, [-1], 3)


def test_without_either_package_the_reason_names_both(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told where llama.cpp is absent."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"llama_cpp.*xllamacpp"):
        rival_llama.engine(setup(source))
