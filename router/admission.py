"""Owns how many requests run at once and how many may wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine.errors import DeadlineExceeded, Overloaded
from router.costs import MovingAverage

_MIN_RETRY_S, _MAX_RETRY_S = 0.5, 30.0


class Admission:
    """First come, first served.

    Args:
        max_concurrent: requests that run at once.
        max_queued: further requests that wait; more are refused.
        clock: seconds, monotonic.
    """

    def __init__(self, max_concurrent: int, max_queued: int, clock: Callable[[], float]) -> None:
        self._max_concurrent, self._max_queued, self._clock = max_concurrent, max_queued, clock
        self._places = asyncio.Semaphore(max_concurrent)
        self._duration = MovingAverage(1.0)
        self.running = 0
        self.queued = 0

    @asynccontextmanager
    async def place(self, patience_s: float = 0.0) -> AsyncIterator[None]:
        """A place for one request, as soon as one is free.

        Args:
            patience_s: longest wait in seconds; 0 waits for ever.

        Raises:
            Overloaded: max_queued requests wait already; says when a place may be free.
            DeadlineExceeded: none became free within patience_s.
        """
        if self._places.locked() and self.queued >= self._max_queued:
            what = f"{self.running} requests are running and {self.queued} are waiting"
            raise Overloaded(what, self._retry_after_s())
        self.queued += 1
        try:
            async with asyncio.timeout(patience_s or None):
                await self._places.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"no place became free within {patience_s:.3f} s") from None
        finally:
            self.queued -= 1
        began = self._clock()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._duration.add(self._clock() - began)
            self._places.release()

    def _retry_after_s(self) -> float:
        """When everything that waits now will have had its turn, by how long requests have taken lately."""
        turns = (self.queued + 1) / self._max_concurrent
        return min(max(turns * self._duration.value, _MIN_RETRY_S), _MAX_RETRY_S)
