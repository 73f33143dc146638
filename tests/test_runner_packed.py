"""Linear layers packed for oneDNN."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from graftree.models.load import load
from graftree.models.packed import PackedLinear, can_pack, pack_linears, padded_rows
from graftree.models.steady import SIZES
from tests.runner_models import FAMILIES


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (3, 7, 24), (1, 65, 24)])
def test_equals_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    """For any number of rows, none included, a packed layer gives what nn.Linear gives."""
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)


class Products(TorchDispatchMode):
    """Notes how many rows oneDNN is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_linear_pointwise" in str(func):
            self.rows.append(args[0].numel() // args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def test_products_have_few_shapes() -> None:
    """oneDNN keeps code for every number of rows it is given: for 1 to 300 rows it is given 80 different ones, none
    more than a sixteenth larger, and each row gets what nn.Linear gives."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    packed, x = PackedLinear(plain.weight, plain.bias), torch.randn(300, 8)
    with torch.no_grad():
        expected = plain(x)
        with Products() as products:
            for rows in range(1, 301):
                torch.testing.assert_close(packed(x[:rows]), expected[:rows], rtol=1e-5, atol=1e-5)
    assert len(products.rows) == 300
    assert len(set(products.rows)) == 80
    assert all(given <= 17 / 16 * rows for rows, given in enumerate(products.rows, 1) if rows >= 4)


def test_which_numbers_of_rows_there_are() -> None:
    """None is less than what is there, and one that is filled up stays: among them all sizes of steady steps."""
    assert [padded_rows(rows) for rows in (0, 1, 4, 5, 32, 33, 63, 65, 129)] == [0, 4, 4, 5, 32, 34, 64, 68, 136]
    for rows in range(2000):
        assert rows <= padded_rows(rows) == padded_rows(padded_rows(rows))
    assert [padded_rows(size) for size in SIZES] == list(SIZES)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen2"])
def test_no_plain_layer_is_left(family: str) -> None:
    """Every linear layer is packed, GPT-2's transposed ones and the LM head too; the logits stay."""
    model = load(FAMILIES[family]).model
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        expected = model(input_ids=tokens).logits
        pack_linears(model)
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
    assert not [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]


@pytest.mark.parametrize("tied", [0, 1])
def test_weights_are_not_held_twice(tied: int) -> None:
    """A packed layer's plain weight is gone; one tied to the embedding stays, for the embedding."""
    model = load(f"random:llama?layers=1&tied={tied}").model
    inner = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    head = weakref.ref(model.lm_head.weight)
    pack_linears(model)
    assert inner() is None
    assert (head() is not None) == bool(tied)
    assert model.get_input_embeddings().weight.shape == (512, 64)


@pytest.mark.parametrize("shape", [(1, 24), (3, 7, 24), (1, 65, 24)])
def test_bfloat16_equals_the_plain_layer(shape: tuple[int, ...]) -> None:
    """Where oneDNN computes in bfloat16, a packed layer gives what the float32 product gives, rounded."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    torch.manual_seed(0)
    plain = nn.Linear(24, 40).to(torch.bfloat16)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(shape).to(torch.bfloat16)
    with torch.inference_mode():
        expected = nn.functional.linear(x.float(), plain.weight.float(), plain.bias.float())
        torch.testing.assert_close(packed(x).float(), expected, rtol=1e-2, atol=1e-2)


def test_what_is_packed() -> None:
    """float32 wherever there is oneDNN, bfloat16 where it computes in it, float16 never."""
    assert can_pack(load("random:llama?layers=1").model) == torch.backends.mkldnn.is_available()
    half = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert can_pack(load("random:llama?layers=1", dtype="bfloat16").model) == half
    assert not can_pack(load("random:llama?layers=1", dtype="float16").model)
