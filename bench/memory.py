"""Owns the memory check: resident memory of every process of a running system, over many requests.

Memory is summed over this process's descendants (Ray, Serve, HAProxy, target, draft, router), as RSS, which counts
pages shared between processes once for each of them and so is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from bench.processes import KINDS, REST, descendants


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes resident, by kind of process, after so many requests."""

    requests: int
    resident: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.resident.values())


def resident_bytes() -> dict[str, int]:
    """Resident memory of this process's descendants: the engines, the router, and everything else."""
    totals = dict.fromkeys((*KINDS, REST), 0)
    for kind, process in descendants():
        try:
            totals[kind] += process.memory_info().rss
        except psutil.Error:
            continue  # it ended between the listing and the question
    return totals


def measure(ask: Callable[[int], None], requests: int, concurrency: int) -> Iterator[Reading]:
    """Makes `requests` requests by their number, `concurrency` at once; ten readings over the run and one before."""
    yield Reading(0, resident_bytes())
    step = max(requests // 10, 1)
    with ThreadPoolExecutor(concurrency) as pool:
        for begin in range(0, requests, step):
            numbers = range(begin, min(begin + step, requests))
            list(pool.map(ask, numbers))
            yield Reading(numbers[-1] + 1, resident_bytes())
