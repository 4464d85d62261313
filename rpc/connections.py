"""Owns the router's side of a stream: one lazily made bidi stream per peer, and its sessions.

All requests made in one turn of the event loop leave in one frame. A stream that breaks fails its sessions with
Unavailable; the next `open` makes a new one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc.aio
from google.protobuf.message import Message

from engine.errors import InvalidArgument, OutriderError, Overloaded, Unavailable, UnknownSession
from engine.info import EngineInfo
from rpc import codecs
from rpc.errors import decode_failure, error_of_call
from rpc.outbox import MAX_MESSAGE_BYTES, Outbox
from rpc.pb import session_pb2
from rpc.security import PeerTls

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a replica that restarts is back within seconds
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_RETIRED_S = 10.0  # more than any call but a stream takes
_ENVELOPE_BYTES = 1 << 10  # what a frame adds to the one request in it, generously

OutputT = TypeVar("OutputT")


class RemoteSession(ABC, Generic[OutputT]):
    """One session on a peer: requests go out at once, outputs wait in order until somebody takes them."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number
        self._arrived: asyncio.Queue[OutputT | OutriderError] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._closing = False

    @abstractmethod
    def decode_output(self, reply: Any) -> OutputT:
        """The output in a reply that is neither `closed` nor `failed`."""

    @abstractmethod
    def close_request(self, close: session_pb2.CloseSession) -> Message:
        """The request that carries `close`."""

    async def close(self) -> None:
        """Frees the session at the peer; returns once the peer has acknowledged or is gone. Idempotent."""
        if not self._closing:
            self._closing = True
            self._send(self.close_request(session_pb2.CloseSession(session=self._number)))
        await self._gone.wait()

    def receive(self, kind: str, message: Any) -> None:
        """Takes one reply for this session."""
        if kind == "closed":
            self.end(UnknownSession("the session is closed"))
        elif kind == "failed":
            self.end(decode_failure(message))
        else:
            self._arrived.put_nowait(self.decode_output(message))

    def end(self, error: OutriderError) -> None:
        """The session is gone at the peer; whoever waits for an output learns why."""
        self._connection.sessions.pop(self._number, None)
        self._gone.set()
        self._arrived.put_nowait(error)

    def _send(self, request: Message) -> None:
        if not self._gone.is_set():
            self._connection.send(request)

    async def _next(self) -> OutputT:
        arrived = await self._arrived.get()
        if isinstance(arrived, OutriderError):
            self._arrived.put_nowait(arrived)  # whoever asks again gets the same answer
            raise arrived
        return arrived


class Connection:
    """One live stream and the sessions on it.

    Args:
        peer: what messages call the other side.
        call: the open bidi call.
        frame_of: makes a frame of a list of requests.
    """

    def __init__(self, peer: str, call: Any, frame_of: Callable[[list[Message]], Message]) -> None:
        self._peer, self._call, self._frame_of = peer, call, frame_of
        self.sessions: dict[int, RemoteSession[Any]] = {}
        self.alive = True
        self._outbox: Outbox[Message] = Outbox()
        self._task = asyncio.create_task(self._run())

    def start(self, session: RemoteSession[Any], number: int, request: Message) -> None:
        """Registers a session and sends the request that opens it; one too large for a frame fails it alone."""
        self.sessions[number] = session
        if (size := request.ByteSize()) > MAX_MESSAGE_BYTES - _ENVELOPE_BYTES:
            limit = f"at most {MAX_MESSAGE_BYTES - _ENVELOPE_BYTES} bytes"
            session.end(InvalidArgument("prompt_token_ids", f"a message of {size} bytes", limit))
            return
        self.send(request)

    def send(self, request: Message) -> None:
        """Queues a request for the frame that leaves with the next turn of the event loop."""
        try:
            self._outbox.put(request)
        except Overloaded as error:  # the peer reads nothing any more: as good as gone
            self._break(Unavailable(f"{self._peer}: {error}"))
            self._call.cancel()

    async def close(self) -> None:
        """Ends the stream, whereupon the peer closes what is still open on it."""
        self._call.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        writer = asyncio.create_task(self._write())
        error: OutriderError = Unavailable(f"the stream to {self._peer} was closed")
        try:
            async for frame in self._call:
                for reply in frame.replies:
                    self._dispatch(reply)
        except grpc.aio.AioRpcError as broken:
            error = Unavailable(f"the stream to {self._peer} broke: {error_of_call(broken)}")
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
        finally:
            self._break(error)
            writer.cancel()
            await asyncio.wait([writer])

    async def _write(self) -> None:
        async for requests in self._outbox.frames():
            try:
                await self._call.write(self._frame_of(requests))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the stream has ended; reading it tells why

    def _dispatch(self, reply: Any) -> None:
        kind = reply.WhichOneof("reply")
        if kind is None:
            return  # a kind this version does not know
        message = getattr(reply, kind)
        session = self.sessions.get(message.session)
        if session is None:
            return  # crossed with its end
        try:
            session.receive(kind, message)
        except InvalidArgument as error:
            session.end(Unavailable(f"{self._peer} sent what cannot be read: {error}"))

    def _break(self, error: OutriderError) -> None:
        self.alive = False
        self._outbox.close()
        for session in list(self.sessions.values()):
            session.end(error)


class Peer:
    """A draft or target as a router sees it: its channel, its info, its one stream.

    Args:
        address: host:port.
        stub_of: makes the service's stub for a channel.
        frame_of: makes a request frame.
        tls: how it is called; plaintext without.
    """

    def __init__(
        self,
        address: str,
        stub_of: Callable[[grpc.aio.Channel], Any],
        frame_of: Callable[[list[Message]], Message],
        tls: PeerTls | None,
    ) -> None:
        self.address = address
        self._stub_of, self._frame_of, self._tls = stub_of, frame_of, tls
        self._connection: Connection | None = None
        self._last_session = 0
        self._retired: asyncio.Task[None] | None = None
        self._dial()

    def _dial(self) -> None:
        if self._tls is None:
            self._channel = grpc.aio.insecure_channel(self.address, _OPTIONS)
        else:
            self._certificate = self._tls.certificate()
            self._channel = self._tls.channel(self.address, self._certificate, _OPTIONS)
        self._stub = self._stub_of(self._channel)

    def _current_stub(self) -> Any:
        """The stub; over a new channel if the certificate was renewed, once no stream is on the old one."""
        if self._tls is not None and not self._has_stream() and self._tls.certificate() is not self._certificate:
            self._retired = asyncio.create_task(self._channel.close(grace=_RETIRED_S))
            self._dial()
        return self._stub

    def _has_stream(self) -> bool:
        return self._connection is not None and self._connection.alive

    async def fetch_info(self, timeout_s: float) -> EngineInfo:
        """Asks the peer. Raises Unavailable, DeadlineExceeded or PermissionDenied."""
        stub = self._current_stub()
        try:
            return codecs.decode_info(await stub.GetInfo(session_pb2.EngineInfoRequest(), timeout=timeout_s))
        except grpc.aio.AioRpcError as failed:
            error = error_of_call(failed)
            if self._tls is not None and isinstance(error, Unavailable):
                error = Unavailable(f"{error}; called {self._tls.describe(self._certificate)}")
            raise error from None

    def connection(self) -> Connection:
        """The live stream, made anew if there is none."""
        if self._connection is None or not self._connection.alive:
            self._connection = Connection(self.address, self._current_stub().Stream(), self._frame_of)
        return self._connection

    def next_session(self) -> int:
        self._last_session += 1
        return self._last_session

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self._retired is not None:
            await self._retired
        await self._channel.close()
