"""A pool hands out what discovery has seen since it was last lost, and lets callers wait for it."""

from __future__ import annotations

import asyncio
import math

import pytest

from engine.errors import DeadlineExceeded, Unavailable
from router.peers import PeerSet, Pool


class Looks:
    """Counts how often discovery was asked to look."""

    def __init__(self, pool: Pool[str]) -> None:
        self.count = 0
        pool.look = self._look

    def _look(self) -> None:
        self.count += 1


def test_a_lost_replica_is_not_picked_before_it_was_seen_anew() -> None:
    pool: Pool[str] = Pool()
    looks = Looks(pool)
    pool.replace({"a": "port a", "b": "port b"})
    pool.lose("a", "port a")
    assert looks.count == 1
    assert [pool.pick(), pool.pick_near(5), pool.any()] == [("b", "port b"), ("b", "port b"), "port b"]
    pool.lose("b", "port b")
    assert [pool.pick(), pool.pick_near(5), pool.any()] == [None, None, None]
    pool.replace({"a": "port a"})
    assert pool.pick() == ("a", "port a")


def test_whoever_is_late_to_lose_a_replica_does_not_take_its_successor() -> None:
    pool: Pool[str] = Pool()
    pool.replace({"a": "port a"})
    pool.replace({"a": "its successor"})
    pool.lose("a", "port a")
    assert pool.pick() == ("a", "its successor")


def test_only_a_replica_that_is_new_has_come() -> None:
    pool: Pool[str] = Pool()
    pool.replace({"a": "port a", "b": "port b"})
    pool.lose("a", "port a")
    pool.replace({"a": "port a", "b": "port b"})  # dead, but listed for a while yet
    assert pool.arrivals == 2
    pool.replace({"a": "its successor", "b": "port b"})
    assert pool.arrivals == 3


async def test_waiting_ends_with_the_first_replica_and_has_somebody_look() -> None:
    pool: Pool[str] = Pool()
    looks = Looks(pool)
    waiting = [asyncio.ensure_future(pool.available(60.0)) for _ in range(3)]
    await asyncio.sleep(0)
    pool.replace({})
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    pool.replace({"a": "port a"})
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert looks.count == 3
    assert await pool.available(0.0)


async def test_patience_ends() -> None:
    pool: Pool[str] = Pool()
    assert not await pool.available(0.0)
    assert not await pool.available(0.001)


@pytest.mark.parametrize(
    ("wait_s", "time_left_s", "error"),
    [(0.0, math.inf, Unavailable), (0.001, 60.0, Unavailable), (60.0, 0.001, DeadlineExceeded)],
)
async def test_what_ended_the_wait_is_said(wait_s: float, time_left_s: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="target"):
        await PeerSet().target_ready(wait_s, time_left_s)


def test_load_is_counted_by_replica() -> None:
    pool: Pool[str] = Pool()
    pool.replace({"a": "port a", "b": "port b"})
    pool.took("a")
    assert pool.pick() == ("b", "port b")
    pool.took("b")
    pool.took("b")
    assert pool.open_sessions == 3
    assert pool.pick() == ("a", "port a")
    pool.gave_back("b")
    pool.gave_back("b")
    assert pool.pick() == ("b", "port b")
