"""`GenerationPlan`: a GenerateRequest that has been checked, tokenized and given its defaults."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from graftree import grammar
from graftree.acceptance import Rule
from graftree.config import RouterConfig
from graftree.errors import InvalidArgument
from graftree.sampling import GREEDY, SamplingParams
from graftree.tree import MAX_TREE_DEPTH, MAX_TREE_NODES
from graftree.v1 import generation_pb2 as pb
from graftree.v1.common_pb2 import StructuredOutputParams
from router.stops import StopRules

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_ALTERNATIVES = 20
MAX_CONTEXT = 1 << 30  # where a verifier names no limit

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class RequestTokenizer(Protocol):
    """What a request needs of `graftree.text.tokenizer.Tokenizer`."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class ModelLimits:
    """Of the model that is served, as the verifiers say.

    Attributes:
        vocab_size: rows of the embedding.
        max_context: longest sequence in tokens; 0 = any.
    """

    vocab_size: int
    max_context: int


@dataclass(frozen=True)
class GenerationPlan:
    """What to generate. Immutable; everything a session needs to start, or to start again elsewhere.

    Attributes:
        digest: of the request without its id: two requests are the same iff their digests are.
        parameters: the request without id and input, serialised; a seed it did not set is not in there.
        sampling: with the seed in force.
        max_length: sequence length that is never exceeded, prompt included.
        max_nodes: most tree nodes per verify step; 0 = plain decoding.
        rule: how drafts are accepted.
        structured_output: what the output must look like; None = anything.
    """

    request_id: str
    digest: bytes
    parameters: bytes
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: StopRules
    max_length: int
    log_probs: bool
    alternatives: int
    echo_prompt_token_ids: bool
    max_nodes: int
    max_depth: int
    rule: Rule = Rule.TARGET_ONLY
    structured_output: StructuredOutputParams | None = None

    @property
    def seed(self) -> int:
        assert self.sampling.seed is not None, "check() draws one"
        return self.sampling.seed

    @property
    def tests_draws(self) -> bool:
        """Whether the verifier tests the speculators' draws: tokens then depend on which of them came in time."""
        return self.rule.at(self.sampling).tests_draws


def request_id(request: pb.GenerateRequest, source: Random) -> str:
    """The request's id in lower case, or a new one.

    Raises:
        InvalidArgument: it is no UUID.
    """
    if not request.request_id:
        return str(uuid.UUID(int=source.getrandbits(128), version=4))
    if not _UUID.fullmatch(request.request_id):
        raise InvalidArgument("request_id", request.request_id[:64], "a UUID, or empty")
    return request.request_id.lower()


def digest(request: pb.GenerateRequest) -> bytes:
    """SHA-256 over the request without its id."""
    anonymous = pb.GenerateRequest()
    anonymous.CopyFrom(request)
    anonymous.ClearField("request_id")
    return hashlib.sha256(anonymous.SerializeToString(deterministic=True)).digest()


def check(request: pb.GenerateRequest, config: RouterConfig) -> None:
    """Everything that can be told without tokenizer and model.

    Raises:
        InvalidArgument: names the first field that is out of range, its value and the limit.
    """
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input", "", "exactly one of prompt, token_ids and chat")
    if kind == "chat" and not request.chat.messages:
        raise InvalidArgument("chat.messages", 0, "at least one message")
    size = (
        len(request.prompt.encode())
        if kind == "prompt"
        else sum(len(message.role) + len(message.content.encode()) for message in request.chat.messages)
    )
    if size > config.max_prompt_bytes:
        raise InvalidArgument(kind, size, f"at most {config.max_prompt_bytes} bytes of text")
    if request.HasField("sampling"):
        SamplingParams.from_proto(request.sampling).validate()
    if request.HasField("structured_output"):
        grammar.check(request.structured_output)
    _check_stopping(request.stopping)
    _check_output(request.output)
    _check_speculation(request.speculation)


