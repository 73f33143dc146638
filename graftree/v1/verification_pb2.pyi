from graftree.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("hello", "opens", "steps", "closes", "credits")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.StreamHello
    opens: _containers.RepeatedCompositeFieldContainer[VerifyOpen]
    steps: _containers.RepeatedCompositeFieldContainer[VerifyStep]
    closes: _containers.RepeatedScalarFieldContainer[str]
    credits: int
    def __init__(self, hello: _Optional[_Union[_common_pb2.StreamHello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[VerifyOpen, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[VerifyStep, _Mapping]]] = ..., closes: _Optional[_Iterable[str]] = ..., credits: _Optional[int] = ...) -> None: ...

class VerifyOpen(_message.Message):
    __slots__ = ("session_id", "epoch", "salt", "token_ids", "prompt_tokens", "sampling", "max_length", "max_nodes", "stop_token_ids", "min_new_tokens", "log_probs", "alternatives", "structured_output", "mode", "log_probs_mode", "prefix_of", "traceparent", "tenant", "priority")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_OF_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    salt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: _common_pb2.SamplingParams
    max_length: int
    max_nodes: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_new_tokens: int
    log_probs: bool
    alternatives: int
    structured_output: _common_pb2.StructuredOutputParams
    mode: _common_pb2.SpeculationMode
    log_probs_mode: _common_pb2.LogProbsMode
    prefix_of: str
    traceparent: str
    tenant: str
    priority: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., salt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_length: _Optional[int] = ..., max_nodes: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_new_tokens: _Optional[int] = ..., log_probs: _Optional[bool] = ..., alternatives: _Optional[int] = ..., structured_output: _Optional[_Union[_common_pb2.StructuredOutputParams, _Mapping]] = ..., mode: _Optional[_Union[_common_pb2.SpeculationMode, str]] = ..., log_probs_mode: _Optional[_Union[_common_pb2.LogProbsMode, str]] = ..., prefix_of: _Optional[str] = ..., traceparent: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class VerifyStep(_message.Message):
    __slots__ = ("session_id", "step", "committed_length", "tree", "proposals")
    class NodeProposals(_message.Message):
        __slots__ = ("node", "salt", "proposals")
        NODE_FIELD_NUMBER: _ClassVar[int]
        SALT_FIELD_NUMBER: _ClassVar[int]
        PROPOSALS_FIELD_NUMBER: _ClassVar[int]
        node: int
        salt: int
        proposals: _common_pb2.Proposals
        def __init__(self, node: _Optional[int] = ..., salt: _Optional[int] = ..., proposals: _Optional[_Union[_common_pb2.Proposals, _Mapping]] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    committed_length: int
    tree: _common_pb2.TokenTree
    proposals: _containers.RepeatedCompositeFieldContainer[VerifyStep.NodeProposals]
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ..., committed_length: _Optional[int] = ..., tree: _Optional[_Union[_common_pb2.TokenTree, _Mapping]] = ..., proposals: _Optional[_Iterable[_Union[VerifyStep.NodeProposals, _Mapping]]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("hello", "verdicts", "failures", "load", "step_time")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.StreamHello
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    failures: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionFailure]
    load: _common_pb2.PodLoad
    step_time: StepTime
    def __init__(self, hello: _Optional[_Union[_common_pb2.StreamHello, _Mapping]] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_common_pb2.SessionFailure, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.PodLoad, _Mapping]] = ..., step_time: _Optional[_Union[StepTime, _Mapping]] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("rows", "seconds", "seconds_per_sequence", "seconds_per_context_token", "seconds_per_row_context")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_CONTEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_ROW_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    seconds_per_sequence: float
    seconds_per_context_token: float
    seconds_per_row_context: float
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., seconds_per_sequence: _Optional[float] = ..., seconds_per_context_token: _Optional[float] = ..., seconds_per_row_context: _Optional[float] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("session_id", "step", "token_ids", "accepted_nodes", "log_probs", "timings", "batch_sessions", "stale", "tree_error")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    TREE_ERROR_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogProb]
    timings: _common_pb2.StageTimings
    batch_sessions: int
    stale: bool
    tree_error: str
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[_Union[_common_pb2.TokenLogProb, _Mapping]]] = ..., timings: _Optional[_Union[_common_pb2.StageTimings, _Mapping]] = ..., batch_sessions: _Optional[int] = ..., stale: _Optional[bool] = ..., tree_error: _Optional[str] = ...) -> None: ...
