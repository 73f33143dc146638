from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_MODE_UNSPECIFIED: _ClassVar[SpeculationMode]
    SPECULATION_MODE_TARGET_ONLY: _ClassVar[SpeculationMode]
    SPECULATION_MODE_MSS: _ClassVar[SpeculationMode]
    SPECULATION_MODE_MSS_WITHOUT_REPLACEMENT: _ClassVar[SpeculationMode]
    SPECULATION_MODE_NAIVE: _ClassVar[SpeculationMode]

class LogProbsMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_PROBS_MODE_UNSPECIFIED: _ClassVar[LogProbsMode]
    LOG_PROBS_MODE_RAW: _ClassVar[LogProbsMode]
    LOG_PROBS_MODE_PROCESSED: _ClassVar[LogProbsMode]
SPECULATION_MODE_UNSPECIFIED: SpeculationMode
SPECULATION_MODE_TARGET_ONLY: SpeculationMode
SPECULATION_MODE_MSS: SpeculationMode
SPECULATION_MODE_MSS_WITHOUT_REPLACEMENT: SpeculationMode
SPECULATION_MODE_NAIVE: SpeculationMode
LOG_PROBS_MODE_UNSPECIFIED: LogProbsMode
LOG_PROBS_MODE_RAW: LogProbsMode
LOG_PROBS_MODE_PROCESSED: LogProbsMode

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "bad_words_token_ids", "banned_token_ids", "allowed_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class TokenSequence(_message.Message):
        __slots__ = ("ids",)
        IDS_FIELD_NUMBER: _ClassVar[int]
        ids: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[SamplingParams.TokenSequence]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[str]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[SamplingParams.TokenSequence, _Mapping]]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StructuredOutputParams(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar", "choice", "disable_any_whitespace")
    class Choice(_message.Message):
        __slots__ = ("options",)
        OPTIONS_FIELD_NUMBER: _ClassVar[int]
        options: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, options: _Optional[_Iterable[str]] = ...) -> None: ...
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choice: StructuredOutputParams.Choice
    disable_any_whitespace: bool
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[StructuredOutputParams.Choice, _Mapping]] = ..., disable_any_whitespace: _Optional[bool] = ...) -> None: ...

class TokenTree(_message.Message):
    __slots__ = ("root_id", "token_ids", "parents", "log_probs")
    ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    root_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, root_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class Proposals(_message.Message):
    __slots__ = ("ids", "weights", "count")
    IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    count: int
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., count: _Optional[int] = ...) -> None: ...

class TokenLogProb(_message.Message):
    __slots__ = ("token_id", "log_prob", "rank", "alternatives")
    class Alternative(_message.Message):
        __slots__ = ("token_id", "log_prob")
        TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
        LOG_PROB_FIELD_NUMBER: _ClassVar[int]
        token_id: int
        log_prob: float
        def __init__(self, token_id: _Optional[int] = ..., log_prob: _Optional[float] = ...) -> None: ...
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    log_prob: float
    rank: int
    alternatives: _containers.RepeatedCompositeFieldContainer[TokenLogProb.Alternative]
    def __init__(self, token_id: _Optional[int] = ..., log_prob: _Optional[float] = ..., rank: _Optional[int] = ..., alternatives: _Optional[_Iterable[_Union[TokenLogProb.Alternative, _Mapping]]] = ...) -> None: ...

class StageTimings(_message.Message):
    __slots__ = ("queue_ns", "forward_ns", "sample_ns", "total_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    forward_ns: int
    sample_ns: int
    total_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., total_ns: _Optional[int] = ...) -> None: ...

class PodLoad(_message.Message):
    __slots__ = ("sessions", "max_sessions", "free_blocks", "total_blocks", "queued", "draining")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    max_sessions: int
    free_blocks: int
    total_blocks: int
    queued: int
    draining: bool
    def __init__(self, sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., queued: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class StreamHello(_message.Message):
    __slots__ = ("revision", "pod_id", "model_fingerprint", "vocab_fingerprint", "vocab_size", "max_context")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    POD_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    revision: int
    pod_id: str
    model_fingerprint: str
    vocab_fingerprint: str
    vocab_size: int
    max_context: int
    def __init__(self, revision: _Optional[int] = ..., pod_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., vocab_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ...) -> None: ...

class SessionFailure(_message.Message):
    __slots__ = ("session_id", "code", "reason", "message", "retry_after_ms", "field", "value", "limit")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    code: int
    reason: str
    message: str
    retry_after_ms: int
    field: str
    value: str
    limit: str
    def __init__(self, session_id: _Optional[str] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., field: _Optional[str] = ..., value: _Optional[str] = ..., limit: _Optional[str] = ...) -> None: ...
