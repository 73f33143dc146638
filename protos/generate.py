"""Regenerate graftree/v1 from protos/: `python protos/generate.py [output folder]`."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent


def generate(output: Path) -> None:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py under `output`/graftree/v1."""
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("graftree/v1/*.proto"))
    include = resources.files("grpc_tools") / "_proto"
    arguments = [f"-I{PROTOS}", f"-I{include}"]
    arguments += [f"--{kind}={output}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    if protoc.main(["protoc", *arguments, *files]) != 0:
        raise SystemExit("protoc failed")
    package = output / "graftree" / "v1"
    (package / "__init__.py").write_text('"""Generated from protos/graftree/v1 by protos/generate.py."""\n')
    for path in package.glob("*_pb2_grpc.py"):  # services only: the message files have none
        if "_SERVICE" not in path.read_text() and "Service" not in path.read_text():
            path.unlink()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
