"""What `graftree models pull` and `graftree models list` do."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TextIO

from graftree.models.cache import Cache
from graftree.models.pull import cached, pull


def pull_models(uris: Sequence[str], *, progress: bool = True, out: TextIO | None = None) -> int:
    """Bring models into the cache, check the SHA-256 of every file, print one directory a line.

    Args:
        uris: model URIs.
        progress: show progress bars on stderr.
        out: where the directories are printed, by default stdout.

    Returns:
        The exit status, 0.

    Raises:
        InvalidArgument, Unavailable: as `graftree.models.pull.pull`.
    """
    for uri in uris:
        print(pull(uri, progress=progress, verify=True), file=out or sys.stdout)
    return 0


def list_models(*, as_json: bool = False, out: TextIO | None = None) -> int:
    """Print the models of the cache: size in MiB, URI, directory; or a JSON array of objects (size in bytes).

    Returns:
        The exit status, 0.
    """
    out = out or sys.stdout
    models = cached()
    if as_json:
        json.dump([{"uri": m.uri, "size": m.size, "path": str(m.path)} for m in models], out, indent=1)
        print(file=out)
        return 0
    if not models:
        print(f"no models in {Cache().directory}; `graftree models pull` fetches the default one", file=out)
    for model in models:
        print(f"{model.size / (1 << 20):9.1f} MiB  {model.uri}  {model.path}", file=out)
    return 0
