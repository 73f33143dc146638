"""The router's image holds no torch: nothing it imports may need it."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch_in_the_import_graph() -> None:
    """Importing the router loads neither torch nor transformers, nor another service."""
    heavy = {"torch", "transformers", "safetensors", "gguf", "verifier_service", "speculator_service", "kernels"}
    code = f"import sys, router.pod, router.__main__\nprint(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"
