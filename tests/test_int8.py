"""Weight-only int8: the layer is its formula, the model is the one with those weights, nothing else is mixed up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from graftree import Client, LocalStack
from graftree import config as configuration
from graftree.config import VerifierConfig
from graftree.errors import ConfigError, InvalidArgument
from graftree.models.int8 import Int8Linear
from graftree.models.load import llm_identity, load
from graftree.models.runner import TreeRunner, chain_rows
from tests.drafters import spec

LLAMA = "random:llama?layers=2&hidden=64&heads=4&kv_heads=2&vocab=512&context=256&intermediate=96&seed=0&scale=3"
GPT2 = "random:gpt2?layers=2&hidden=64&heads=4&vocab=512&context=256&seed=1&scale=3"


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33, 100])
@pytest.mark.parametrize(("outer", "inner"), [(96, 64), (37, 576), (40, 24), (7, 1)])
def test_a_layer_is_its_formula(outer: int, inner: int, rows: int) -> None:
    """x @ (q s)^T + b in float64, to within bfloat16's rounding of the sum and the result, for inner dimensions that
    fill registers and others, one row and many."""
    draw = torch.Generator().manual_seed(outer + rows)
    weight = torch.randn((outer, inner), generator=draw).to(torch.bfloat16)
    bias = torch.randn(outer, generator=draw).to(torch.bfloat16)
    x = torch.randn((rows, inner), generator=draw).to(torch.bfloat16)
    layer = Int8Linear(weight, bias)
    terms = layer.q.double() * layer.s.double()[:, None]
    product = x.double() @ terms.T
    error = (layer(x).double() - product - bias.double()).abs()
    # Product, factor and bias are rounded one after the other, to 8 bits; sums within the product to 24.
    allowed = 3 * 2**-8 * (product.abs() + bias.double().abs()) + 2**-18 * (x.double().abs() @ terms.abs().T)
    assert bool((error <= allowed).all())
    assert layer(x[None]).shape == (1, rows, outer)


def test_weights_are_rounded_to_the_nearest_level() -> None:
    """q is whole, within 127, largest where the weight is, at most half a level off; a row of zeros stays one."""
    weight = torch.randn((50, 64), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight[3] = 0
    layer = Int8Linear(weight, None)
    assert layer.q.dtype == torch.int8
    reached = layer.q.abs().amax(1)
    assert set(reached.tolist()) == {0, 127}
    assert int(reached[3]) == 0
    off = (weight.double() - layer.q.double() * layer.s.double()[:, None]).abs()
    assert bool((off <= layer.s.double()[:, None] * 0.75).all()), "half a level, and the factor's own rounding"


@torch.inference_mode()
def rounded(uri: str) -> Any:
    """transformers' own model, in float32, whose linear layers hold what int8 leaves of their weights."""
    model = load(uri, dtype="bfloat16").model
    for module in list(model.modules()):
        for child in list(module.children()):
            if type(child) in (nn.Linear, Conv1D):
                across = type(child) is Conv1D
                layer = Int8Linear(child.weight.t() if across else child.weight, None)
                terms = layer.q.float() * layer.s.float()[:, None]
                child.weight = nn.Parameter((terms.t() if across else terms).contiguous(), requires_grad=False)
    return model.float()


@pytest.mark.parametrize("uri", [LLAMA, GPT2])
def test_the_model_is_the_one_with_rounded_weights(uri: str) -> None:
    """Logits of a text and of a tree behind it are those of an ordinary model with the rounded weights, as near as
    bfloat16 is to float32, and much nearer than to the model with all of its weights."""
    runner = TreeRunner(load(uri, dtype="bfloat16", weights="int8"), kv_tokens=256)
    text = [(37 * index) % 512 for index in range(40)]
    blocks = runner.pool.allocate(4)
    got = runner.forward([chain_rows(blocks, 0, text, logits=range(40))])[0]
    few = torch.cat(
        [runner.forward([chain_rows(blocks, at, text[at : at + 8], logits=range(8))])[0] for at in range(0, 40, 8)]
    )
    model = rounded(uri)
    with torch.inference_mode():
        expected = model(torch.tensor([text])).logits[0]
        full = load(uri).model(torch.tensor([text])).logits[0]
    scale = float(expected.abs().max())
    for logits in (got, few):
        assert float((logits - expected).abs().max()) < 0.05 * scale
        assert float((logits - expected).abs().mean()) < float((full - expected).abs().mean())
    linears = [layer for layer in runner._model.modules() if isinstance(layer, Int8Linear)]
    assert linears
    assert not any(isinstance(layer, nn.Linear | Conv1D) for layer in runner._model.modules())


def test_the_fingerprint_is_another() -> None:
    """KV rows and verifiers of the rounded model are never taken for the other's; an SSM may draft for both."""
    names = {load(LLAMA, dtype="bfloat16", weights=weights).spec.fingerprint for weights in ("full", "int8")}
    assert len(names) == 2
    assert load(LLAMA, dtype="bfloat16").spec.fingerprint in names
    assert llm_identity(LLAMA) == llm_identity(LLAMA)


def test_what_cannot_be() -> None:
    """Other words and float32 on a CPU are refused before anything is loaded, by their key."""
    with pytest.raises(ConfigError, match="weights"):
        configuration.build(VerifierConfig, {"weights": "int4"})
    with pytest.raises(InvalidArgument, match="bfloat16") as caught:
        load(LLAMA, weights="int8")
    assert caught.value.field == "dtype"
    with pytest.raises(InvalidArgument, match="one of full, int8"):
        load(LLAMA, weights="int4")


def test_through_the_stack() -> None:
    """A verifier with int8 weights, deterministic: the same tokens and log probabilities with and without drafts."""
    with (
        LocalStack(
            LLAMA,
            ["ngram", spec("Wrong", model=LLAMA)],
            in_process=True,
            threads=1,
            router_options={"adaptive": False, "draft_wait_ms": 1000},
            verifier_options={"weights": "int8", "dtype": "bfloat16", "deterministic": True, "step_time_seconds": 0},
        ) as stack,
        Client(stack.target) as client,
    ):
        request: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3, "log_probs": True}
        plain = client.generate("the quick brown fox", speculation=False, ignore_eos=True, **request)
        drafted = client.generate("the quick brown fox", ignore_eos=True, **request)
    assert drafted.speculation.num_draft_tokens > 0
    assert (drafted.token_ids, drafted.log_probs) == (plain.token_ids, plain.log_probs)
