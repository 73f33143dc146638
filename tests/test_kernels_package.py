"""The top-level package `kernels` is ours."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from transformers.utils import is_kernels_available

import kernels


def test_hub_package_is_absent_and_not_mistaken_for_ours() -> None:
    """The hub's package of that name is no dependency, and transformers does not take ours for it."""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")
    assert not is_kernels_available()
    assert kernels.tree_attention.__module__ == "kernels"


def test_layouts_need_no_torch() -> None:
    """A tier without a model can import the layout: torch comes in with the first call."""
    code = "import sys, kernels; kernels.TreeLayout.of([(0, [1])]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
