from graftree.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculateRequest(_message.Message):
    __slots__ = ("hello", "opens", "commits", "closes", "credits")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.StreamHello
    opens: _containers.RepeatedCompositeFieldContainer[DraftOpen]
    commits: _containers.RepeatedCompositeFieldContainer[DraftCommit]
    closes: _containers.RepeatedScalarFieldContainer[str]
    credits: int
    def __init__(self, hello: _Optional[_Union[_common_pb2.StreamHello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[DraftOpen, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[DraftCommit, _Mapping]]] = ..., closes: _Optional[_Iterable[str]] = ..., credits: _Optional[int] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("session_id", "salt", "token_ids", "prompt_tokens", "sampling", "max_nodes", "max_depth", "vocab_size", "max_length", "mode", "draft_salt", "structured_output", "stop_token_ids", "traceparent", "tenant")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SALT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    salt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: _common_pb2.SamplingParams
    max_nodes: int
    max_depth: int
    vocab_size: int
    max_length: int
    mode: _common_pb2.SpeculationMode
    draft_salt: int
    structured_output: _common_pb2.StructuredOutputParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    tenant: str
    def __init__(self, session_id: _Optional[str] = ..., salt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_length: _Optional[int] = ..., mode: _Optional[_Union[_common_pb2.SpeculationMode, str]] = ..., draft_salt: _Optional[int] = ..., structured_output: _Optional[_Union[_common_pb2.StructuredOutputParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class DraftCommit(_message.Message):
    __slots__ = ("session_id", "token_ids", "committed_length", "budget_nodes", "paused")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUDGET_NODES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_length: int
    budget_nodes: int
    paused: bool
    def __init__(self, session_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., committed_length: _Optional[int] = ..., budget_nodes: _Optional[int] = ..., paused: _Optional[bool] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("hello", "deltas", "failures", "load")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.StreamHello
    deltas: _containers.RepeatedCompositeFieldContainer[TreeDelta]
    failures: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionFailure]
    load: _common_pb2.PodLoad
    def __init__(self, hello: _Optional[_Union[_common_pb2.StreamHello, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[TreeDelta, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_common_pb2.SessionFailure, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.PodLoad, _Mapping]] = ...) -> None: ...

class TreeDelta(_message.Message):
    __slots__ = ("session_id", "parent_ids", "token_ids", "log_probs", "committed_length", "complete", "timings", "proposals")
    class NodeProposals(_message.Message):
        __slots__ = ("node_id", "proposals")
        NODE_ID_FIELD_NUMBER: _ClassVar[int]
        PROPOSALS_FIELD_NUMBER: _ClassVar[int]
        node_id: int
        proposals: _common_pb2.Proposals
        def __init__(self, node_id: _Optional[int] = ..., proposals: _Optional[_Union[_common_pb2.Proposals, _Mapping]] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    parent_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    committed_length: int
    complete: bool
    timings: _common_pb2.StageTimings
    proposals: _containers.RepeatedCompositeFieldContainer[TreeDelta.NodeProposals]
    def __init__(self, session_id: _Optional[str] = ..., parent_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., committed_length: _Optional[int] = ..., complete: _Optional[bool] = ..., timings: _Optional[_Union[_common_pb2.StageTimings, _Mapping]] = ..., proposals: _Optional[_Iterable[_Union[TreeDelta.NodeProposals, _Mapping]]] = ...) -> None: ...
