"""A model of random weights made on the device, steps over it, and what the machine is."""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.gpu_cases import Piece
from graftree.models.rows import Rows
from graftree.models.runner import TreeRunner
from graftree.models.spec import ModelSpec

# Llama 3's 8B, and one that a CPU steps at once.
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
}
CONTEXT_LIMIT = 1 << 15
_LOGIT_SPREAD = 3.0


@dataclass(frozen=True)
class Loaded:
    """As `graftree.models.load.LoadedModel`, without a tokenizer."""

    model: Any
    spec: ModelSpec


def random_model(shape: dict[str, int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Loaded:
    """Weights that keep the size of states from layer to layer, and logits of a spread of 3."""
    config = LlamaConfig(**shape, max_position_embeddings=CONTEXT_LIMIT, tie_word_embeddings=False)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    head = model.get_output_embeddings().weight
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
            continue
        gain = _LOGIT_SPREAD if parameter is head else 1.0
        limit = gain * math.sqrt(3.0 / parameter.shape[-1])
        parameter.data.uniform_(-limit, limit, generator=generator)
    model.requires_grad_(False)
    spec = ModelSpec("random", "", "", shape["vocab_size"], CONTEXT_LIMIT, ())
    return Loaded(model.eval(), spec)


def weight_bytes(loaded: Loaded) -> int:
    """That a step reads: all but the embedding, of which it reads some rows."""
    embedding = loaded.model.get_input_embeddings().weight
    return sum(p.numel() * p.element_size() for p in loaded.model.parameters() if p is not embedding)


def step(runner: TreeRunner, batch: int, context: int, nodes: int, seed: int = 0) -> list[Rows]:
    """A root and a random tree of `nodes` nodes behind `context` rows, in each of `batch` sequences.

    The blocks lie in random order and are not given back: `release` does that.
    """
    random = np.random.default_rng(seed)
    piece, size = Piece(context, 1 + nodes), runner.kv.block_size
    need = -(-(context + 1 + nodes) // size)
    blocks = random.permutation(runner.pool.allocate(batch * need)).tolist()
    batches = []
    for index in range(batch):
        masks = piece.masks(random)
        batches.append(
            Rows(
                blocks=blocks[index * need : (index + 1) * need],
                context_len=context,
                tree_len=0,
                token_ids=random.integers(0, runner.spec.vocab_size, len(masks)).tolist(),
                positions=[context + mask.bit_count() - 1 for mask in masks],
                masks=masks,
                logits=range(len(masks)),
            )
        )
    return batches


def release(runner: TreeRunner, batch: Sequence[Rows]) -> None:
    """Give a step's blocks back."""
    runner.pool.free([block for rows in batch for block in rows.blocks])


def as_it_is(runner: TreeRunner, batch: Sequence[Rows]) -> list[torch.Tensor]:
    """A step that is not replayed."""
    graphs, runner.graphs = runner.graphs, None
    try:
        return runner.forward(batch)
    finally:
        runner.graphs = graphs


def machine(device: torch.device) -> dict[str, Any]:
    """The card, its driver, and the versions that matter."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["device"] = platform.machine() if device.type == "cpu" else torch.cuda.get_device_name(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found["capability"] = f"{capability[0]}.{capability[1]}"
        found["memory_bytes"] = torch.cuda.mem_get_info(device)[1]
        found["cuda"] = torch.version.cuda
        found["driver"] = _driver()
    return found


def _driver() -> str:
    """As nvidia-smi says; "" where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.split("\n")[0].strip()
