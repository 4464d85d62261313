"""A smooth stream in virtual time: everything arrives, in order, evenly, and never later than it must."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineFault
from router.acceptance import SpeculationTotals
from router.events import Complete, Delta, Event, Timing, Usage
from router.pacing import paced, release_times

END = Complete("length", None, Usage(1, 2, 0), SpeculationTotals(), Timing(0, 0, 0, 0, 0, 0))
Burst = tuple[float, int | Event | Exception]


class VirtualTime:
    """Seconds that pass when everybody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        awake = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._order), awake))
        await awake

    async def run(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            while self._sleepers and self._sleepers[0][2].done():
                heapq.heappop(self._sleepers)
            if not task.done() and self._sleepers:
                self.now, _, awake = heapq.heappop(self._sleepers)
                awake.set_result(None)
        return task.result()


class Rounds:
    """Bursts of tokens, each so many seconds after it was asked for; then END, unless an error comes before."""

    def __init__(self, time: VirtualTime, bursts: list[Burst]) -> None:
        self._time, self._bursts = time, bursts
        self.arrived: list[float] = []
        self.closed_at: float | None = None

    async def events(self) -> AsyncGenerator[Event, None]:
        token = 0
        try:
            for seconds, burst in self._bursts:
                await self._time.sleep(seconds)
                if isinstance(burst, Exception):
                    raise burst
                ids = range(token, token := token + burst)
                self.arrived += [self._time.now] * burst
                pieces = tuple(Delta(f"{i} ", (i,)) for i in ids)
                yield Delta("".join(f"{i} " for i in ids), tuple(ids), pieces)
            yield END
        finally:
            self.closed_at = self._time.now


async def read(time: VirtualTime, rounds: Rounds, pause_s: float = 0.0) -> list[tuple[float, Event]]:
    seen: list[tuple[float, Event]] = []
    async for event in paced(rounds.events(), time.clock, time.sleep):
        seen.append((time.now, event))
        if pause_s:
            await time.sleep(pause_s)
    return seen


def test_the_first_token_of_a_burst_is_due_at_once_and_the_rest_evenly() -> None:
    assert release_times(2.0, 4, 1.0) == [2.0, 2.25, 2.5, 2.75]
    assert release_times(2.0, 1, 1.0) == [2.0]
    assert release_times(2.0, 3, 0.0) == [2.0, 2.0, 2.0]


async def test_tokens_come_evenly_over_a_round_and_the_end_behind_the_last() -> None:
    time = VirtualTime()
    seen = await time.run(read(time, Rounds(time, [(5.0, 1), (1.0, 4), (1.0, 2), (1.0, 4)])))
    times = [at for at, _ in seen]
    assert times == pytest.approx([5.0, 6.0, 6.25, 6.5, 6.75, 7.0, 7.5, 8.0, 8.25, 8.5, 8.75, 8.75])
    assert seen[-1][1] == END


async def test_what_waits_goes_out_when_the_next_round_is_there() -> None:
    time = VirtualTime()
    seen = await time.run(read(time, Rounds(time, [(1.0, 1), (1.0, 2), (1.0, 2), (0.25, 4), (0.25, 1)])))
    assert [at for at, _ in seen][3:] == pytest.approx([3.0, 3.25, 3.25, 3.5, 3.5, 3.5, 3.5, 3.5])


async def test_one_slow_round_does_not_slow_the_next_ones_down() -> None:
    time = VirtualTime()
    rounds: list[Burst] = [(1.0, 1), (1.0, 2), (1.0, 2), (60.0, 2), (1.0, 2)]
    seen = await time.run(read(time, Rounds(time, rounds)))
    assert [at for at, _ in seen][-3:] == pytest.approx([64.0, 64.5, 64.5])


async def test_an_error_comes_at_once_behind_all_that_came_before_it() -> None:
    time, seen = VirtualTime(), []
    rounds = Rounds(time, [(1.0, 1), (1.0, 4), (0.1, EngineFault("NaN"))])

    async def consume() -> None:
        async for event in paced(rounds.events(), time.clock, time.sleep):
            seen.append(event.token_ids)

    with pytest.raises(EngineFault, match="NaN"):
        await time.run(consume())
    assert seen == [(0,), (1,), (2,), (3,), (4,)]
    assert time.now == pytest.approx(2.1)


async def test_both_sides_are_freed_while_the_last_burst_keeps_its_pace() -> None:
    time = VirtualTime()
    rounds = Rounds(time, [(1.0, 1), (1.0, 4)])
    seen = await time.run(read(time, rounds))
    assert rounds.closed_at == pytest.approx(2.0)
    assert seen[-1] == (pytest.approx(2.75), END)


@pytest.mark.parametrize("num_events", [0, 1, 2, 3, 5])
async def test_closed_by_its_reader_it_closes_the_session(num_events: int) -> None:
    time = VirtualTime()
    rounds = Rounds(time, [(1.0, 1), (1.0, 4), (1.0, 4)])

    async def consume() -> None:
        events = paced(rounds.events(), time.clock, time.sleep)
        for _ in range(num_events):
            await anext(events)
        await events.aclose()

    await time.run(consume())
    assert (rounds.closed_at is None) == (num_events == 0)


@pytest.mark.parametrize("steps", range(0, 120, 7))
async def test_cancelled_anywhere_it_closes_the_session_at_once(steps: int) -> None:
    time = VirtualTime()
    rounds = Rounds(time, [(1.0, 1), (1.0, 4), (1.0, 4)])
    reading = asyncio.ensure_future(read(time, rounds))
    driving = asyncio.ensure_future(time.run(reading))
    for _ in range(steps):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert rounds.closed_at is not None or not rounds.arrived
    with pytest.raises(asyncio.CancelledError):
        await driving


async def test_for_a_slow_reader_at_most_one_round_is_done_in_advance() -> None:
    time = VirtualTime()
    rounds = Rounds(time, [(1.0, 1), *[(1.0, 3)] * 10])
    events = paced(rounds.events(), time.clock, time.sleep)

    async def linger() -> None:
        await anext(events)
        await anext(events)
        await time.sleep(100.0)

    await time.run(linger())
    assert len(rounds.arrived) == 1 + 3 + 3
    await time.run(events.aclose())


@given(
    bursts=st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 8)), min_size=1, max_size=12),
    pause_s=st.sampled_from([0.0, 0.0, 0.3]),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_reordered_or_held_past_the_next_round(bursts: list[Burst], pause_s: float) -> None:
    async def check() -> None:
        time = VirtualTime()
        rounds = Rounds(time, list(bursts))
        seen = await time.run(read(time, rounds, pause_s))
        assert seen[-1][1] == END
        assert [event.token_ids for _, event in seen[:-1]] == [(i,) for i in range(len(rounds.arrived))]
        if not pause_s:
            for (at, _), arrived in zip(seen, rounds.arrived, strict=False):
                later = [other for other in rounds.arrived if other > arrived]
                assert arrived <= at <= (later[0] if later else arrived + max(s for s, _ in bursts)) + 1e-9

    asyncio.run(check())
