"""Owns what happens to a caller that does not read.

Nothing is buffered for it here: the next event is only made when the transport has taken the last one, and the
transport takes so much and no more (HTTP/2 windows of the caller, of HAProxy and of gRPC). So a caller that stops
reading stops its own session; this module bounds for how long it may keep the session, and with it KV blocks and a
place among those that run.

It does not end the call, for a server on grpc.aio cannot. The status waits behind the message that nobody takes:
`abort` from another task returns when the caller has read on, and not before. A task that serves a call and is
cancelled leaves the call without any status. What would reset the stream, `cancel` of gRPC's core, grpc.aio gives to
clients only; and Serve hands us a copy of the context, so that under it there is nothing to abort. What ends the call
is HAProxy, once its `timeout client` has passed without a byte taken. A stream that is silent because nothing is there
to take outlasts that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress

from engine.errors import SlowReader
from router.events import Event

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]

_RETRY_S = 1.0


async def cut_off_slow_reader(
    events: AsyncGenerator[Event, None], limit_s: float, clock: Clock, sleep: Sleep = asyncio.sleep
) -> AsyncGenerator[Event, None]:
    """The same events. One that nobody takes for `limit_s` ends `events` with SlowReader, which frees what they hold.

    Whoever reads on after that gets what is on its way already, and is told then. Whoever never does leaves a call
    without a session open until HAProxy ends it; how many of those it may have is for `router.access` to say.

    Args:
        events: closed with this generator.
        limit_s: seconds that one event may wait to be taken.
        clock: seconds, monotonic.
        sleep: for so many of these seconds.

    Raises:
        SlowReader: the caller came back too late.
        OutriderError: what `events` raises.
    """
    delivery = _Delivery(events, limit_s, clock)
    watching = asyncio.create_task(_watch(delivery, sleep))
    try:
        async with aclosing(events):
            async for event in events:
                delivery.waits_since = clock()
                try:
                    yield event
                finally:
                    await delivery.over()
                delivery.check()
    finally:
        watching.cancel()


class _Delivery:
    """One event at a time on its way to the caller.

    Attributes:
        waits_since: when it was handed over; infinite while none waits to be taken.
    """

    def __init__(self, events: AsyncGenerator[Event, None], limit_s: float, clock: Clock) -> None:
        self._events, self.limit_s, self._clock = events, limit_s, clock
        self.waits_since = math.inf
        self._cutting: asyncio.Task[None] | None = None

    @property
    def patience_s(self) -> float:
        """Seconds that are left to the event that waits; all of them if none does."""
        return self.limit_s - max(0.0, self._clock() - self.waits_since)

    def cut(self) -> None:
        """Ends `events`, which stands still for as long as its last event waits to be taken."""
        self._cutting = asyncio.create_task(self._end(self._fault()))

    async def over(self) -> None:
        """The event was taken, or never will be. Returns when `events` is not being ended any more."""
        self.waits_since = math.inf
        if self._cutting is not None:
            await asyncio.wait({self._cutting})

    def check(self) -> None:
        """Raises SlowReader if `events` was ended."""
        if self._cutting is not None:
            self._cutting.result()
            raise self._fault()

    async def _end(self, fault: SlowReader) -> None:
        with suppress(SlowReader):
            await self._events.athrow(fault)

    def _fault(self) -> SlowReader:
        return SlowReader(f"the caller read nothing for {self.limit_s:g} s", _RETRY_S)


async def _watch(delivery: _Delivery, sleep: Sleep) -> None:
    while (patience_s := delivery.patience_s) > 0.0:
        await sleep(patience_s)
    delivery.cut()
