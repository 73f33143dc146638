"""Run while an image is built: `requirements.py [EXTRA ...]` prints what pyproject.toml asks for, one a line.

pip installs these in a layer of their own, which a change of the source leaves alone.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = (item for extra in sys.argv[1:] for item in project["optional-dependencies"][extra])
    print("\n".join([*project["dependencies"], *extras]))
