"""Where the time went: every part by itself, and the sum, whatever clocks and losses do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.traces.breakdown import Breakdown, breakdown_of
from deployments.traces.rebuilding import rebuild
from deployments.traces.request_trace import RequestTrace
from deployments.traces.spans import Span
from deployments.traces.wanted import Wanted
from tests.traces.made import request_span, round_span, span


def trace_of(*spans: Span) -> RequestTrace:
    return rebuild(spans, Wanted.of("made"), "here")


def whole(where: Breakdown) -> dict[str, float]:
    return {name: ms for name, ms in where.parts() if ms}


def test_a_round_is_forward_queue_wait_and_the_rest() -> None:
    found = whole(breakdown_of(trace_of(request_span(30.0), round_span(1, 10.0, 12.0, queue_ms=1.5))))
    assert found == pytest.approx(
        {"first_token": 10.0, "forward": 5.0, "queue": 1.5, "draft_wait": 2.0, "router": 3.5, "closing": 8.0}
    )


def test_a_forward_that_began_before_its_round_counts_as_far_as_the_round_goes() -> None:
    early = round_span(1, 10.0, 3.0, early=True, drafter="", forward_ms=50.0, draft_wait_ms=0.0)
    asked_for_by_nobody = span("verify", 2, 0.0, 50.0, early=True, num_proposed=4, num_accepted=2, forward_ms=50.0)
    trace = trace_of(request_span(13.0), early, asked_for_by_nobody)
    assert whole(breakdown_of(trace)) == pytest.approx({"first_token": 10.0, "forward": 3.0})
    assert [work.is_early for work in trace.work] == [True]


def test_a_lost_target_is_failover_from_the_loss_to_the_next_round() -> None:
    lost = span("round", 1, 10.0, 20.0, drafter="draft_model", plain_tokens=1)  # no verdict, no numbers
    trace = trace_of(request_span(60.0, [("target_lost", 25.0)]), lost, round_span(2, 50.0, 10.0))
    assert (trace.failovers, trace.rounds[0].is_lost, trace.num_rounds) == (1, True, 1)
    assert whole(breakdown_of(trace)) == pytest.approx(
        {"first_token": 10.0, "failover": 40.0, "forward": 5.0, "draft_wait": 2.0, "router": 3.0}
    )


def test_a_stretch_is_plain_until_its_target_is_lost() -> None:
    stretch = round_span(1, 10.0, 20.0, drafter="", plain_tokens=32, num_proposed=0, num_accepted=0, num_tokens=8)
    following = round_span(2, 40.0, 10.0)
    trace = trace_of(request_span(50.0, [("target_lost", 25.0)]), stretch, following)
    assert (trace.rounds[0].num_tokens, trace.num_rounds) == (8, 8 + 1)
    where = whole(breakdown_of(trace))
    assert (where["plain"], where["failover"]) == pytest.approx((15.0, 15.0))


@pytest.mark.parametrize(
    ("ttft_ms", "found"), [(0.0, {"first_token": 40.0}), (30.0, {"first_token": 30.0, "closing": 10.0})]
)
def test_a_request_without_rounds(ttft_ms: float, found: dict[str, float]) -> None:
    assert whole(breakdown_of(trace_of(request_span(40.0, ttft_ms=ttft_ms)))) == pytest.approx(found)


lengths = st.floats(-50.0, 500.0, allow_nan=False)


@given(
    st.floats(0.0, 1000.0),
    st.lists(st.tuples(lengths, st.floats(0.0, 300.0), lengths, lengths, st.booleans(), st.sampled_from([1, 32]))),
    st.lists(lengths, max_size=3),
)
def test_the_parts_always_sum_to_the_request(
    ms: float, rounds: list[tuple[float, float, float, float, bool, int]], lost_at: list[float]
) -> None:
    spans = [
        round_span(
            number,
            start,
            length,
            forward_ms=forward,
            draft_wait_ms=wait,
            plain_tokens=plain,
            early=early and plain == 1,
        )
        for number, (start, length, forward, wait, early, plain) in enumerate(rounds, 1)
    ]
    where = breakdown_of(trace_of(request_span(ms, [("target_lost", at) for at in lost_at]), *spans))
    assert where.total == pytest.approx(ms, abs=1e-3)
    assert min(part for _, part in where.parts()) >= -1e-9
