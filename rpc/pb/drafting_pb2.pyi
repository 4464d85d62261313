from rpc.pb import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[DraftRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[DraftRequest, _Mapping]]] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("open", "advance", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: OpenDraft
    advance: Advance
    close: _session_pb2.CloseSession
    def __init__(self, open: _Optional[_Union[OpenDraft, _Mapping]] = ..., advance: _Optional[_Union[Advance, _Mapping]] = ..., close: _Optional[_Union[_session_pb2.CloseSession, _Mapping]] = ...) -> None: ...

class OpenDraft(_message.Message):
    __slots__ = ("session", "prompt_token_ids", "sampling", "traceparent")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    session: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _session_pb2.EngineSampling
    traceparent: str
    def __init__(self, session: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_session_pb2.EngineSampling, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Advance(_message.Message):
    __slots__ = ("session", "base", "tail", "num_speculative_tokens", "confidence_threshold", "traceparent", "run_ahead")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    session: int
    base: _session_pb2.CommittedState
    tail: _containers.RepeatedScalarFieldContainer[int]
    num_speculative_tokens: int
    confidence_threshold: float
    traceparent: str
    run_ahead: RunAhead
    def __init__(self, session: _Optional[int] = ..., base: _Optional[_Union[_session_pb2.CommittedState, _Mapping]] = ..., tail: _Optional[_Iterable[int]] = ..., num_speculative_tokens: _Optional[int] = ..., confidence_threshold: _Optional[float] = ..., traceparent: _Optional[str] = ..., run_ahead: _Optional[_Union[RunAhead, _Mapping]] = ...) -> None: ...

class RunAhead(_message.Message):
    __slots__ = ("num_speculative_tokens", "budget_s", "acceptance", "num_proposed", "round_s")
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ROUND_S_FIELD_NUMBER: _ClassVar[int]
    num_speculative_tokens: int
    budget_s: float
    acceptance: float
    num_proposed: int
    round_s: float
    def __init__(self, num_speculative_tokens: _Optional[int] = ..., budget_s: _Optional[float] = ..., acceptance: _Optional[float] = ..., num_proposed: _Optional[int] = ..., round_s: _Optional[float] = ...) -> None: ...

class DraftReplies(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[DraftReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[DraftReply, _Mapping]]] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("proposal", "closed", "failed", "early")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    proposal: SessionProposal
    closed: _session_pb2.SessionClosed
    failed: _session_pb2.SessionFailed
    early: _session_pb2.EarlyProposals
    def __init__(self, proposal: _Optional[_Union[SessionProposal, _Mapping]] = ..., closed: _Optional[_Union[_session_pb2.SessionClosed, _Mapping]] = ..., failed: _Optional[_Union[_session_pb2.SessionFailed, _Mapping]] = ..., early: _Optional[_Union[_session_pb2.EarlyProposals, _Mapping]] = ...) -> None: ...

class SessionProposal(_message.Message):
    __slots__ = ("session", "proposal")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    session: int
    proposal: _session_pb2.ProposalTree
    def __init__(self, session: _Optional[int] = ..., proposal: _Optional[_Union[_session_pb2.ProposalTree, _Mapping]] = ...) -> None: ...
