"""`GenerationPlan`: a GenerateRequest that has been checked, tokenized and given its defaults."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from graftree.acceptance import Rule
from graftree.config import RouterConfig
from graftree.errors import InvalidArgument
from graftree.sampling import GREEDY, SamplingParams
from graftree.sampling_params import MAX_BAD_SEQUENCES
from graftree.v1 import generation_pb2 as pb
from graftree.v1.common_pb2 import LOG_PROBS_MODE_RAW, LogProbsMode, StructuredOutputParams
from router.checks import check as check
from router.stops import StopRules

MAX_CONTEXT = 1 << 30  # where a verifier names no limit

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class RequestTokenizer(Protocol):
    """What a request needs of `graftree.text.tokenizer.Tokenizer`."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class ModelLimits:
    """Of the model that is served, as the verifiers say.

    Attributes:
        vocab_size: rows of the embedding.
        max_context: longest sequence in tokens; 0 = any.
        token_count: ids at or above this are padding; 0 = none are.
    """

    vocab_size: int
    max_context: int
    token_count: int = 0


@dataclass(frozen=True)
class GenerationPlan:
    """What to generate. Immutable; everything a session needs to start, or to start again elsewhere.

    Attributes:
        parameters: the request without id and input, serialised; a seed it did not set is not in there.
        sampling: with the seed in force.
        max_length: sequence length that is never exceeded, prompt included.
        max_nodes: most tree nodes per verify step; 0 = plain decoding.
        rule: how drafts are accepted.
        structured_output: what the output must look like; None = anything.
        log_probs_mode: graftree.v1.LogProbsMode.
        samples: how many of the prompt are wanted.
        remembered: of each sample the output that the client has; empty = it does not say, or it is of no use.
        priority: higher ones come first where not all can.
        tenant: on whose behalf; empty = there are no tenants. `request_id` begins with it.
        traceparent: of the span that what the pods do hangs below; empty = not traced.
    """

    request_id: str
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
    log_probs_mode: LogProbsMode = LOG_PROBS_MODE_RAW
    samples: int = 1
    remembered: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    tenant: str = ""
    traceparent: str = ""

    def sample(self, index: int) -> GenerationPlan:
        """The plan of one sample: the request alone with seed + index, as vLLM has it."""
        return replace(self, sampling=replace(self.sampling, seed=(self.seed + index) % 2**64))

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
                limit = "prompt or token_ids: this model has no chat template"
                raise InvalidArgument("chat", f"{len(request.chat.messages)} messages", limit)
            messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
            return tuple(tokenizer.encode_chat(messages))


def bad_words(request: pb.GenerateRequest, tokenizer: RequestTokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that sampling.bad_words forbids.

    As vLLM has it: each text as it is, to forbid it where a text begins, and behind a space where that gives another
    word of as many tokens.

    Raises:
        InvalidArgument: a text without tokens.
    """
    found: list[tuple[int, ...]] = []
    for index, word in enumerate(request.sampling.bad_words):
        bare = tuple(tokenizer.encode(word.lstrip(), special_tokens=False))
        if not bare:
            raise InvalidArgument(f"sampling.bad_words[{index}]", "0 tokens", "a text of at least one token")
        found.append(bare)
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), special_tokens=False))
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


def plan(
    request: pb.GenerateRequest,
    prompt_token_ids: tuple[int, ...],
    *,
    identifier: str,
    eos_token_ids: Sequence[int],
    limits: ModelLimits,
    config: RouterConfig,
    source: Random,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> GenerationPlan:
    """Fill in the defaults of a request that passed `check`.

    Args:
        source: where an unset seed is drawn from.
        bad_words: of the request, as token sequences.

    Raises:
        InvalidArgument: tokens outside the vocabulary, no prompt, a prompt that fills the context, or options that
            leave no token to choose.
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
    sampling = _sampling(request, bad_words, limits)
    remembered = _remembered(request, limits)
    if sampling.seed is None:
        seed = request.recollection.seed if remembered else source.getrandbits(64)
        sampling = replace(sampling, seed=seed)
    if request.stopping.min_new_tokens > context - count:
        limit = f"at most {context - count}: the model's context holds {context} tokens, {count} of them the prompt's"
        raise InvalidArgument("stopping.min_new_tokens", request.stopping.min_new_tokens, limit)
    wanted = request.stopping.max_new_tokens or config.default_max_new_tokens
    max_length = min(count + max(wanted, request.stopping.min_new_tokens), context)
    stops = _rules(request.stopping, eos_token_ids, max_length - count)
    tokens = limits.token_count or limits.vocab_size
    if stops.min_new_tokens and not sampling.leaves_a_token(tokens, stops.stop_token_ids):
        limit = "0: only tokens that end the answer can be chosen"
        raise InvalidArgument("stopping.min_new_tokens", stops.min_new_tokens, limit)
    parameters = pb.GenerateRequest()
    parameters.CopyFrom(request)
    for name in ("request_id", "resume_after", "recollection", kind):
        parameters.ClearField(name)
    rule = Rule.from_proto(request.speculation.mode)
    return GenerationPlan(
        request_id=identifier,
        parameters=parameters.SerializeToString(deterministic=True),
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        stops=stops,
        max_length=max_length,
        log_probs=request.output.log_probs,
        alternatives=request.output.alternatives,
        echo_prompt_token_ids=request.output.echo_prompt_token_ids,
        max_nodes=_max_nodes(request.speculation, config),
        max_depth=request.speculation.max_depth or config.tree_depth,
        rule=rule,
        structured_output=request.structured_output if request.HasField("structured_output") else None,
        log_probs_mode=request.output.log_probs_mode or LOG_PROBS_MODE_RAW,
        samples=request.n or 1,
        remembered=() if rule.at(sampling).tests_draws else remembered,
        priority=request.priority,
    )


def _remembered(request: pb.GenerateRequest, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    samples = tuple(tuple(sample.ids) for sample in request.recollection.samples)
    for index, sample in enumerate(samples):
        if max(sample, default=0) >= limits.vocab_size:
            limit = f"token ids below the vocabulary size {limits.vocab_size}"
            raise InvalidArgument(f"recollection.samples[{index}].ids", max(sample), limit)
    return samples


def _sampling(
    request: pb.GenerateRequest, bad_words: Sequence[tuple[int, ...]], limits: ModelLimits
) -> SamplingParams:
    params = SamplingParams.from_proto(request.sampling) if request.HasField("sampling") else GREEDY
    if bad_words:
        every = tuple(dict.fromkeys((*params.bad_words_token_ids, *bad_words)))
        if len(every) > MAX_BAD_SEQUENCES:
            limit = f"at most {MAX_BAD_SEQUENCES} with bad_words_token_ids"
            raise InvalidArgument("sampling.bad_words", f"{len(every)} token sequences", limit)
        params = replace(params, bad_words=(), bad_words_token_ids=every)
    params.validate(vocab_size=limits.vocab_size, token_count=limits.token_count)
    return params


def _rules(stopping: pb.StoppingParams, eos_token_ids: Sequence[int], max_new_tokens: int) -> StopRules:
    ends = frozenset(stopping.stop_token_ids) | (frozenset() if stopping.ignore_eos else frozenset(eos_token_ids))
    return StopRules(max_new_tokens, stopping.min_new_tokens, ends, tuple(stopping.stop))


def _max_nodes(speculation: pb.SpeculationParams, config: RouterConfig) -> int:
    if speculation.off:
        return 0
    return speculation.max_nodes if speculation.HasField("max_nodes") else config.tree_budget
