"""`Result` and its parts: what a request gives back, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from graftree.v1 import common_pb2, generation_pb2


class FinishReason(StrEnum):
    """Why a generation ended; compares equal to its word."""

    STOP = "stop"
    LENGTH = "length"

    @classmethod
    def from_proto(cls, reason: int) -> Self:
        """Raises: ValueError for a reason this version does not know."""
        return cls(generation_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower())


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """Log probability (natural) of a delivered token, its rank (1 = most likely), and the likeliest tokens, best
    first, as (token id, log probability)."""

    token_id: int
    log_prob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_proto(cls, message: common_pb2.TokenLogProb) -> Self:
        """From the wire."""
        others = tuple((each.token_id, each.log_prob) for each in message.alternatives)
        return cls(message.token_id, message.log_prob, message.rank, others)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens verified since the sample's chunk before, and the text that became final with them.

    `text` may be empty while a character or a possible stop string is incomplete; `token_ids` may be empty in a last
    chunk that only releases held-back text. `offset` is the number of the sample's tokens before this chunk, `index`
    the sample.
    """

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[TokenLogProb, ...] = ()
    offset: int = 0
    index: int = 0

    @classmethod
    def from_proto(cls, message: generation_pb2.GenerationChunk) -> Self:
        """From the wire."""
        log_probs = tuple(TokenLogProb.from_proto(each) for each in message.log_probs)
        return cls(message.text, tuple(message.token_ids), log_probs, message.offset, message.index)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sample, or of a whole request."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Speculation figures of one request, under vLLM's names; only delivered tokens count.

    `acceptance_histogram[k]` is the number of verify steps that delivered k accepted draft tokens,
    `draft_histogram[n]` of those that verified n. `num_branch_hits` are the steps that found drafts below their root
    the moment the verdict before them came.
    """

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    num_stale_nodes: int
    num_speculators: int
    draft_histogram: tuple[int, ...] = ()
    num_branch_hits: int = 0

    @classmethod
    def from_proto(cls, message: generation_pb2.SpeculationStats) -> Self:
        """From the wire."""
        return cls(
            message.num_spec_steps,
            message.num_draft_tokens,
            message.num_accepted_tokens,
            message.mean_acceptance_length,
            message.draft_acceptance_rate,
            tuple(message.acceptance_histogram),
            message.num_stale_nodes,
            message.num_speculators,
            tuple(message.draft_histogram),
            message.num_branch_hits,
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in nanoseconds of the servers' clocks; see RequestTimings in the protos."""

    ttft_ns: int
    decode_ns: int
    total_ns: int
    verify_queue_ns: int
    verify_forward_ns: int
    verify_sample_ns: int
    verify_total_ns: int
    commit_ns: int
    draft_wait_ns: int = 0

    @classmethod
    def from_proto(cls, message: generation_pb2.RequestTimings) -> Self:
        """From the wire."""
        return cls(*(getattr(message, name) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class Result:
    """One finished generation; of several samples the first one, which holds the others.

    Attributes:
        text: what was generated, without a stop string that ended it.
        token_ids: the tokens generated, in order; a stop token that ended it included.
        finish_reason: "stop" or "length".
        log_probs: one per token where asked for, else empty.
        seed: the seed in force, also where none was given; the same request with it gives the same tokens.
        prompt_token_ids: the prompt's tokens where `echo_prompt_token_ids` was asked for, else empty.
        stop_string: the stop string that ended the text, if one did.
        stop_token_id: the stop or end-of-sequence token that ended it, if one did.
        index: the sample; all figures here are this sample's.
        others: the samples behind the first one.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationStats
    timings: Timings
    log_probs: tuple[TokenLogProb, ...]
    request_id: str
    model: str
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    stop_string: str | None = None
    stop_token_id: int | None = None
    index: int = 0
    others: tuple[Result, ...] = ()

    @property
    def samples(self) -> tuple[Result, ...]:
        """All samples of the request, this one first."""
        return (self, *self.others)

    @property
    def mean_inter_token_latency_ns(self) -> float:
        """Decode time per token behind the first; 0 for one token. Tokens of one run count like any others."""
        return self.timings.decode_ns / max(1, self.usage.completion_tokens - 1)

    @property
    def total_usage(self) -> Usage:
        """Of all samples: the prompt once, and every sample's tokens."""
        completion = sum(sample.usage.completion_tokens for sample in self.samples)
        return Usage(self.usage.prompt_tokens, completion)


@dataclass(frozen=True, slots=True)
class PodInfo:
    """One pod as the router sees it. `state`: ready, connecting, quarantined, draining or "refused: <why>"."""

    pod_id: str
    tier: str
    kind: str
    address: str
    state: str
    sessions: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served, its limits, and the pods in use now."""

    model: str
    model_fingerprint: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    pods: tuple[PodInfo, ...]

    @classmethod
    def from_proto(cls, message: generation_pb2.GetModelInfoResponse) -> Self:
        """From the wire."""
        pods = tuple(
            PodInfo(each.pod_id, each.tier, each.kind, each.address, each.state, each.sessions)
            for each in message.pods
        )
        return cls(
            message.model,
            message.model_fingerprint,
            message.vocab_size,
            message.max_context,
            tuple(message.eos_token_ids),
            message.has_chat_template,
            pods,
        )
