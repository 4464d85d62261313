"""Owns one simulation as a whole: from devices and acceptance to the best K under each load and for each workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.simulation.ahead import Foresight, best_ahead
from bench.simulation.assumptions import Assumptions
from bench.simulation.roofline import Device
from bench.simulation.speedup import Load, Speed, best, plain, waiting


@dataclass(frozen=True, slots=True)
class Setup:
    """What decodes.

    Attributes:
        max_draft_tokens: largest K considered.
        hit_rate: of running ahead, where it was measured.
    """

    target: Device
    draft: Device
    assumptions: Assumptions
    max_draft_tokens: int
    hit_rate: float | None = None

    def load(self, num_sessions: int) -> Load:
        """So many sessions on it."""
        assumed = self.assumptions
        wait_s, reserve_s = assumed.wait_s + assumed.link_s, assumed.reserve_s + assumed.link_s
        return Load(self.target, self.draft, num_sessions, wait_s, assumed.gap_s, reserve_s)

    @property
    def foresight(self) -> Foresight:
        assumed = self.assumptions
        return Foresight(assumed.recall, assumed.num_ranked, assumed.in_time, self.hit_rate)


@dataclass(frozen=True, slots=True)
class Curves:
    """Speed by K, from 1 on: waiting for the draft, and running ahead with K as a cap."""

    waiting: tuple[Speed, ...]
    ahead: tuple[Speed, ...]


@dataclass(frozen=True, slots=True)
class AtLoad:
    """The best that can be done with so many sessions; a K of 0 says that plain decoding is.

    Attributes:
        is_capped: the largest K considered is the best, one way or the other: a larger one may be better.
    """

    num_sessions: int
    plain: Speed
    waiting: Speed
    ahead: Speed
    is_capped: bool


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """A row of the workload matrix."""

    workload: str
    acceptance: tuple[float, ...]
    loads: tuple[AtLoad, ...]


def curves(setup: Setup, num_sessions: int, acceptance: Sequence[float]) -> Curves:
    """All there is to choose from."""
    load, sizes = setup.load(num_sessions), range(1, setup.max_draft_tokens + 1)
    ahead = best_ahead(load, acceptance, setup.max_draft_tokens, setup.foresight)
    return Curves(tuple(waiting(load, acceptance, size) for size in sizes), tuple(ahead))


def at_load(setup: Setup, num_sessions: int, acceptance: Sequence[float]) -> AtLoad:
    """What to choose."""
    found, undrafted = curves(setup, num_sessions, acceptance), plain(setup.load(num_sessions))
    waited, ran_ahead = [undrafted, *found.waiting], [undrafted, *found.ahead]
    slow, fast = best(waited), best(ran_ahead)
    # Of equals the first is the best, so it is the last only where that is faster than with a lower cap.
    is_capped = setup.max_draft_tokens in (waited.index(slow), ran_ahead.index(fast))
    return AtLoad(num_sessions, undrafted, slow, fast, is_capped)


def matrix(
    setup: Setup, sessions: Sequence[int], workloads: Mapping[str, tuple[float, ...]]
) -> tuple[WorkloadRow, ...]:
    """For each class of requests, by its acceptance, what to choose under each load."""
    return tuple(
        WorkloadRow(name, acceptance, tuple(at_load(setup, number, acceptance) for number in sessions))
        for name, acceptance in workloads.items()
    )
