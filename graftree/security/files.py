"""`WatchedFiles`: what is made of some files, and made again when they change."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import structlog

from graftree.errors import GraftreeError

T = TypeVar("T")

Stamp = tuple[tuple[int, int, int], ...]

log = structlog.get_logger(__name__)


class WatchedFiles(Generic[T]):
    """Used from any thread. What cannot be read anew is said once, and the last good value stays.

    Replacing several files is not one step: between the two, a key does not fit its certificate. That is only another
    value that cannot be read, and the next look finds both.

    Args:
        paths: the files.
        read: makes the value of them.

    Raises:
        GraftreeError: whatever `read` raises the first time.

    Attributes:
        value: the last good one.
        failures: looks that found files that changed and could not be read.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        self._paths, self._read = tuple(paths), read
        self._stamp = self._look()
        self._complaint = ""
        self.failures = 0
        self.value = read()

    def refresh(self) -> bool:
        """Look at the files.

        Returns:
            Whether the value is another now.
        """
        stamp = self._look()
        if stamp == self._stamp:
            return False
        try:
            self.value = self._read()
        except GraftreeError as error:
            self.failures += 1
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("what was read before stays in force", reason=self._complaint)
            return False
        self._stamp, self._complaint = stamp, ""
        log.info("files read anew", files=self._paths)
        return True

    def _look(self) -> Stamp:
        found = []
        for path in self._paths:
            try:
                status = os.stat(path)
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)
