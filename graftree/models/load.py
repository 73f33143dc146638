"""`load`: a URI becomes a model in memory and its `ModelSpec`."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from graftree.errors import Incompatible, InvalidArgument, Unavailable
from graftree.models import int8, random_models, ssm
from graftree.models.cache import Cache, Manifest
from graftree.models.pull import pull
from graftree.models.shipped import is_package
from graftree.models.spec import ModelSpec, eos_token_ids, max_context, model_fingerprint, relevant
from graftree.models.uri import ModelUri
from graftree.text.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# transformers builds models under process-wide settings (the meta device, the default dtype): a second thread that
# loads meanwhile would find its parameters without data.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode whose parameters take no gradient; its attention implementation is not chosen yet.

    Attributes:
        draft_ids: (H,) int64 for an SSM package: the token of each entry of a logits row; None = they are the tokens.
        tokenizer_uri: whose tokens these are; of an SSM package its LLM.
        made_for: `llm_identity` of an SSM package's LLM; "" of a model that is no package.
        weights: of `graftree.models.int8.WEIGHTS`; a runner rounds those that are to be.
    """

    model: PreTrainedModel
    spec: ModelSpec
    draft_ids: torch.Tensor | None = None
    tokenizer_uri: str = ""
    made_for: str = ""
    weights: str = "full"


def load(uri: str | ModelUri, *, dtype: str = "float32", device: str = "cpu", weights: str = "full") -> LoadedModel:
    """Load a model; it is pulled first where it must be.

    Args:
        uri: see `graftree.models.uri`; a directory may be an SSM package (`graftree.models.ssm`).
        dtype: float32, bfloat16, float16, or auto: bfloat16 for an SSM package where it is computed natively, else
            float32. What an SSM guesses need not be exact.
        device: cpu, cuda, cuda:N, or auto: cuda where there is one.
        weights: full, or int8: the runner rounds the linear layers' (`graftree.models.int8`). The fingerprint is
            another then. An SSM package is never rounded.

    Raises:
        InvalidArgument: the URI, dtype, device or weights is none, or the directory holds no such model.
        Incompatible: the architecture is not one that transformers itself implements, or has no tokens of its own;
            or an SSM package is for another LLM than the one it is given.
        Unavailable: it could not be downloaded or converted.
    """
    parsed = ModelUri.parse(uri)
    if dtype not in (*_DTYPES, "auto"):
        raise InvalidArgument("dtype", dtype, f"one of {', '.join(_DTYPES)}, auto")
    where = device_of(device)
    int8.check(weights, dtype, where)
    if parsed.kind == "directory" and is_package(Path(parsed.name)):
        half = computes_bfloat16(where)
        return _load_ssm(parsed, ("bfloat16" if half else "float32") if dtype == "auto" else dtype, where)
    dtype = "float32" if dtype == "auto" else dtype
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
    if weights != "full":
        identity["weights"] = weights
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
    return LoadedModel(model, spec, tokenizer_uri=str(parsed), weights=weights)


def llm_identity(uri: str | ModelUri) -> str:
    """SHA-256 (hex) over what determines a model's function, whatever its dtype: what an SSM package is made for."""
    parsed = ModelUri.parse(uri)
    if parsed.kind == "random":
        return hashlib.sha256(f"{random_models.RECIPE} {parsed}".encode()).hexdigest()
    identity = {**_identity(pull(parsed, progress=False)), "layers": parsed.kept_layers}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=list).encode()).hexdigest()


def _load_ssm(uri: ModelUri, dtype: str, where: torch.device) -> LoadedModel:
    directory = Path(uri.name)
    card = ssm.SsmCard.read(directory)
    llm = ModelUri.parse(str(uri.options.get("llm", card.llm)))
    weights = ssm.check_weights(card, directory)
    if (found := _identity_of(llm, uri)) != card.llm_identity:
        raise Incompatible(f"{uri} was made for the LLM {card.llm} ({card.llm_identity[:12]}), {llm} is {found[:12]}")
    tokenizer = Tokenizer.load(llm)
    with _ONE_AT_A_TIME:
        model = few_layers(llm, card.layers, _DTYPES[dtype])
    draft_ids = ssm.fill(model, card, directory)
    model.requires_grad_(False)
    spec = ModelSpec(
        name=str(uri),
        fingerprint=model_fingerprint({"ssm": ssm.digest(card, weights)}, dtype),
        vocab_fingerprint=tokenizer.vocab_fingerprint,
        vocab_size=ssm.embedding_rows(model),
        max_context=max_context(model.config.to_dict()),
        eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)),
        token_count=tokenizer.token_count,
    )
    torch.nn.Module.to(model, where)
    return LoadedModel(model, spec, draft_ids.to(where), str(llm), card.llm_identity)


def _identity_of(llm: ModelUri, package: ModelUri) -> str:
    """`llm_identity` of a package's LLM, with an error that says how to name another place."""
    try:
        return llm_identity(llm)
    except (InvalidArgument, Unavailable, OSError) as error:
        cls = Unavailable if isinstance(error, Unavailable) else Incompatible
        raise cls(f"{package}: its LLM {llm} is not there ({error}); say where: {package.name}?llm=URI") from error


def configuration(uri: str | ModelUri) -> PretrainedConfig:
    """An LLM's configuration, with all its layers; no weights are read.

    Raises:
        InvalidArgument, Incompatible, Unavailable: as `load`.
    """
    parsed = ModelUri.parse(uri)
    if parsed.kind == "random":
        return random_models.config_of(parsed)
    directory = pull(parsed, progress=False)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, KeyError, OSError) as error:
        raise Incompatible(f"{parsed}: transformers cannot read its configuration: {error}") from error
    return config


def few_layers(llm: ModelUri, layers: tuple[int, ...], dtype: torch.dtype) -> PreTrainedModel:
    """A model with as many layers as `layers` names, each of the kind of that layer of the LLM.

    The embedding and whatever else is no layer is the LLM's; the layers themselves are its first ones, and only
    those are read from the LLM's files.

    Raises:
        InvalidArgument: a layer that the LLM does not have.
    """
    if llm.kind == "random":
        model = random_models.build(llm, dtype)
        keep_layers(model, layers)
        return model
    directory, config = pull(llm, progress=False), configuration(llm)
    if max(layers) >= config.num_hidden_layers:
        raise InvalidArgument("layers", max(layers), f"below the LLM's {config.num_hidden_layers}")
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(layers)
    if types is not None:
        config.layer_types = [types[layer] for layer in layers]
    return _from_directory(directory, dtype, llm, config)


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


def _from_directory(
    directory: Path, dtype: torch.dtype, uri: ModelUri, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    verbosity = logging.get_verbosity()
    if config is not None:  # tensors of the layers that are left out are no news
        logging.set_verbosity_error()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except (ValueError, KeyError) as error:
        raise Incompatible(f"{uri}: transformers cannot load it as a causal language model: {error}") from error
    except OSError as error:
        raise Unavailable(f"{uri}: its files cannot be read: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
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


def computes_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is computed natively there, so that it saves time."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def device_of(device: str) -> torch.device:
    """Where auto, cpu, cuda or cuda:N is; auto is CUDA where there is one. Raises InvalidArgument: nowhere."""
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
