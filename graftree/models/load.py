"""`load`: a URI becomes a model in memory and its `ModelSpec`."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from graftree.errors import Incompatible, InvalidArgument, Unavailable
from graftree.models import random_models
from graftree.models.cache import Cache, Manifest
from graftree.models.pull import pull
from graftree.models.spec import ModelSpec, eos_token_ids, max_context, model_fingerprint, relevant
from graftree.models.uri import ModelUri
from graftree.text.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# transformers builds models under process-wide settings (the meta device, the default dtype): a second thread that
# loads meanwhile would find its parameters without data.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode whose parameters take no gradient; its attention implementation is not chosen yet."""

    model: PreTrainedModel
    spec: ModelSpec


def load(uri: str | ModelUri, *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Load a model; it is pulled first where it must be.

    Args:
        uri: see `graftree.models.uri`.
        dtype: float32, bfloat16 or float16.
        device: cpu, cuda, cuda:N, or auto: cuda where there is one.

    Raises:
        InvalidArgument: the URI, dtype or device is none, or the directory holds no such model.
        Incompatible: the architecture is not one that transformers itself implements, or has no tokens of its own.
        Unavailable: it could not be downloaded or converted.
    """
    parsed = ModelUri.parse(uri)
    if dtype not in _DTYPES:
        raise InvalidArgument("dtype", dtype, f"one of {', '.join(_DTYPES)}")
    where = _device(device)
    tokenizer = Tokenizer.load(parsed)
    identity: dict[str, Any]
    if parsed.kind == "random":
        with _ONE_AT_A_TIME:
            model = random_models.build(parsed, _DTYPES[dtype])
        identity = {"random": str(parsed.source), "recipe": random_models.RECIPE}
    else:
        directory = pull(parsed, progress=False)
        with _ONE_AT_A_TIME:
            model = _from_directory(directory, _DTYPES[dtype], parsed)
        identity = _identity(directory)
    eos = set(tokenizer.eos_token_ids)
    if parsed.kind != "random":
        eos |= set(_generation_eos(model))
    if parsed.kept_layers is not None:
        keep_layers(model, parsed.kept_layers)
        identity["layers"] = parsed.kept_layers
    model.requires_grad_(False)
    config = model.config.to_dict()
    spec = ModelSpec(
        name=str(parsed),
        fingerprint=model_fingerprint(identity, dtype),
        vocab_fingerprint=tokenizer.vocab_fingerprint,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_context=max_context(config),
        eos_token_ids=tuple(sorted(eos)),
        token_count=tokenizer.token_count,
    )
    torch.nn.Module.to(model, where)
    return LoadedModel(model, spec)


def keep_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Drop every decoder layer but these, in place, and renumber the rest so that KV caches index right.

    Raises:
        InvalidArgument: a layer that the model does not have.
    """
    holder, name = _layer_list(model)
    stack = getattr(holder, name)
    for layer in layers:
        if layer >= len(stack):
            raise InvalidArgument("model", layer, f"layers below {len(stack)}")
    setattr(holder, name, torch.nn.ModuleList(stack[layer] for layer in layers))
    for index, layer in enumerate(getattr(holder, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    config = model.config
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(layers)
    if types is not None:
        config.layer_types = [types[layer] for layer in layers]


def _layer_list(model: PreTrainedModel) -> tuple[torch.nn.Module, str]:
    count = model.config.num_hidden_layers
    for module in model.modules():
        for name in ("layers", "h"):
            found = getattr(module, name, None)
            if isinstance(found, torch.nn.ModuleList) and len(found) == count:
                return module, name
    raise Incompatible(f"{type(model).__name__} has no list of decoder layers to choose from")


def _from_directory(directory: Path, dtype: torch.dtype, uri: ModelUri) -> PreTrainedModel:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, KeyError) as error:
        raise Incompatible(f"{uri}: transformers cannot load it as a causal language model: {error}") from error
    except OSError as error:
        raise Unavailable(f"{uri}: its files cannot be read: {error}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.eval()


def _identity(directory: Path) -> dict[str, Any]:
    """What determines a model's function, without its dtype."""
    manifest = Manifest.read(directory)
    if manifest is not None and manifest.source.startswith("gguf-sha256:"):
        return {"source": manifest.source}
    config = relevant(json.loads((directory / "config.json").read_text()))
    cache = Cache()
    return {"config": config, "weights": [cache.digest(path) for path in sorted(directory.glob("*.safetensors"))]}


def _generation_eos(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    return eos_token_ids(model.config.to_dict(), generation.to_dict() if generation is not None else {})


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InvalidArgument("device", device, "auto, cpu, cuda or cuda:N") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidArgument("device", device, "auto, cpu, cuda or cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidArgument("device", device, f"this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen
