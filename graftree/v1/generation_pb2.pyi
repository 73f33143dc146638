from graftree.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "token_ids", "chat", "sampling", "stopping", "output", "speculation", "structured_output", "n", "resume_after", "priority", "recollection")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    RESUME_AFTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RECOLLECTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: str
    token_ids: TokenIds
    chat: Chat
    sampling: _common_pb2.SamplingParams
    stopping: StoppingParams
    output: OutputParams
    speculation: SpeculationParams
    structured_output: _common_pb2.StructuredOutputParams
    n: int
    resume_after: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    recollection: Recollection
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingParams, _Mapping]] = ..., output: _Optional[_Union[OutputParams, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., structured_output: _Optional[_Union[_common_pb2.StructuredOutputParams, _Mapping]] = ..., n: _Optional[int] = ..., resume_after: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., recollection: _Optional[_Union[Recollection, _Mapping]] = ...) -> None: ...

class Recollection(_message.Message):
    __slots__ = ("seed", "samples")
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    seed: int
    samples: _containers.RepeatedCompositeFieldContainer[TokenIds]
    def __init__(self, seed: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class StoppingParams(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class OutputParams(_message.Message):
    __slots__ = ("log_probs", "alternatives", "echo_prompt_token_ids", "log_probs_mode")
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    ECHO_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    log_probs: bool
    alternatives: int
    echo_prompt_token_ids: bool
    log_probs_mode: _common_pb2.LogProbsMode
    def __init__(self, log_probs: _Optional[bool] = ..., alternatives: _Optional[int] = ..., echo_prompt_token_ids: _Optional[bool] = ..., log_probs_mode: _Optional[_Union[_common_pb2.LogProbsMode, str]] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("mode", "max_nodes", "max_depth", "off")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.SpeculationMode
    max_nodes: int
    max_depth: int
    off: bool
    def __init__(self, mode: _Optional[_Union[_common_pb2.SpeculationMode, str]] = ..., max_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., off: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: GenerationStarted
    chunk: GenerationChunk
    finished: GenerationFinished
    def __init__(self, started: _Optional[_Union[GenerationStarted, _Mapping]] = ..., chunk: _Optional[_Union[GenerationChunk, _Mapping]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "seed", "prompt_token_ids", "n")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    n: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., n: _Optional[int] = ...) -> None: ...

class GenerationChunk(_message.Message):
    __slots__ = ("token_ids", "text", "log_probs", "offset", "index")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    log_probs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogProb]
    offset: int
    index: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., log_probs: _Optional[_Iterable[_Union[_common_pb2.TokenLogProb, _Mapping]]] = ..., offset: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("reason", "usage", "speculation", "timings", "stop_string", "stop_token_id", "index", "total_usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOTAL_USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    usage: Usage
    speculation: SpeculationStats
    timings: RequestTimings
    stop_string: str
    stop_token_id: int
    index: int
    total_usage: Usage
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., timings: _Optional[_Union[RequestTimings, _Mapping]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., index: _Optional[int] = ..., total_usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("num_spec_steps", "num_draft_tokens", "num_accepted_tokens", "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_stale_nodes", "num_speculators", "draft_histogram", "num_branch_hits")
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATORS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCH_HITS_FIELD_NUMBER: _ClassVar[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_stale_nodes: int
    num_speculators: int
    draft_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_branch_hits: int
    def __init__(self, num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., mean_acceptance_length: _Optional[float] = ..., draft_acceptance_rate: _Optional[float] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., num_stale_nodes: _Optional[int] = ..., num_speculators: _Optional[int] = ..., draft_histogram: _Optional[_Iterable[int]] = ..., num_branch_hits: _Optional[int] = ...) -> None: ...

class RequestTimings(_message.Message):
    __slots__ = ("ttft_ns", "decode_ns", "total_ns", "verify_queue_ns", "verify_forward_ns", "verify_sample_ns", "verify_total_ns", "commit_ns", "draft_wait_ns")
    TTFT_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    ttft_ns: int
    decode_ns: int
    total_ns: int
    verify_queue_ns: int
    verify_forward_ns: int
    verify_sample_ns: int
    verify_total_ns: int
    commit_ns: int
    draft_wait_ns: int
    def __init__(self, ttft_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., verify_queue_ns: _Optional[int] = ..., verify_forward_ns: _Optional[int] = ..., verify_sample_ns: _Optional[int] = ..., verify_total_ns: _Optional[int] = ..., commit_ns: _Optional[int] = ..., draft_wait_ns: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "model_fingerprint", "vocab_size", "max_context", "eos_token_ids", "has_chat_template", "pods")
    class PodInfo(_message.Message):
        __slots__ = ("pod_id", "tier", "kind", "address", "state", "sessions")
        POD_ID_FIELD_NUMBER: _ClassVar[int]
        TIER_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        SESSIONS_FIELD_NUMBER: _ClassVar[int]
        pod_id: str
        tier: str
        kind: str
        address: str
        state: str
        sessions: int
        def __init__(self, pod_id: _Optional[str] = ..., tier: _Optional[str] = ..., kind: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., sessions: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_fingerprint: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    pods: _containers.RepeatedCompositeFieldContainer[GetModelInfoResponse.PodInfo]
    def __init__(self, model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., pods: _Optional[_Iterable[_Union[GetModelInfoResponse.PodInfo, _Mapping]]] = ...) -> None: ...
