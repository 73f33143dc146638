"""Models with deterministic random weights: the workhorse of the tests.

Every tensor is uniform noise from a counter-based generator (Philox) keyed by SHA-256(seed, name), so the same URI
gives the same weights on every machine and with every version of torch and transformers, and two models that differ
in depth share the tensors they have in common. Gains are chosen so that attention is neither flat nor one-hot, greedy
output wanders, and the top-1 probability is usually 0.1-0.7 at `scale=1`.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from graftree.models.uri import ModelUri
from graftree.text.byte_level import id_order
from graftree.text.tokenizer import Tokenizer

# Raised when the same URI gives other weights than before: part of the fingerprint.
RECIPE = 1

_LOGIT_SPREAD = 3.0  # standard deviation of the logits at scale=1
_GAINS = (
    (re.compile(r"(q_proj|k_proj|c_attn)\.weight$"), 1.5),
    (re.compile(r"(o_proj|out_proj|down_proj|attn\.c_proj)\.weight$"), 2.0),
)


def config_of(uri: ModelUri) -> PreTrainedConfig:
    """The transformers configuration of a `random:` URI."""
    rows = uri.integer("vocab") + uri.integer("padded")
    tokenizer = Tokenizer.load(uri)
    common: dict[str, Any] = {
        "vocab_size": rows,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(tokenizer.eos_token_ids) or None,
        "pad_token_id": None,
        "tie_word_embeddings": bool(uri.integer("tied")),
    }
    family = uri.name
    if family == "gpt2":
        return GPT2Config(
            n_embd=uri.integer("hidden"),
            n_layer=uri.integer("layers"),
            n_head=uri.integer("heads"),
            n_inner=uri.integer("intermediate"),
            n_positions=uri.integer("context"),
            **common,
        )
    shape: dict[str, Any] = {
        "hidden_size": uri.integer("hidden"),
        "num_hidden_layers": uri.integer("layers"),
        "num_attention_heads": uri.integer("heads"),
        "max_position_embeddings": uri.integer("context"),
        **common,
    }
    if family == "opt":
        return OPTConfig(ffn_dim=uri.integer("intermediate"), dropout=0.0, **shape)
    shape |= {
        "intermediate_size": uri.integer("intermediate"),
        "num_key_value_heads": uri.integer("kv_heads"),
        "head_dim": uri.integer("head_dim"),
    }
    if family == "mistral":
        return MistralConfig(sliding_window=uri.integer("window"), **shape)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family](**shape)


def build(uri: ModelUri, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The whole model of a `random:` URI (a `keep` option is not applied), on the CPU, in eval mode."""
    config = config_of(uri)
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    seed, scale, tokens = uri.integer("seed"), uri.options["scale"], uri.integer("vocab")
    assert isinstance(scale, float)
    order = np.array(id_order(tokens, uri.integer("permute")))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = _tensor(seed, name, tuple(parameter.shape), parameter is head, scale)
            if parameter is embedding or parameter is head:
                values[tokens:] = 0.0  # what training leaves in padding: never likely
                values[order] = values[:tokens].copy()
            parameter.copy_(torch.from_numpy(values))
    return model.eval()


def save(uri: ModelUri, directory: Path) -> None:
    """Write model and tokenizer as `from_pretrained` reads them."""
    build(uri).save_pretrained(directory)
    Tokenizer.load(uri).save(directory)


def _tensor(seed: int, name: str, shape: tuple[int, ...], is_head: bool, scale: float) -> NDArray[np.float32]:
    """One parameter. Its values depend on (seed, name, shape) and, for the LM head, on the scale."""
    noise = _uniform(seed, name, shape)
    if len(shape) == 1:
        is_norm_weight = name.endswith("weight")
        return 1.0 + 0.1 * noise if is_norm_weight else 0.1 * noise
    if is_head:
        return noise * np.float32(_LOGIT_SPREAD * scale / math.sqrt(shape[1]))
    if re.search(r"(embed_tokens|embed_positions|wte|wpe)\.weight$", name):
        return noise
    # Only GPT-2 keeps its weights as (in, out).
    inputs = shape[0] if re.search(r"c_(attn|proj|fc)\.weight$", name) else shape[1]
    gain = next((gain for pattern, gain in _GAINS if pattern.search(name)), 1.0)
    return noise * np.float32(gain / math.sqrt(inputs))


def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Uniform noise of mean 0 and variance 1. Integers and one multiplication: exact on every machine."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    count = math.prod(shape)
    raw = np.random.Philox(key=key).random_raw((count + 1) // 2)
    halves = np.asarray(raw, dtype="<u8").view("<u4")[:count]
    unit = (halves >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return (unit * np.float32(math.sqrt(3.0))).reshape(shape)
