"""Run while an image is built, in its build stage.

requirements.py [EXTRA ...]   prints what pyproject.toml asks for, one requirement a line: pip installs these in a
                              layer of their own, which a change of the source leaves alone
requirements.py --strip       removes from this environment what no service runs, and compiles the rest
requirements.py --strip-all   and what only pulling a model needs, pip among it
"""

from __future__ import annotations

import compileall
import shutil
import sys
import sysconfig
import tomllib
from pathlib import Path

# Tests, headers and stubs of other packages.
USELESS_FOLDERS = (
    "numpy/*/tests",
    "numpy/tests",
    "numpy/_core/include",
    "torch/test",
    "torch/include",
    "torch/share",
)
PULLING = ("pip", "pip-*", "setuptools", "setuptools-*", "pkg_resources", "_distutils_hack", "hf_xet*", "pygments*")
USELESS_FILES = ("numpy/**/*.pyi", "numpy/**/*.a", "grpc/**/*.pyx", "grpc/**/*.pxi", "grpc/**/*.pxd", "torch/**/*.a")


def requirements(extras: list[str]) -> list[str]:
    """Direct requirements of the package, and of some of its extras."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(item for extra in extras for item in project["optional-dependencies"][extra])]


def strip(site: Path, folders: tuple[str, ...]) -> None:
    """Delete what is useless in a `site-packages`, and compile it: a read-only image cannot do so later."""
    for pattern in folders:
        for folder in site.glob(pattern):
            shutil.rmtree(folder)
    for pattern in USELESS_FILES:
        for file in site.glob(pattern):
            file.unlink()
    compileall.compile_dir(site, quiet=2, workers=1)


if __name__ == "__main__":
    if sys.argv[1:] in (["--strip"], ["--strip-all"]):
        strip(
            Path(sysconfig.get_path("purelib")), USELESS_FOLDERS + (PULLING if sys.argv[1] == "--strip-all" else ())
        )
    else:
        print("\n".join(requirements(sys.argv[1:])))
