"""What importing costs and what it must not bring in; each import runs in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers")


def modules_after(code: str) -> set[str]:
    """Top-level names of the modules that are loaded after `code` has run in a new interpreter."""
    program = f"{code}\nimport sys\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_graftree_is_cheap() -> None:
    """`import graftree` brings in none of its dependencies."""
    loaded = modules_after("import graftree")
    assert loaded.isdisjoint({*HEAVY, "grpc", "google", "numpy", "pydantic", "redis", "tokenizers", "asyncio"})


@pytest.mark.parametrize(
    "code",
    [
        "from graftree import Client, AsyncClient",
        "from graftree import LocalStack",
        "import graftree.cli",
        "import router.pod",
        "import router.__main__",
        "import speculator_service.pod",
        "import speculator_service.drafters",
    ],
)
def test_light_parts_stay_without_torch(code: str) -> None:
    """Client, command line, router, and a speculator before it has a model run where torch is not installed."""
    assert modules_after(code).isdisjoint(HEAVY)


def test_all_names_are_there() -> None:
    """Each name that `graftree` promises can be imported and is listed; a name it does not promise is an error."""
    import graftree

    for name in graftree.__all__:
        assert getattr(graftree, name) is not None
    assert set(graftree.__all__) <= set(dir(graftree))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        graftree.Nothing  # noqa: B018
    with pytest.raises(ImportError):
        from graftree import Nothing  # noqa: F401


def test_transformers_tolerates_our_kernels_package() -> None:
    """Our top-level package `kernels` is not taken for the hub's package of that name."""
    program = (
        "import kernels, transformers\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
        "assert hasattr(kernels, 'tree_attention')\n"
        "from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaConfig\n"
        "config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, "
        "num_key_value_heads=1, vocab_size=16)\n"
        "import torch\n"
        "assert LlamaForCausalLM(config)(torch.tensor([[1, 2]])).logits.shape == (1, 2, 16)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
