"""Spans made by hand, for what real requests do not do on demand: clocks that differ, hundreds of rounds, losses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from deployments.traces.spans import Span, SpanEvent

TRACE = "ab" * 16
ROOT = "00000000000000aa"
BEGAN_NS = 1_800_000_000_000_000_000


def span(name: str, number: int, start_ms: float, ms: float, parent: str = ROOT, **attributes: Any) -> Span:
    """A span of the request's trace; attributes without their `outrider.`."""
    start_ns = BEGAN_NS + round(start_ms * 1e6)
    return Span(
        trace_id=TRACE,
        span_id=f"{number:016x}",
        parent_id=parent,
        service="outrider-router",
        name=f"outrider.{name}",
        start_ns=start_ns,
        end_ns=start_ns + round(ms * 1e6),
        attributes={f"outrider.{key}": value for key, value in attributes.items()},
    )


def request_span(
    ms: float, events: Iterable[tuple[str, float]] = (), ttft_ms: float | None = None, **attributes: Any
) -> Span:
    made = span("request", int(ROOT, 16), 0.0, ms, "", **{"request_id": "made", "outcome": "length", **attributes})
    happened = tuple(SpanEvent(f"outrider.{name}", BEGAN_NS + round(at * 1e6), {}) for name, at in events)
    first = {} if ttft_ms is None else {"gen_ai.response.time_to_first_chunk": ttft_ms / 1e3}
    return replace(made, events=happened, attributes={**made.attributes, **first})


def round_span(number: int, start_ms: float, ms: float, **attributes: Any) -> Span:
    """A round in which four draft tokens were judged and two accepted, unless `attributes` say otherwise."""
    usual = {
        "base_length": 0, "drafter": "draft_model", "num_speculative_tokens": 4, "plain_tokens": 1, "reason": "",
        "num_proposed": 4, "num_accepted": 2, "num_tokens": 3, "dropped": "", "forward_ms": 5.0, "draft_wait_ms": 2.0,
        "early": False, "num_wasted": 0,
    }  # fmt: skip
    return span("round", number, start_ms, ms, **usual | attributes)
