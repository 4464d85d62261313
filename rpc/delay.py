"""Owns an emulated network: frames of a server's streams pass a fixed time later, in order, many under way at once.

It is an interceptor that only an emulated replica gives its server; without one nothing of this is on the way.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
import grpc.aio

from engine.waiting import wait_until

ThingT = TypeVar("ThingT")


class Line(Protocol):
    """Calls back later; calls come in the order in which they were asked for."""

    def call_later(self, deliver: Callable[[], None]) -> None: ...


class DelayLine:
    """A Line with the same delay for everything, on a thread of its own: asyncio's timers are coarse as milliseconds.

    Args:
        delay_s: seconds.
        loop: calls come there.
    """

    def __init__(self, delay_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._delay_s, self._loop = delay_s, loop
        self._under_way: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="delay", daemon=True)
        self._thread.start()

    def call_later(self, deliver: Callable[[], None]) -> None:
        self._under_way.put((time.perf_counter() + self._delay_s, deliver))

    def close(self) -> None:
        """Returns once all that is under way has been passed on."""
        self._under_way.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (each := self._under_way.get()) is not None:
            due_at, deliver = each
            wait_until(due_at)
            try:
                self._loop.call_soon_threadsafe(deliver)
            except RuntimeError:
                return  # the event loop has ended, and with it everybody who waits


class _Pipe(Generic[ThingT]):
    """Things go in now and come out after the line's delay."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._arrived: asyncio.Queue[ThingT] = asyncio.Queue()

    def put(self, thing: ThingT) -> None:
        self._line.call_later(lambda: self._arrived.put_nowait(thing))

    async def get(self) -> ThingT:
        return await self._arrived.get()


class _DelayedContext:
    """A call's context whose `write` returns at once; frames are written when they have passed the line."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], line: Line) -> None:
        self._context = context
        self._frames: _Pipe[Any] = _Pipe(line)
        self._writing = asyncio.create_task(self._write_each())
        self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # `serve` may not ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, frame: Any) -> None:
        if self._writing.done():
            await self._writing  # raises what ended it
        self._frames.put(frame)

    async def finish(self) -> None:
        """Returns once every frame has been written."""
        self._frames.put(None)
        await self._writing

    def cancel(self) -> None:
        self._writing.cancel()

    async def _write_each(self) -> None:
        while (frame := await self._frames.get()) is not None:
            await self._context.write(frame)


async def _delayed(frames: AsyncIterator[Any], line: Line) -> AsyncIterator[Any]:
    """The frames, each when it has passed the line; so does the end, or the error that ends them."""
    pipe: _Pipe[tuple[Any, BaseException | None]] = _Pipe(line)

    async def read() -> None:
        try:
            async for frame in frames:
                pipe.put((frame, None))
            pipe.put((None, None))
        except Exception as error:
            pipe.put((None, error))

    reading = asyncio.create_task(read())
    try:
        while True:
            frame, error = await pipe.get()
            if error is not None:
                raise error
            if frame is None:
                return
            yield frame
    finally:
        reading.cancel()


class DelayInterceptor(grpc.aio.ServerInterceptor):
    """Puts a line into both directions of every bidirectional stream; other calls pass as they are."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or not (handler.request_streaming and handler.response_streaming):
            return handler
        line, serve = self._line, cast(Callable[..., Awaitable[None]], handler.stream_stream)

        async def delayed(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
            far = _DelayedContext(context, line)
            try:
                await serve(_delayed(frames, line), far)
                await far.finish()
            finally:
                far.cancel()

        made: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            delayed, handler.request_deserializer, handler.response_serializer
        )
        return made
