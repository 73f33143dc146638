"""What `TreeRunner` refuses, with the reason, and what it accepts after comparing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from graftree.errors import Incompatible, InvalidArgument
from graftree.models.load import LoadedModel
from graftree.models.runner import Rows, TreeRunner, chain_rows
from graftree.models.spec import ModelSpec
from tests.runner_models import FAMILIES, runner

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def loaded(model: PreTrainedModel) -> LoadedModel:
    spec = ModelSpec("test", "f", "v", model.config.get_text_config().vocab_size, 64, ())
    return LoadedModel(model.eval().requires_grad_(False), spec)


def build(family: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**options)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return auto.from_config(config)


REFUSED = {
    "attention sinks": (
        "GptOss",
        {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "attention sinks",
    ),
    "encoder": (
        "T5",
        {"vocab_size": 60, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "pad_token_id": 0},
        "encoder",
    ),
    "cross attention": (
        "GPT2",
        {"vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 2, "add_cross_attention": True}
        | {"bos_token_id": None, "eos_token_id": None},
        "encoder",
    ),
    "ALiBi": (
        "Bloom",
        {"vocab_size": 60, "hidden_size": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None},
        "ALiBi|AttentionInterface|position_ids",
    ),
    "linear attention": (
        "Qwen3Next",
        {
            **SHAPE,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "linear_attention",
    ),
    "state space": (
        "Mamba",
        {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
        | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        "linear_attention|AttentionInterface",
    ),
    "RoPE that depends on the batch": (
        "Llama",
        {**SHAPE, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "dynamic RoPE",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case: str) -> None:
    """A model that could not be exact is refused at construction, and the message says what stands against it."""
    family, options, reason = REFUSED[case]
    with pytest.raises(Incompatible, match=reason):
        TreeRunner(loaded(build(family, **options)), kv_tokens=64)


def test_layers_numbered_wrongly() -> None:
    """Layers cut out of a model without renumbering would write into other layers' caches: refused."""
    model = build("Llama", **SHAPE)
    model.model.layers[1].self_attn.layer_idx = 5
    with pytest.raises(Incompatible, match="numbered"):
        TreeRunner(loaded(model), kv_tokens=64)


def test_self_check_finds_positions_of_its_own() -> None:
    """A family nobody tested that does not go by the positions it is given is found out by comparing."""

    class Stubborn(transformers.GemmaForCausalLM):
        def forward(self, *args: Any, position_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
            return super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)

    torch.manual_seed(0)
    model = Stubborn(
        transformers.GemmaConfig(**{**SHAPE, "initializer_range": 0.5}, head_dim=8, num_key_value_heads=2)
    )
    with pytest.raises(Incompatible, match="computes otherwise"):
        TreeRunner(loaded(model), kv_tokens=64)


@pytest.mark.parametrize("family", ["Gemma", "Gemma2", "Phi", "GPTNeoX", "Cohere", "Granite"])
def test_families_that_pass_the_self_check(family: str) -> None:
    """Other families are accepted after comparing; scaled and soft-capped logits are the model's own."""
    options = {**SHAPE, "initializer_range": 0.3}
    if family == "Gemma2":
        options |= {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 8}
    if family == "Gemma":
        options |= {"head_dim": 8, "num_key_value_heads": 4}
    tokens = list(range(3, 23))
    with torch.inference_mode():
        expected = build(family, **options).eval()(input_ids=torch.tensor([tokens])).logits[0]
    run = TreeRunner(loaded(build(family, **options)), kv_tokens=64)
    (got,) = run.forward([chain_rows(run.pool.allocate(2), 0, tokens, logits=range(20))])
    assert float((got - expected).abs().max()) < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"kv_tokens": 8}, "kv_tokens"), ({"block_size": 0}, "block_size"), ({"implementation": "x"}, "implementation")],
)
def test_construction_limits(options: dict[str, Any], field: str) -> None:
    """Settings out of range are refused by name."""
    with pytest.raises(InvalidArgument) as caught:
        TreeRunner(loaded(build("Llama", **SHAPE)), **{"kv_tokens": 64, **options})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"positions": [0]}, "rows.positions"),
        ({"masks": [1, 3, 7]}, "rows.masks"),
        ({"context_len": 15}, "rows.token_ids"),
        ({"positions": [511, 512]}, "rows.positions"),
        ({"logits": [2]}, "rows.logits"),
        ({"logits": [-1]}, "rows.logits"),
    ],
)
def test_rows_that_do_not_fit(change: dict[str, Any], field: str) -> None:
    """Rows outside the sequence's blocks, the context or themselves never reach a tensor."""
    run = runner(FAMILIES["llama"])
    good: dict[str, Any] = {
        "blocks": [0],
        "context_len": 0,
        "tree_len": 0,
        "token_ids": [1, 2],
        "positions": [0, 1],
        "masks": [1, 3],
        "logits": [1],
    }
    with pytest.raises(InvalidArgument) as caught:
        run.forward([Rows(**{**good, **change})])
    assert caught.value.field == field
