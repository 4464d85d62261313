"""The spans of a follower: one for each sampled session of a forward, where its session says."""

from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.followers import _trace_forward
from engine.batch import SpanRows, StepRows
from tests.rpc.test_tracing import exporter  # noqa: F401 - a fixture

TRACE = 0x0AF7651916CD43DD8448EB211C80319C


def rows(trace: str) -> SpanRows:
    return SpanRows([5, 9], 0, (), 2, [1], trace)


def traceparent(parent: int, flags: str = "01") -> str:
    return f"00-{TRACE:032x}-{parent:016x}-{flags}"


def test_a_forward_has_a_span_for_each_session_that_is_sampled(exporter: InMemorySpanExporter) -> None:  # noqa: F811
    step = StepRows((rows(traceparent(7)), rows(""), rows(traceparent(8, "00")), rows(traceparent(9))), 16)
    _trace_forward(3, step, 0.25)
    spans = exporter.get_finished_spans()
    assert [(span.name, span.context.trace_id, span.parent.span_id) for span in spans] == [
        ("outrider.follow", TRACE, 7),
        ("outrider.follow", TRACE, 9),
    ]
    assert [span.end_time - span.start_time for span in spans] == [250_000_000] * 2
    said = {"outrider.rank": 3, "outrider.rows": 16, "outrider.forward_ms": 250.0}
    assert [dict(span.attributes) for span in spans] == [said] * 2
