"""Spans connect across the wire when tracing is on; nothing is made when it is off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.errors import InvalidArgument
from engine.proposal import Proposal, State
from rpc import tracing
from tests.rpc.fakes import next_token
from tests.rpc.serving import GREEDY, STOPS, served_draft, served_target


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    assert tracing.setup_tracing("test", SimpleSpanProcessor(exporter))
    yield exporter
    tracing.shutdown_tracing()


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and (span.parent.span_id, span.context.trace_id) == (
        parent.context.span_id,
        parent.context.trace_id,
    )


async def test_verify_and_draft_are_children_of_the_round(exporter: InMemorySpanExporter) -> None:
    async with served_target() as served, served_draft() as (_, _, draft_client):
        with tracing.tracer().start_as_current_span("outrider.round") as round_span:
            traceparent = tracing.traceparent_of(round_span)
            target = served.client.open([1, 2], [], GREEDY, STOPS, traceparent=traceparent)
            await target.verdict()
            draft = draft_client.open([1, 2], GREEDY, on_early=lambda _: None)
            draft.advance(State(3, 8), [next_token(2)], 2, traceparent=traceparent)
            target.propose(await draft.proposal(), traceparent=traceparent)
            await target.verdict()
            target.decode(2, traceparent=traceparent)
            await target.verdict()
            await target.verdict()
            await target.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert sorted(s.name for s in exporter.get_finished_spans()) == [
        "outrider.decode",
        "outrider.draft",
        "outrider.round",
        "outrider.verify",
        "outrider.verify",
    ]
    parent = spans.pop("outrider.round")
    assert all(is_child(span, parent) for span in spans.values())
    assert dict(spans["outrider.draft"].attributes) == {
        "outrider.session": 1,
        "outrider.num_proposed": 2,
        "outrider.forward_ms": 0.0,
        "outrider.drafter": "fake",
    }
    assert dict(spans["outrider.verify"].attributes) == {
        "outrider.session": 1,
        "outrider.drafter": "fake",
        "outrider.num_proposed": 2,
        "outrider.num_accepted": 2,
        "outrider.rows": 4,
        "outrider.forward_ms": 62.5,
        "outrider.queue_ms": 0.0,
    }


async def test_spans_of_what_never_came_true_end_as_superseded(exporter: InMemorySpanExporter) -> None:
    spans = tracing.RoundSpans()
    for length in (4, 5, 9):
        spans.begin(State(length, 1), "outrider.verify", "", {"outrider.session": length})
    spans.end(State(5, 1), {"outrider.rows": 4})
    spans.supersede(5)
    attributes = [span.attributes for span in exporter.get_finished_spans()]
    ended = [(each["outrider.session"], "outrider.superseded" in each) for each in attributes]
    assert ended == [(5, False), (4, True)]
    spans.end_all()
    assert len(exporter.get_finished_spans()) == 3


async def test_an_empty_or_malformed_traceparent_starts_a_trace(exporter: InMemorySpanExporter) -> None:
    for traceparent in ("", "garbage", "00-0-0-0"):
        span = tracing.start_span("outrider.verify", traceparent, {})
        assert span is not None
        span.end()
    assert [span.parent for span in exporter.get_finished_spans()] == [None] * 3


async def test_off_makes_no_span_and_no_traceparent(monkeypatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a span was asked for")

    monkeypatch.setattr(tracing.RoundSpans, "begin", forbidden)
    monkeypatch.setattr(tracing.RoundSpans, "supersede", forbidden)
    assert not tracing.enabled()
    assert tracing.start_span("outrider.verify", "", {}) is None
    assert tracing.traceparent_of(None) == ""
    assert tracing.traceparent_of(tracing.tracer().start_span("x")) == ""
    async with served_target() as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS)
        await session.verdict()
        session.propose(Proposal.chain(State(3, 0), [next_token(3)]))
        assert (await session.verdict()).num_accepted == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"},
    ],
)
def test_the_environment_does_not_ask_for_tracing(monkeypatch, environment: dict[str, str]) -> None:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not tracing.setup_tracing("test")


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_the_environment_asks_for_tracing_and_twice_is_once(monkeypatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    try:
        assert tracing.setup_tracing("test")
        tracer = tracing.tracer()
        assert tracing.setup_tracing("again")
        assert tracing.tracer() is tracer
    finally:
        tracing.shutdown_tracing()


def test_an_exporter_that_is_not_there_is_named(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(InvalidArgument, match="OTEL_TRACES_EXPORTER: found 'zipkin'"):
        tracing.setup_tracing("test")
