"""`Cache`: the directory where converted models are kept, each with a manifest of SHA-256 digests.

    $GRAFTREE_CACHE or ~/.cache/graftree
        models/<slug>/manifest.json  model.safetensors  config.json  tokenizer.json ...
        models/<slug>.lock           held while the entry is made
        digests/<key>.json           digests of weights that lie elsewhere, valid while size and mtime stay

An entry appears by one rename, so it is whole or absent; many processes may ask for it at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from graftree.errors import Unavailable

MANIFEST = "manifest.json"

# Raised when what is built for the same model changes, so that entries made before are made again.
_FORMAT = 1


def cache_directory() -> Path:
    """$GRAFTREE_CACHE, or ~/.cache/graftree."""
    chosen = os.environ.get("GRAFTREE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "graftree"


def sha256_file(path: Path, progress: Callable[[int], object] | None = None) -> str:
    """SHA-256 (hex) of a file; `progress` is told the number of bytes read, piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
            if progress is not None:
                progress(len(piece))
    return digest.hexdigest()


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of one file of an entry."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an entry holds.

    Attributes:
        uri: canonical URI.
        source: identity of what it was made from, e.g. `gguf-sha256:...`: the base of the model's fingerprint, so
            that two machines that convert the same file agree.
        files: name -> size and digest.
    """

    uri: str
    source: str
    files: Mapping[str, FileEntry]

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The manifest of a directory; None where there is none that can be read."""
        try:
            raw = json.loads((directory / MANIFEST).read_text())
            files = {name: FileEntry(int(e["size"]), str(e["sha256"])) for name, e in raw["files"].items()}
            return cls(str(raw["uri"]), str(raw["source"]), files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def write(cls, directory: Path, uri: str, source: str) -> Manifest:
        """Digest every file of a directory and write the manifest next to them."""
        files = {
            path.name: FileEntry(path.stat().st_size, sha256_file(path))
            for path in sorted(directory.iterdir())
            if path.is_file() and path.name != MANIFEST
        }
        manifest = cls(uri, source, files)
        text = json.dumps({"uri": uri, "source": source, "files": {n: asdict(e) for n, e in files.items()}}, indent=1)
        (directory / MANIFEST).write_text(text + "\n")
        return manifest

    def sizes_match(self, directory: Path) -> bool:
        """Whether every file is there with its size: the cheap check of each load."""
        try:
            return all((directory / name).stat().st_size == entry.size for name, entry in self.files.items())
        except OSError:
            return False

    def corrupt_files(self, directory: Path, progress: Callable[[int], object] | None = None) -> list[str]:
        """Names of the files whose SHA-256 is not the manifest's: the full check."""
        return [
            name
            for name, entry in self.files.items()
            if not (directory / name).is_file() or sha256_file(directory / name, progress) != entry.sha256
        ]


class Cache:
    """Entries below one directory.

    Args:
        directory: where; by default `cache_directory()`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or cache_directory()

    def path(self, key: str) -> Path:
        """Where the entry of a key (a canonical URI, or one with the content's digest) lies, or would lie."""
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", key).strip("-.")[:80]
        return (
            self.directory / "models" / f"{readable}-{hashlib.sha256(f'{_FORMAT}:{key}'.encode()).hexdigest()[:10]}"
        )

    def get(self, key: str) -> Path | None:
        """The entry of a key, None unless it is whole (by sizes)."""
        path = self.path(key)
        manifest = Manifest.read(path)
        return path if manifest is not None and manifest.sizes_match(path) else None

    def entries(self) -> list[tuple[Path, Manifest]]:
        """Every whole entry, by name."""
        found = []
        for path in sorted((self.directory / "models").glob("*/")):
            manifest = Manifest.read(path)
            if manifest is not None and not path.name.startswith(".") and manifest.sizes_match(path):
                found.append((path, manifest))
        return found

    def make(self, key: str, uri: str, build: Callable[[Path], str], *, replace: bool = False) -> Path:
        """The entry of a key, built if it is absent.

        Args:
            key: what identifies the entry.
            uri: what the manifest says it is.
            build: fills the empty directory it is given and returns the entry's `source`.
            replace: build it even if it is there.

        Raises:
            Unavailable: the cache cannot be written.
        """
        path = self.path(key)
        try:
            with self._lock(path):
                if not replace and self.get(key) is not None:
                    return path
                for left_over in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
                    shutil.rmtree(left_over, ignore_errors=True)
                work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
                try:
                    Manifest.write(work, uri, build(work))
                    work.chmod(0o755)
                    for file in work.iterdir():
                        file.chmod(0o644)
                    if path.exists():
                        shutil.rmtree(path)
                    work.rename(path)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            raise Unavailable(f"the model cache {self.directory} cannot be used: {error}") from error
        return path

    def digest(self, path: Path) -> str:
        """SHA-256 (hex) of a file outside the cache, remembered while its size and mtime stay."""
        real = path.resolve()
        state = real.stat()
        note = self.directory / "digests" / f"{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json"
        known = {"size": state.st_size, "mtime_ns": state.st_mtime_ns}
        try:
            remembered = json.loads(note.read_text())
            if {key: remembered[key] for key in known} == known:
                return str(remembered["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        digest = sha256_file(real)
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            temporary = note.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({**known, "sha256": digest}))
            temporary.replace(note)
        except OSError:
            pass  # a read-only cache only costs the digest the next time
        return digest

    @contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(path.name + ".lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield
