from rpc.pb import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerificationRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[VerificationRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[VerificationRequest, _Mapping]]] = ...) -> None: ...

class VerificationRequest(_message.Message):
    __slots__ = ("open", "propose", "decode", "close", "early")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    open: OpenTarget
    propose: Propose
    decode: Decode
    close: _session_pb2.CloseSession
    early: _session_pb2.EarlyProposals
    def __init__(self, open: _Optional[_Union[OpenTarget, _Mapping]] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ..., decode: _Optional[_Union[Decode, _Mapping]] = ..., close: _Optional[_Union[_session_pb2.CloseSession, _Mapping]] = ..., early: _Optional[_Union[_session_pb2.EarlyProposals, _Mapping]] = ...) -> None: ...

class OpenTarget(_message.Message):
    __slots__ = ("session", "prompt_token_ids", "committed_token_ids", "sampling", "stops", "traceparent", "deadline_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    session: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _session_pb2.EngineSampling
    stops: _session_pb2.EngineStops
    traceparent: str
    deadline_s: float
    def __init__(self, session: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_session_pb2.EngineSampling, _Mapping]] = ..., stops: _Optional[_Union[_session_pb2.EngineStops, _Mapping]] = ..., traceparent: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("session", "proposal", "traceparent")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    session: int
    proposal: _session_pb2.ProposalTree
    traceparent: str
    def __init__(self, session: _Optional[int] = ..., proposal: _Optional[_Union[_session_pb2.ProposalTree, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Decode(_message.Message):
    __slots__ = ("session", "max_tokens", "traceparent")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    session: int
    max_tokens: int
    traceparent: str
    def __init__(self, session: _Optional[int] = ..., max_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class VerificationReplies(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[VerificationReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[VerificationReply, _Mapping]]] = ...) -> None: ...

class VerificationReply(_message.Message):
    __slots__ = ("verdict", "closed", "failed")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    verdict: SessionVerdict
    closed: _session_pb2.SessionClosed
    failed: _session_pb2.SessionFailed
    def __init__(self, verdict: _Optional[_Union[SessionVerdict, _Mapping]] = ..., closed: _Optional[_Union[_session_pb2.SessionClosed, _Mapping]] = ..., failed: _Optional[_Union[_session_pb2.SessionFailed, _Mapping]] = ...) -> None: ...

class SessionVerdict(_message.Message):
    __slots__ = ("session", "base", "num_proposed", "num_accepted", "tokens", "finish_reason", "forward_time_s", "queue_time_s", "rows", "dropped", "cached_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FORWARD_TIME_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: int
    base: _session_pb2.CommittedState
    num_proposed: int
    num_accepted: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    forward_time_s: float
    queue_time_s: float
    rows: int
    dropped: str
    cached_tokens: int
    def __init__(self, session: _Optional[int] = ..., base: _Optional[_Union[_session_pb2.CommittedState, _Mapping]] = ..., num_proposed: _Optional[int] = ..., num_accepted: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., forward_time_s: _Optional[float] = ..., queue_time_s: _Optional[float] = ..., rows: _Optional[int] = ..., dropped: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
