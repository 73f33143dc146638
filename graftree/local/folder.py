"""`Folder`: a stack's temporary folder. A stack that is killed cannot remove its own; the next one does it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Self

PREFIX, _LOCK = "graftree-logs-", "lock"


class Folder:
    """A new folder, locked for as long as this process holds it, and removed at the end of the `with` block.

    The kernel gives the lock back however the process ends, so that a folder whose lock can be had belongs to nobody.

        with Folder() as path:
            ...

    Args:
        parent: where it is made; None = the folder for temporary files.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = Path(tempfile.gettempdir()) if parent is None else parent
        self._lock: IO[bytes] | None = None
        self.path = Path()

    def __enter__(self) -> Self:
        for left in self._parent.glob(f"{PREFIX}*"):
            if (lock := _locked(left / _LOCK, "rb")) is not None:
                shutil.rmtree(left, ignore_errors=True)
                lock.close()
        while self._lock is None or not self.path.exists():  # another stack may have cleared it between two calls
            self.path = Path(tempfile.mkdtemp(dir=self._parent, prefix=PREFIX))
            self._lock = _locked(self.path / _LOCK, "xb")
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def _locked(path: Path, mode: str) -> IO[bytes] | None:
    """A file with its lock; None = somebody else has it, it is another user's, or it is not there."""
    try:
        if mode == "rb" and path.parent.stat().st_uid != os.getuid():
            return None
        file = path.open(mode)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
