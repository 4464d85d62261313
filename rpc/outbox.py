"""Owns what is to be sent on one stream: coalesces all that is there into one frame, and bounds what may wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

from engine.errors import Overloaded

MAX_MESSAGE_BYTES = 64 << 20
MAX_FRAME_BYTES = 4 << 20
MAX_WAITING_BYTES = 128 << 20

MessageT = TypeVar("MessageT", bound=Message)


class Outbox(Generic[MessageT]):
    """Messages wait here while the frame before them is being written, and leave together.

    Args:
        max_waiting_bytes: how much may wait for a peer that does not read.
    """

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._waiting: deque[tuple[MessageT, int]] = deque()
        self._waiting_bytes, self._max_waiting_bytes = 0, max_waiting_bytes
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, message: MessageT) -> None:
        """Queues a message; after `close`, drops it. Raises Overloaded when the peer has stopped reading."""
        if self._closed:
            return
        size = message.ByteSize()
        if self._waiting_bytes + size > self._max_waiting_bytes:
            raise Overloaded(f"the peer does not read: {self._waiting_bytes} bytes are waiting for it", 1.0)
        self._waiting.append((message, size))
        self._waiting_bytes += size
        self._changed.set()

    def close(self) -> None:
        """Ends `frames` once what is queued was taken."""
        self._closed = True
        self._changed.set()

    def discard(self) -> None:
        """Drops what is queued and ends `frames`; a frame already taken is still the taker's to write."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self.close()

    async def frames(self) -> AsyncIterator[list[MessageT]]:
        """Everything queued since the last frame, cut at MAX_FRAME_BYTES, each time there is anything."""
        while True:
            await self._changed.wait()
            if self._waiting:
                yield self._take_frame()
            elif self._closed:
                return
            else:
                self._changed.clear()

    def _take_frame(self) -> list[MessageT]:
        frame: list[MessageT] = []
        frame_bytes = 0
        while self._waiting and (not frame or frame_bytes + self._waiting[0][1] <= MAX_FRAME_BYTES):
            message, size = self._waiting.popleft()
            frame.append(message)
            frame_bytes += size
        self._waiting_bytes -= frame_bytes
        return frame
