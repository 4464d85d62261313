"""Owns the pace at which a smooth stream reaches its caller.

Speculation commits tokens in bursts, one a round. In a smooth stream the tokens of a burst go out one by one over the
time of a round, while the next round is under way. No token waits for longer than until the next burst is there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from router.events import Complete, Delta, Event

_RECENT_ROUNDS = 5

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


def release_times(arrived: float, num_tokens: int, round_s: float) -> list[float]:
    """When each token of a burst is due: the first at once, then evenly over the time of a round."""
    return [arrived + round_s * index / num_tokens for index in range(num_tokens)]


async def paced(
    events: AsyncGenerator[Event, None], clock: Clock, sleep: Sleep = asyncio.sleep
) -> AsyncGenerator[Event, None]:
    """The same tokens and text in the same order, one token a delta.

    What waits goes out at once when the next round's tokens are there, or when it has failed. Only at the end does the
    last burst keep its pace, and both sides are freed meanwhile. For a caller who reads slowly at most one round is
    done in advance.

    Args:
        events: deltas with pieces, then one Complete. Closed with this generator.
        clock: seconds, monotonic.
        sleep: for so many of these seconds.

    Raises:
        OutriderError: what `events` raises, behind all that came before it.
    """
    waiting: deque[tuple[float, Event]] = deque()
    recent: deque[float] = deque(maxlen=_RECENT_ROUNDS)
    arriving = asyncio.ensure_future(_next(events, clock))
    try:
        while True:
            while waiting and not await _comes_by(arriving, waiting[0][0] - clock(), sleep):
                yield waiting.popleft()[1]
            await asyncio.wait({arriving})
            while waiting and not _is_end(arriving):
                yield waiting.popleft()[1]
            arrival = arriving.result()
            if arrival.event is None:
                break
            waiting += _schedule(arrival.event, arrival, recent)
            arriving = asyncio.ensure_future(_next(events, clock))
        for due, event in waiting:
            await sleep(max(0.0, due - clock()))
            yield event
    finally:
        await _close(arriving, events)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What came: an event, or None at the end; at what time, and so many seconds after it was asked for."""

    event: Event | None
    at: float
    took_s: float


async def _next(events: AsyncGenerator[Event, None], clock: Clock) -> _Arrival:
    asked = clock()
    event = await anext(events, None)
    now = clock()
    return _Arrival(event, now, now - asked)


def _schedule(event: Event, arrival: _Arrival, recent: deque[float]) -> list[tuple[float, Event]]:
    """What there is to deliver, and when; notes in `recent` how long the round took.

    A round of one token needs no pace and is not noted: among those is the first, whose time is the prompt's.
    """
    pieces: tuple[Event, ...] = (event.pieces if isinstance(event, Delta) else ()) or (event,)
    if len(pieces) > 1:
        recent.append(arrival.took_s)
    round_s = median_low(recent) if recent else 0.0
    return list(zip(release_times(arrival.at, len(pieces), round_s), pieces, strict=True))


def _is_end(arrived: asyncio.Future[_Arrival]) -> bool:
    """Whether no token can follow what is waiting."""
    return arrived.exception() is None and isinstance(arrived.result().event, Complete | None)


async def _comes_by(arriving: asyncio.Future[_Arrival], seconds: float, sleep: Sleep) -> bool:
    """Waits for an arrival for at most so long; whether it came."""
    if seconds > 0.0 and not arriving.done():
        timer = asyncio.ensure_future(sleep(seconds))
        either: set[asyncio.Future[Any]] = {arriving, timer}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
    return arriving.done()


async def _close(arriving: asyncio.Future[_Arrival], events: AsyncGenerator[Event, None]) -> None:
    arriving.cancel()
    await asyncio.wait({arriving})
    if not arriving.cancelled():
        arriving.exception()  # seen: whoever closes a stream does not ask how it would have gone on
    await events.aclose()
