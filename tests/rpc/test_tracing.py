"""Spans connect across the wire when tracing is on; nothing is made when it is off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.errors import InvalidArgument
from engine.proposal import EarlyProposals, Proposal, RunAhead, State
from rpc import tracing
from rpc.round_spans import RoundSpans
from tests.rpc.fakes import next_token
from tests.rpc.serving import GREEDY, STOPS, served_draft, served_target

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


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
    spans = RoundSpans()
    for length in (4, 5, 9):
        spans.begin(State(length, 1), "outrider.verify", TRACEPARENT, {"outrider.session": length})
    assert spans.end(State(5, 1), {"outrider.rows": 4})
    assert not spans.end(State(5, 1), {})
    spans.supersede(5)
    attributes = [span.attributes for span in exporter.get_finished_spans()]
    ended = [(each["outrider.session"], "outrider.superseded" in each) for each in attributes]
    assert ended == [(5, False), (4, True)]
    spans.end_all()
    assert len(exporter.get_finished_spans()) == 3


async def test_work_asked_for_anew_supersedes_what_was_asked_before(exporter: InMemorySpanExporter) -> None:
    spans = RoundSpans()
    for asked in (1, 2):
        spans.begin(State(4), "outrider.draft", TRACEPARENT, {"outrider.session": asked})
    assert spans.end(State(4), {})
    attributes = [span.attributes for span in exporter.get_finished_spans()]
    ended = [(each["outrider.session"], "outrider.superseded" in each) for each in attributes]
    assert ended == [(1, True), (2, False)]


async def test_a_plain_run_ends_with_its_last_token_or_when_it_is_stopped(exporter: InMemorySpanExporter) -> None:
    spans = RoundSpans()
    spans.begin(State(4), "outrider.decode", TRACEPARENT, {}, num_outputs=2)
    assert spans.end(State(4), {})
    assert exporter.get_finished_spans() == ()
    assert spans.end(State(4), {})
    spans.begin(State(9), "outrider.decode", TRACEPARENT, {}, num_outputs=3)
    spans.stop(State(9))
    spans.stop(State(9))
    assert [span.name for span in exporter.get_finished_spans()] == ["outrider.decode"] * 2


async def test_what_a_session_does_unasked_belongs_to_its_request(exporter: InMemorySpanExporter) -> None:
    with tracing.tracer().start_as_current_span("outrider.request") as request_span:
        spans = RoundSpans()
        spans.traceparent = tracing.traceparent_of(request_span)
        spans.record("outrider.verify", 0.25, {"outrider.early": True})
    verify, request = exporter.get_finished_spans()
    assert is_child(verify, request)
    assert verify.end_time - verify.start_time == 250_000_000
    assert verify.end_time <= request.end_time


async def test_rounds_that_the_target_begins_by_itself_have_spans(exporter: InMemorySpanExporter) -> None:
    async with served_target() as served, served_draft() as (_, _, draft_client):
        came: asyncio.Queue[EarlyProposals] = asyncio.Queue()
        with tracing.tracer().start_as_current_span("outrider.request") as request_span:
            traceparent = tracing.traceparent_of(request_span)
            target = served.client.open([1, 2], [], GREEDY, STOPS, traceparent=traceparent)
            await target.verdict()
            draft = draft_client.open([1, 2], GREEDY, on_early=came.put_nowait, traceparent=traceparent)
            draft.advance(State(3, 8), [next_token(2)], 0, run_ahead=RunAhead(2, 0.8, 0.1))
            early = await came.get()
            # The fake target does not hold early proposals: a round that no one asked it for stands for one.
            (session,) = served.engine.lengths
            verifying = Proposal.chain(State(3, 8), [next_token(3)])
            served.loop.post(session, lambda engine, number: engine.propose(number, verifying))
            assert (await target.verdict()).num_accepted == 1
            target.decode(1, traceparent=traceparent)
            await target.verdict()
            served.loop.post(session, lambda engine, number: engine.propose(number, Proposal(State(6, 8))))
            assert (await target.verdict()).num_proposed == 0
            await target.close()
    spans = exporter.get_finished_spans()
    request = next(span for span in spans if span.name == "outrider.request")
    assert all(is_child(span, request) for span in spans if span is not request)
    names = [span.name for span in spans]
    assert names.count("outrider.decode") == 1
    assert "outrider.draft" not in names
    (ahead,) = (dict(span.attributes) for span in spans if span.name == "outrider.draft_ahead")
    assert ahead == {
        "outrider.session": 1,
        "outrider.drafter": "fake",
        "outrider.num_branches": 1,
        "outrider.num_tokens": early.num_tokens,
    }
    unasked = [span for span in spans if span.attributes.get("outrider.early")]
    assert [(span.name, span.attributes["outrider.num_proposed"]) for span in unasked] == [
        ("outrider.verify", 1),
        ("outrider.verify", 0),
    ]
    assert {span.end_time - span.start_time for span in unasked} == {62_500_000}


async def test_a_request_without_a_caller_s_span_starts_a_trace_and_work_without_a_request_none(
    exporter: InMemorySpanExporter,
) -> None:
    for traceparent in ("", "garbage", "00-0-0-0"):
        span = tracing.start_span("outrider.request", traceparent, {})
        assert span is not None
        span.end()
        assert tracing.begin_work("outrider.verify", traceparent, {}) is None
    assert [span.parent for span in exporter.get_finished_spans()] == [None] * 3


async def test_work_is_sampled_as_its_parent_and_hands_on_its_own_name(exporter: InMemorySpanExporter) -> None:
    assert tracing.begin_work("outrider.round", f"{TRACEPARENT[:-2]}00", {}) is None
    round_span = tracing.begin_work("outrider.round", TRACEPARENT, {"outrider.reason": ""})
    assert round_span is not None
    verify = tracing.begin_work("outrider.verify", round_span.traceparent, {"outrider.rows": 4}, 1_000)
    assert verify is not None
    verify.set_attributes({"outrider.rows": 5, "outrider.early": True})
    verify.end(3_000)
    round_span.end()
    below, above = exporter.get_finished_spans()
    assert is_child(below, above)
    assert (above.parent.span_id, above.context.trace_id) == (0xB7AD6B7169203331, 0x0AF7651916CD43DD8448EB211C80319C)
    assert (below.start_time, below.end_time) == (1_000, 3_000)
    assert dict(below.attributes) == {"outrider.rows": 5, "outrider.early": True}
    assert above.start_time <= above.end_time
    assert below.resource.attributes["service.name"] == "test"
    assert below.instrumentation_scope.name == "outrider"


async def test_off_makes_no_span_and_no_traceparent(monkeypatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a span was asked for")

    monkeypatch.setattr(RoundSpans, "begin", forbidden)
    monkeypatch.setattr(RoundSpans, "supersede", forbidden)
    monkeypatch.setattr(RoundSpans, "record", forbidden)
    assert not tracing.enabled()
    assert tracing.start_span("outrider.request", "", {}) is None
    assert tracing.begin_work("outrider.verify", TRACEPARENT, {}) is None
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
