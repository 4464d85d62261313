"""Owns tracing: whether it is on, how spans start and end, and how they travel inside messages as `traceparent`.

Off unless the standard OpenTelemetry environment variables ask for it; off, no span is ever made. The provider is
kept here and never set globally, so that a host (Ray Serve sets its own) keeps its tracing. Spans hold numbers and
names, and the text of prompts and outputs only where the variable for that asks for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.errors import InvalidArgument
from engine.proposal import State

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

Attributes = Mapping[str, "str | int | float"]

_TEXT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_ASKED_BY = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_propagator = TraceContextTextMapPropagator()
_NO_TRACER: Tracer = NoOpTracer()


@dataclass
class _Tracing:
    """Whether this process traces, and text too. One instance, below."""

    provider: TracerProvider | None = None
    tracer: Tracer = _NO_TRACER
    text: bool = False


_state = _Tracing()


def setup_tracing(service_name: str, processor: SpanProcessor | None = None) -> bool:
    """Turns tracing on if the environment asks for it; later calls change nothing. Returns whether it is on.

    Args:
        service_name: what traces call this process, unless OTEL_SERVICE_NAME says otherwise.
        processor: receives the spans in place of the OTLP exporter, whatever the environment says.

    Raises:
        InvalidArgument: OTEL_TRACES_EXPORTER names an exporter that is not there, or whether text is to be traced is
            asked for in words of no meaning.
    """
    if _state.provider is None and (processor is not None or _asked_for()):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        _state.text = _text_asked_for()
        name = os.environ.get("OTEL_SERVICE_NAME") or service_name
        _state.provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=True)
        _state.provider.add_span_processor(processor or _otlp_processor())
        _state.tracer = _state.provider.get_tracer("outrider")
    return _state.provider is not None


def shutdown_tracing() -> None:
    """Sends what is still waiting and turns tracing off."""
    if _state.provider is not None:
        _state.provider.shutdown()
    _state.provider, _state.tracer, _state.text = None, _NO_TRACER, False


def enabled() -> bool:
    return _state.provider is not None


def text_enabled() -> bool:
    """Whether spans are to hold what was asked and answered: for debugging, never without being asked for."""
    return _state.text


def tracer() -> Tracer:
    """The tracer of this process; a no-op while tracing is off."""
    return _state.tracer


def start_span(
    name: str,
    traceparent: str,
    attributes: Attributes,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    start_ns: int | None = None,
) -> Span | None:
    """A span whose parent is `traceparent` (a new trace if that is empty or malformed); None while tracing is off.

    Args:
        start_ns: when it began, in nanoseconds since the epoch; None: now.
    """
    if _state.provider is None:
        return None
    parent = parse_traceparent(traceparent)
    return _state.tracer.start_span(name, context=parent, kind=kind, attributes=dict(attributes), start_time=start_ns)


def traceparent_of(span: Span | None) -> str:
    """The W3C traceparent under which children of `span` travel; "" without one."""
    if span is None or not span.get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier["traceparent"]


def parse_traceparent(traceparent: str) -> Context:
    """The context that makes its bearer the parent; an empty one if `traceparent` is empty or malformed."""
    return _propagator.extract({"traceparent": traceparent} if traceparent else {}, Context())


@dataclass(slots=True)
class _Open:
    span: Span
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
        if (span := start_span(name, traceparent, attributes)) is not None:
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
            work.span.set_attributes(dict(attributes))
            self.stop(base)
        return True

    def stop(self, base: State) -> None:
        """Ends the span for `base`, if there is one, whatever is still to come of it."""
        if (work := self._open.pop(base, None)) is not None:
            work.span.end()

    def record(self, name: str, seconds: float, attributes: Attributes) -> None:
        """A span of work that nobody asked for in particular, which took so long and is over now."""
        now_ns = time.time_ns()
        span = start_span(name, self.traceparent, attributes, start_ns=now_ns - round(seconds * 1e9))
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
        self._open[base].span.set_attribute("outrider.superseded", True)
        self.stop(base)


def _asked_for() -> bool:
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    if exporter not in ("", "otlp"):
        raise InvalidArgument("OTEL_TRACES_EXPORTER", exporter, '"otlp" or "none"')
    return any(os.environ.get(name) for name in _ASKED_BY)


def _text_asked_for() -> bool:
    asked = os.environ.get(_TEXT, "")
    if asked.upper() not in ("", "NO_CONTENT", "SPAN_ONLY"):
        raise InvalidArgument(_TEXT, asked, '"SPAN_ONLY" or "NO_CONTENT"')
    return asked.upper() == "SPAN_ONLY"


def _otlp_processor() -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())
