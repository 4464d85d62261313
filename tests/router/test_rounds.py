"""What a round's span tells: of one verdict, or of all those of a stretch together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.proposal import Proposal, State
from router.events import RoundRecord
from router.policy import RoundPlan
from router.rounds import Round, annotate
from rpc import tracing
from tests.rpc.test_tracing import TRACEPARENT

Told = Callable[..., dict[str, Any]]


@pytest.fixture
def told() -> Iterator[Told]:
    """What the span of a round says that had these verdicts."""
    exporter = InMemorySpanExporter()
    assert tracing.setup_tracing("test", SimpleSpanProcessor(exporter))

    def told(*records: RoundRecord) -> dict[str, Any]:
        span = tracing.begin_work("outrider.round", TRACEPARENT, {})
        assert span is not None
        round_ = Round(RoundPlan(plain_tokens=len(records)), Proposal(State()), 0.0, span=span)
        for record in records:
            annotate(round_, record)
        span.end()
        (made,) = exporter.get_finished_spans()
        return {name.removeprefix("outrider."): value for name, value in made.attributes.items()}

    yield told
    tracing.shutdown_tracing()


def record(num_proposed: int = 0, num_accepted: int = 0, num_wasted: int = 0, num_stale: int = 0) -> RoundRecord:
    return RoundRecord(
        drafter="draft_model" if num_proposed else "",
        num_proposed=num_proposed,
        num_accepted=num_accepted,
        num_tokens=num_accepted + 1,
        reason="",
        dropped="",
        round_s=0.010,
        forward_s=0.004,
        draft_wait_s=0.002,
        is_early=False,
        is_hit=None,
        num_wasted=num_wasted,
        queue_s=0.001,
        num_stale=num_stale,
    )


def test_a_round_tells_how_far_both_sides_rolled_back_and_where_its_time_went(told: Told) -> None:
    found = told(record(num_proposed=5, num_accepted=2, num_wasted=7, num_stale=1))
    assert found["rollback_depth"] == 3
    assert (found["num_tokens"], found["num_wasted"], found["num_stale"]) == (3, 7, 1)
    assert (found["forward_ms"], found["queue_ms"], found["draft_wait_ms"]) == (4.0, 1.0, 2.0)


def test_what_an_earlier_token_of_a_stretch_wasted_is_not_forgotten_at_the_next(told: Told) -> None:
    found = told(record(), record(num_wasted=49, num_stale=1), record())
    assert (found["num_tokens"], found["num_wasted"], found["num_stale"]) == (3, 49, 1)
    assert (found["forward_ms"], found["queue_ms"]) == (12.0, 3.0)


def test_what_did_not_happen_is_not_said(told: Told) -> None:
    found = told(record(num_proposed=2, num_accepted=2))
    assert not {"rollback_depth", "dropped", "early", "num_wasted", "num_stale"} & found.keys()
