"""Run while an image is built: `strip.py [--router]` makes this environment smaller, and compiles what is left.

A read-only image cannot compile later. With --router goes what a tier without a model never uses: what
pulls models, pip among it, and the SSMs that ship.
"""

from __future__ import annotations

import compileall
import shutil
import sys
import sysconfig
from pathlib import Path

# Tests, headers and stubs of other packages.
USELESS = (
    *("numpy/*/tests", "numpy/tests", "numpy/_core/include", "numpy/**/*.pyi", "numpy/**/*.a"),
    *("grpc/**/*.pyx", "grpc/**/*.pxi", "grpc/**/*.pxd"),
    *("torch/test", "torch/include", "torch/share", "torch/**/*.a"),
)
MODELS = (
    "graftree/models/shipped_ssm",
    *("pip", "pip-*", "hf_xet*", "pygments*"),
    *("setuptools", "setuptools-*", "pkg_resources", "_distutils_hack", "distutils-precedence.pth"),
)


def strip(site: Path, patterns: tuple[str, ...]) -> None:
    """Delete what matches in a `site-packages`, and compile it."""
    for pattern in patterns:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    compileall.compile_dir(site, quiet=2, workers=1)


if __name__ == "__main__":
    strip(Path(sysconfig.get_path("purelib")), USELESS + (MODELS if "--router" in sys.argv else ()))
