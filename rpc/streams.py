"""Owns the server's side of one router's stream: its sessions, what each waits for, and how all of them end with it.

Session ids in messages count per stream; here they are mapped to the engine's. Whatever ends the stream (a cancel
looks like a normal end to the reader) closes every session it still holds.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from engine.errors import InvalidArgument, OutriderError, Overloaded, UnknownSession
from engine.loop import Command, EngineLoop
from engine.ports import Engine
from rpc.errors import encode_failure
from rpc.outbox import MAX_WAITING_BYTES, MessageT, Outbox
from rpc.pb import session_pb2 as pb
from rpc.round_spans import RoundSpans

MAX_BACKLOG = 16_384  # commands of one stream that may wait for the engine
_REQUESTS_PER_TURN = 256  # of one frame that are read before other streams have their turn

EngineT = TypeVar("EngineT", bound=Engine)
OutputT = TypeVar("OutputT")


class ServedSession(Generic[OutputT, MessageT]):
    """One session of one stream, as the engine loop's subscriber."""

    def __init__(self, stream: RouterStream[Any, OutputT, MessageT], number: int) -> None:
        self._stream, self.number = stream, number
        self.engine_session = 0
        self.num_outputs = 0
        self.spans = RoundSpans()
        self.deadline: asyncio.TimerHandle | None = None

    def on_output(self, output: OutputT) -> None:
        self._stream.send(self._stream.encode_output(self, output))
        self.num_outputs += 1

    def on_failed(self, error: OutriderError) -> None:
        self.forget()
        self._stream.send(self._stream.reply(failed=encode_failure(self.number, error)))

    def on_closed(self) -> None:
        self.forget()
        self._stream.send(self._stream.reply(closed=pb.SessionClosed(session=self.number)))

    def forget(self) -> None:
        """Leaves no timer and no open span behind."""
        if self.deadline is not None:
            self.deadline.cancel()
        self.spans.end_all()
        self._stream.sessions.pop(self.number, None)


class RouterStream(ABC, Generic[EngineT, OutputT, MessageT]):
    """One stream from its first message to its end. Subclasses know the messages of their service.

    Args:
        loop: the engine behind it.
        max_waiting_bytes: replies that may wait for a router that does not read, before its stream is ended.
    """

    def __init__(self, loop: EngineLoop[EngineT, OutputT], max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.loop = loop
        self.sessions: dict[int, ServedSession[OutputT, MessageT]] = {}
        self._outbox: Outbox[MessageT] = Outbox(max_waiting_bytes)
        self._reader: asyncio.Task[None] | None = None
        self._overflow: Overloaded | None = None
        self._posted: deque[int] = deque()  # numbers of its commands that may still wait for the engine

    @abstractmethod
    def reply(self, **kind: Any) -> MessageT:
        """A reply message holding `kind`: the output, `closed` or `failed`."""

    @abstractmethod
    def frame(self, replies: list[MessageT]) -> Any:
        """The frame that carries `replies`."""

    @abstractmethod
    def encode_output(self, session: ServedSession[OutputT, MessageT], output: OutputT) -> MessageT:
        """The reply for an output; ends the span of its round."""

    @abstractmethod
    def command_of(self, session: ServedSession[OutputT, MessageT], kind: str, request: Any) -> Command[EngineT]:
        """The engine command for any request but `close`. Raises InvalidArgument; begins the span of the round."""

    async def run(self, frames: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Serves the stream to its end. Raises what the router did wrong, if that ended it."""
        self._reader = asyncio.create_task(self._read(frames))
        try:
            async for replies in self._outbox.frames():
                await context.write(self.frame(replies))
            if self._overflow is not None:
                raise self._overflow
            await self._reader
        finally:
            self._reader.cancel()
            self._close_sessions()

    def send(self, reply: MessageT) -> None:
        """Queues a reply. A router that has stopped reading loses its sessions now, and hears so once it reads."""
        try:
            self._outbox.put(reply)
        except Overloaded as error:
            self._overflow = error
            self._outbox.discard()
            if self._reader is not None:
                self._reader.cancel()
            self._close_sessions()

    async def _read(self, frames: AsyncIterator[Any]) -> None:
        try:
            async for frame in frames:
                for count, request in enumerate(frame.requests, start=1):
                    self._receive(request)
                    if (backlog := self._backlog()) > MAX_BACKLOG:
                        raise Overloaded(f"{backlog} commands wait for the engine", 1.0)
                    if count % _REQUESTS_PER_TURN == 0:
                        await asyncio.sleep(0)
        except DecodeError:
            raise InvalidArgument(
                "requests", "bytes that are no message", "a frame of this service's requests"
            ) from None
        finally:
            self._outbox.close()

    def _backlog(self) -> int:
        """Commands of this stream that the engine has not applied yet. Those of others are not its fault."""
        applied = self.loop.num_posted - self.loop.backlog
        while self._posted and self._posted[0] <= applied:
            self._posted.popleft()
        return len(self._posted)

    def _receive(self, request: Any) -> None:
        kind = request.WhichOneof("request")
        if kind is None:
            raise InvalidArgument("requests", "an empty request", "open, close or a request for an open session")
        message = getattr(request, kind)
        if kind == "open":
            self._open(message)
        elif (session := self.sessions.get(message.session)) is not None:
            self._forward(session, kind, message)
        elif kind == "close":
            self.send(self.reply(closed=pb.SessionClosed(session=message.session)))
        else:
            error = UnknownSession(f"session {message.session} is not open on this stream")
            self.send(self.reply(failed=encode_failure(message.session, error)))

    def _open(self, message: Any) -> None:
        if message.session in self.sessions:
            raise InvalidArgument("open.session", message.session, "an id that is not in use on this stream")
        session: ServedSession[OutputT, MessageT] = ServedSession(self, message.session)
        try:
            command = self.command_of(session, "open", message)
        except InvalidArgument as error:
            session.on_failed(error)
            return
        self.sessions[session.number] = session
        session.engine_session = self.loop.open(command, session)
        self._posted.append(self.loop.num_posted)

    def _forward(self, session: ServedSession[OutputT, MessageT], kind: str, message: Any) -> None:
        if kind == "close":
            self.loop.close_session(session.engine_session)
        else:
            self._post(session, kind, message)
        self._posted.append(self.loop.num_posted)

    def _post(self, session: ServedSession[OutputT, MessageT], kind: str, message: Any) -> None:
        try:
            command = self.command_of(session, kind, message)
        except InvalidArgument as error:
            self.loop.close_session(session.engine_session, error)
        else:
            self.loop.post(session.engine_session, command)

    def _close_sessions(self) -> None:
        for session in list(self.sessions.values()):
            session.forget()
            self.loop.close_session(session.engine_session)
        self._outbox.close()
