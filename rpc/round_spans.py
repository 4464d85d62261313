"""Owns the spans that one session's work makes in a draft or a target, from its request to its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.proposal import State
from rpc.tracing import Attributes, WorkSpan, begin_work


@dataclass(slots=True)
class _Open:
    span: WorkSpan
    outputs_left: int


class RoundSpans:
    """The spans of one session's work, found again by the state each was asked for.

    Callers check `enabled()` before they begin or record one, so that off costs nothing.

    Attributes:
        traceparent: of the request; what the session does unasked belongs to that.
    """

    def __init__(self) -> None:
        self._open: dict[State, _Open] = {}
        self.traceparent = ""

    def begin(self, base: State, name: str, traceparent: str, attributes: Attributes, *, num_outputs: int = 1) -> None:
        """Starts a span for work on `base` that is over with its `num_outputs`-th output, in the place of any such."""
        if base in self._open:
            self._supersede(base)
        if (span := begin_work(name, traceparent, attributes)) is not None:
            self._open[base] = _Open(span, num_outputs)

    def prolong(self, base: State, num_outputs: int) -> bool:
        """Has the work on `base` bring so many outputs more. Whether there is such a span."""
        if (work := self._open.get(base)) is None:
            return False
        work.outputs_left += num_outputs
        return True

    def end(self, base: State, attributes: Attributes) -> bool:
        """An output of the work on `base`: ends its span if it was the last. Whether there is such a span."""
        if (work := self._open.get(base)) is None:
            return False
        work.outputs_left -= 1
        if work.outputs_left == 0:
            work.span.set_attributes(attributes)
            self.stop(base)
        return True

    def stop(self, base: State) -> None:
        """Ends the span for `base`, if there is one, whatever is still to come of it."""
        if (work := self._open.pop(base, None)) is not None:
            work.span.end()

    def record(self, name: str, seconds: float, attributes: Attributes) -> None:
        """A span of work that nobody asked for in particular, which took so long and is over now."""
        now_ns = time.time_ns()
        span = begin_work(name, self.traceparent, attributes, now_ns - round(seconds * 1e9))
        if span is not None:
            span.end(now_ns)

    def supersede(self, length: int) -> None:
        """Ends the spans of states that can no longer come true, now that the sequence is longer than `length`."""
        for stale in [state for state in self._open if state.length <= length]:
            self._supersede(stale)

    def end_all(self) -> None:
        for state in list(self._open):
            self._supersede(state)

    def _supersede(self, base: State) -> None:
        self._open[base].span.set_attributes({"outrider.superseded": True})
        self.stop(base)
