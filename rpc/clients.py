"""Owns TargetClient and DraftClient: router.ports' TargetPort and DraftPort over gRPC."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from google.protobuf.message import Message

from engine.info import EngineInfo
from engine.proposal import EarlyProposals, Proposal, RunAhead, State, Verdict
from engine.sampling import SamplingParams, StopParams
from rpc import codecs
from rpc.connections import Connection, Peer, RemoteSession
from rpc.pb import drafting_pb2, drafting_pb2_grpc, session_pb2, verification_pb2, verification_pb2_grpc
from rpc.security import MutualTls, Role

CONNECT_TIMEOUT_S = 5.0


class _Client(ABC):
    """What both clients share. Made by `connect`, on the event loop that uses it."""

    def __init__(self, peer: Peer, info: EngineInfo) -> None:
        self._peer, self._info = peer, info

    @staticmethod
    @abstractmethod
    def _peer_at(address: str, tls: MutualTls | None) -> Peer:
        """The peer at `address`, which speaks this client's service."""

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        tls: MutualTls | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Self:
        """Connects to host:port, over TLS with `tls`, and fetches the peer's info.

        Raises:
            Unavailable, DeadlineExceeded, PermissionDenied.
        """
        peer = cls._peer_at(address, tls)
        try:
            return cls(peer, await peer.fetch_info(timeout_s))
        except BaseException:
            await peer.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """The peer's info when it was last fetched."""
        return self._info

    @property
    def address(self) -> str:
        return self._peer.address

    async def refresh(self, timeout_s: float = CONNECT_TIMEOUT_S) -> EngineInfo:
        """Fetches the info anew. Raises Unavailable or DeadlineExceeded."""
        self._info = await self._peer.fetch_info(timeout_s)
        return self._info

    async def close(self) -> None:
        """Ends the stream, and with it all sessions still open on it. Idempotent."""
        await self._peer.close()


class RemoteTargetSession(RemoteSession[Verdict]):
    """router.ports.TargetSession over a connection."""

    def __init__(self, connection: Connection, number: int) -> None:
        super().__init__(connection, number)
        self._cached_tokens = 0

    @property
    def cached_tokens(self) -> int:
        return self._cached_tokens

    def propose(self, proposal: Proposal, *, traceparent: str = "") -> None:
        message = verification_pb2.Propose(
            session=self._number, proposal=codecs.encode_proposal(proposal), traceparent=traceparent
        )
        self._send(verification_pb2.VerificationRequest(propose=message))

    def propose_early(self, early: EarlyProposals) -> None:
        self._send(verification_pb2.VerificationRequest(early=codecs.encode_early(self._number, early)))

    def decode(self, max_tokens: int, *, traceparent: str = "") -> None:
        message = verification_pb2.Decode(session=self._number, max_tokens=max_tokens, traceparent=traceparent)
        self._send(verification_pb2.VerificationRequest(decode=message))

    async def verdict(self) -> Verdict:
        return await self._next()

    def decode_output(self, reply: Any) -> Verdict:
        self._cached_tokens = max(self._cached_tokens, reply.cached_tokens)
        return codecs.decode_verdict(reply)

    def close_request(self, close: session_pb2.CloseSession) -> Message:
        return verification_pb2.VerificationRequest(close=close)


class TargetClient(_Client):
    """router.ports.TargetPort: verification by the target at one address."""

    @staticmethod
    def _peer_at(address: str, tls: MutualTls | None) -> Peer:
        def frame_of(requests: list[Any]) -> Message:
            return verification_pb2.VerificationRequests(requests=requests)

        peer_tls = None if tls is None else tls.towards(Role.TARGET)
        return Peer(address, verification_pb2_grpc.VerificationStub, frame_of, peer_tls)

    def open(
        self,
        prompt: Sequence[int],
        committed: Sequence[int],
        sampling: SamplingParams,
        stops: StopParams,
        *,
        deadline_s: float = 0.0,
        traceparent: str = "",
    ) -> RemoteTargetSession:
        """Sends the request at once; what comes of it, even that nobody is there, `verdict()` says."""
        connection, number = self._peer.connection(), self._peer.next_session()
        message = verification_pb2.OpenTarget(
            session=number,
            prompt_token_ids=prompt,
            committed_token_ids=committed,
            sampling=codecs.encode_sampling(sampling),
            stops=codecs.encode_stops(stops),
            traceparent=traceparent,
            deadline_s=deadline_s,
        )
        session = RemoteTargetSession(connection, number)
        connection.start(session, number, verification_pb2.VerificationRequest(open=message))
        return session


class RemoteDraftSession(RemoteSession[Proposal]):
    """router.ports.DraftSession over a connection."""

    def __init__(self, connection: Connection, number: int, on_early: Callable[[EarlyProposals], None]) -> None:
        super().__init__(connection, number)
        self._on_early = on_early

    def advance(
        self,
        base: State,
        tail: Sequence[int],
        num_speculative_tokens: int,
        *,
        confidence_threshold: float = 0.0,
        run_ahead: RunAhead | None = None,
        traceparent: str = "",
    ) -> None:
        message = drafting_pb2.Advance(
            session=self._number,
            base=codecs.encode_state(base),
            tail=tail,
            num_speculative_tokens=num_speculative_tokens,
            confidence_threshold=confidence_threshold,
            traceparent=traceparent,
            run_ahead=codecs.encode_run_ahead(run_ahead),
        )
        self._send(drafting_pb2.DraftRequest(advance=message))

    async def proposal(self) -> Proposal:
        return await self._next()

    def receive(self, kind: str, message: Any) -> None:
        if kind == "early":
            self._on_early(codecs.decode_early(message))
        else:
            super().receive(kind, message)

    def decode_output(self, reply: Any) -> Proposal:
        codecs.require(reply, "proposal", "proposal")
        return codecs.decode_proposal(reply.proposal)

    def close_request(self, close: session_pb2.CloseSession) -> Message:
        return drafting_pb2.DraftRequest(close=close)


class DraftClient(_Client):
    """router.ports.DraftPort: proposals from the draft at one address."""

    @staticmethod
    def _peer_at(address: str, tls: MutualTls | None) -> Peer:
        def frame_of(requests: list[Any]) -> Message:
            return drafting_pb2.DraftRequests(requests=requests)

        peer_tls = None if tls is None else tls.towards(Role.DRAFT)
        return Peer(address, drafting_pb2_grpc.DraftingStub, frame_of, peer_tls)

    def open(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        on_early: Callable[[EarlyProposals], None],
        traceparent: str = "",
    ) -> RemoteDraftSession:
        """Sends the request at once; what comes of it `proposal()` says."""
        connection, number = self._peer.connection(), self._peer.next_session()
        message = drafting_pb2.OpenDraft(
            session=number,
            prompt_token_ids=prompt,
            sampling=codecs.encode_sampling(sampling),
            traceparent=traceparent,
        )
        session = RemoteDraftSession(connection, number, on_early)
        connection.start(session, number, drafting_pb2.DraftRequest(open=message))
        return session
