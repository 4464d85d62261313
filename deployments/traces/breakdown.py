"""Owns the answer to where the time of a reply went: every millisecond of a request, in one of nine places.

The parts sum to the request's duration. They are intervals of the router's clock that follow one another; within a
round the lengths that target and draft report are cut to fit, because a target that goes on by itself began its forward
before the router's round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from deployments.traces.request_trace import TARGET_LOST, RequestTrace, Round


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Milliseconds of one request.

    Attributes:
        first_token: admission, tokenizing, and the prompt on the target.
        draft_wait: the router waited for the draft.
        queue: rounds waited for the target's engine.
        forward: the target's forwards.
        router: the rest of rounds: router, transport, and a caller who reads slowly.
        plain: rounds without draft tokens that were planned so, the target's runs by itself among them.
        failover: from losing a target to the next round on another, rounds that were lost with it included.
        idle: between rounds: planning the next one, mostly.
        closing: after the last round, when the reply was out: both sides were told to free their blocks.
    """

    first_token: float = 0.0
    draft_wait: float = 0.0
    queue: float = 0.0
    forward: float = 0.0
    router: float = 0.0
    plain: float = 0.0
    failover: float = 0.0
    idle: float = 0.0
    closing: float = 0.0

    @property
    def total(self) -> float:
        return sum(milliseconds for _, milliseconds in self.parts())

    def parts(self) -> Iterator[tuple[str, float]]:
        return ((each.name, getattr(self, each.name)) for each in fields(self))

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(*(mine + theirs for (_, mine), (_, theirs) in zip(self.parts(), other.parts(), strict=True)))


def breakdown_of(trace: RequestTrace) -> Breakdown:
    """Where the request's time went."""
    lost_at = [each.at_ms for each in trace.happenings if each.name == TARGET_LOST]
    total, began, now = Breakdown(), 0.0, 0.0  # `began`: when the round before did, which may have lost its target
    for index, round_ in enumerate(trace.rounds):
        start, end = (min(max(at, now), trace.duration_ms) for at in (round_.start_ms, round_.end_ms))
        total += _between(now, start, _first(lost_at, began, start), "idle" if index else "first_token")
        total += parts_of(round_, end - start, max(end - _first(lost_at, start, end), 0.0))
        began, now = start, end
    if not trace.rounds:  # all of it went into the first token, if there was one
        first = min(trace.ttft_ms or trace.duration_ms, trace.duration_ms)
        total, now = _between(0.0, first, _first(lost_at, 0.0, first), "first_token"), first
    return total + _between(now, trace.duration_ms, _first(lost_at, began, trace.duration_ms), "closing")


def parts_of(round_: Round, milliseconds: float, failing_ms: float = 0.0) -> Breakdown:
    """Where a round's time went, of which `milliseconds` are counted, the last `failing_ms` of them after a loss."""
    if round_.is_lost:
        return Breakdown(failover=milliseconds)
    if round_.is_plain:
        return Breakdown(plain=milliseconds - failing_ms, failover=failing_ms)
    left, taken = milliseconds, list[float]()
    for part in (round_.forward_ms, round_.queue_ms, round_.draft_wait_ms):
        taken.append(min(max(part, 0.0), left))
        left -= taken[-1]
    forward, queue, draft_wait = taken
    return Breakdown(forward=forward, queue=queue, draft_wait=draft_wait, router=left)


def _between(start: float, end: float, lost: float, otherwise: str) -> Breakdown:
    """The time between two rounds; from the moment `lost`, if a target was, it is failover."""
    lost = min(max(lost, start), end)
    return Breakdown(**{otherwise: lost - start}) + Breakdown(failover=end - lost)


def _first(moments: list[float], after: float, until: float) -> float:
    """The first moment in that time; infinity without one."""
    return min((at for at in moments if after <= at <= until), default=math.inf)