def _check_stopping(stopping: pb.StoppingParams) -> None:
    if stopping.HasField("max_new_tokens") and stopping.max_new_tokens < 1:
        raise InvalidArgument("stopping.max_new_tokens", stopping.max_new_tokens, "at least 1")
    if stopping.HasField("max_new_tokens") and stopping.min_new_tokens > stopping.max_new_tokens:
        limit = f"at most max_new_tokens, {stopping.max_new_tokens}"
        raise InvalidArgument("stopping.min_new_tokens", stopping.min_new_tokens, limit)
    if len(stopping.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument("stopping.stop", len(stopping.stop), f"at most {MAX_STOP_STRINGS} strings")
    for index, stop in enumerate(stopping.stop):
        if not 1 <= len(stop.encode()) <= MAX_STOP_STRING_BYTES:
            limit = f"1 to {MAX_STOP_STRING_BYTES} bytes"
            raise InvalidArgument(f"stopping.stop[{index}]", len(stop.encode()), limit)
    if len(stopping.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgument(
            "stopping.stop_token_ids", len(stopping.stop_token_ids), f"at most {MAX_STOP_TOKENS} tokens"
        )


def _check_output(output: pb.OutputParams) -> None:
    if output.alternatives > MAX_ALTERNATIVES:
        raise InvalidArgument("output.alternatives", output.alternatives, f"at most {MAX_ALTERNATIVES}")
    if output.alternatives and not output.log_probs:
        raise InvalidArgument("output.alternatives", output.alternatives, "0 without output.log_probs")


def _check_speculation(speculation: pb.SpeculationParams) -> None:
    Rule.from_proto(speculation.mode, field="speculation.mode")
    if speculation.max_nodes > MAX_TREE_NODES:
        raise InvalidArgument("speculation.max_nodes", speculation.max_nodes, f"at most {MAX_TREE_NODES}")
    if speculation.HasField("max_depth") and not 1 <= speculation.max_depth <= MAX_TREE_DEPTH:
        raise InvalidArgument("speculation.max_depth", speculation.max_depth, f"1 to {MAX_TREE_DEPTH}")


def tokenize(request: pb.GenerateRequest, tokenizer: RequestTokenizer) -> tuple[int, ...]:
    """The prompt's token ids.

    Raises:
        InvalidArgument: the model has no chat template, or it refuses the messages.
    """
    match request.WhichOneof("input"):
        case "prompt":
            return tuple(tokenizer.encode(request.prompt))
        case "token_ids":
            return tuple(request.token_ids.ids)
        case _:
            if not tokenizer.has_chat_template:
                raise InvalidArgument("chat", len(request.chat.messages), "this model has no chat template")
            messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
            return tuple(tokenizer.encode_chat(messages))


def plan(
    request: pb.GenerateRequest,
    prompt_token_ids: tuple[int, ...],
    *,
    identifier: str,
    eos_token_ids: Sequence[int],
    limits: ModelLimits,
    config: RouterConfig,
    source: Random,
) -> GenerationPlan:
    """Fill in the defaults of a request that passed `check`.

    Args:
        source: where an unset seed is drawn from.

    Raises:
        InvalidArgument: tokens outside the vocabulary, no prompt, or a prompt that fills the context.
    """
    context = limits.max_context or MAX_CONTEXT
    count = len(prompt_token_ids)
    kind = request.WhichOneof("input") or "input"
    field = "token_ids.ids" if kind == "token_ids" else kind
    if count == 0:
        raise InvalidArgument(field, "0 tokens", "at least 1 token")
    if count >= context:
        raise InvalidArgument(
            field, f"{count} tokens", f"at most {context - 1} tokens: the model's context holds {context}"
        )
    if (highest := max(prompt_token_ids)) >= limits.vocab_size:
        raise InvalidArgument(field, highest, f"token ids below the vocabulary size {limits.vocab_size}")
    for index, token in enumerate(request.stopping.stop_token_ids):
        if token >= limits.vocab_size:
            limit = f"below the vocabulary size {limits.vocab_size}"
            raise InvalidArgument(f"stopping.stop_token_ids[{index}]", token, limit)
    sampling = SamplingParams.from_proto(request.sampling) if request.HasField("sampling") else GREEDY
    sampling.validate(vocab_size=limits.vocab_size)
    if sampling.seed is None:
        sampling = replace(sampling, seed=source.getrandbits(64))
    wanted = request.stopping.max_new_tokens or config.default_max_new_tokens
    max_length = min(count + max(wanted, request.stopping.min_new_tokens), context)
    parameters = pb.GenerateRequest()
    parameters.CopyFrom(request)
    parameters.ClearField("request_id")
    parameters.ClearField(kind)
    return GenerationPlan(
        request_id=identifier,
        digest=digest(request),
        parameters=parameters.SerializeToString(deterministic=True),
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        stops=_rules(request.stopping, eos_token_ids, max_length - count),
        max_length=max_length,
        log_probs=request.output.log_probs,
        alternatives=request.output.alternatives,
        echo_prompt_token_ids=request.output.echo_prompt_token_ids,
        max_nodes=_max_nodes(request.speculation, config),
        max_depth=request.speculation.max_depth or config.tree_depth,
        rule=Rule.from_proto(request.speculation.mode),
        structured_output=request.structured_output if request.HasField("structured_output") else None,
    )


def _rules(stopping: pb.StoppingParams, eos_token_ids: Sequence[int], max_new_tokens: int) -> StopRules:
    ends = frozenset(stopping.stop_token_ids) | (frozenset() if stopping.ignore_eos else frozenset(eos_token_ids))
    return StopRules(max_new_tokens, stopping.min_new_tokens, ends, tuple(stopping.stop))


def _max_nodes(speculation: pb.SpeculationParams, config: RouterConfig) -> int:
    if speculation.off:
        return 0
    return speculation.max_nodes if speculation.HasField("max_nodes") else config.tree_budget
