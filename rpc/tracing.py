"""Owns tracing: whether it is on, how spans start and end, and how they travel inside messages as `traceparent`.

Off unless the standard OpenTelemetry environment variables ask for it; off, no span is ever made. The provider is
kept here and never set globally, so that a host (Ray Serve sets its own) keeps its tracing. Spans hold numbers and
names, never prompt or output text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.errors import InvalidArgument
from engine.proposal import State

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

Attributes = Mapping[str, "str | int | float"]

_ASKED_BY = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_propagator = TraceContextTextMapPropagator()
_NO_TRACER: Tracer = NoOpTracer()


@dataclass
class _Tracing:
    """Whether this process traces. One instance, below."""

    provider: TracerProvider | None = None
    tracer: Tracer = _NO_TRACER


_state = _Tracing()


def setup_tracing(service_name: str, processor: SpanProcessor | None = None) -> bool:
    """Turns tracing on if the environment asks for it; later calls change nothing. Returns whether it is on.

    Args:
        service_name: what traces call this process, unless OTEL_SERVICE_NAME says otherwise.
        processor: receives the spans in place of the OTLP exporter, whatever the environment says.

    Raises:
        InvalidArgument: OTEL_TRACES_EXPORTER names an exporter that is not there.
    """
    if _state.provider is None and (processor is not None or _asked_for()):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        name = os.environ.get("OTEL_SERVICE_NAME") or service_name
        _state.provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=True)
        _state.provider.add_span_processor(processor or _otlp_processor())
        _state.tracer = _state.provider.get_tracer("outrider")
    return _state.provider is not None


def shutdown_tracing() -> None:
    """Sends what is still waiting and turns tracing off."""
    if _state.provider is not None:
        _state.provider.shutdown()
    _state.provider, _state.tracer = None, _NO_TRACER


def enabled() -> bool:
    return _state.provider is not None


def tracer() -> Tracer:
    """The tracer of this process; a no-op while tracing is off."""
    return _state.tracer


def start_span(name: str, traceparent: str, attributes: Attributes) -> Span | None:
    """A span whose parent is `traceparent` (a new trace if that is empty or malformed); None while tracing is off."""
    if _state.provider is None:
        return None
    return _state.tracer.start_span(name, context=parse_traceparent(traceparent), attributes=dict(attributes))


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


class RoundSpans:
    """The spans of one session's work under way, found again by the state each was asked for."""

    def __init__(self) -> None:
        self._open: dict[State, Span] = {}

    def begin(self, base: State, name: str, traceparent: str, attributes: Attributes) -> None:
        """Starts a span for work on `base`. Callers check `enabled()` first, so that off costs nothing."""
        if (span := start_span(name, traceparent, attributes)) is not None:
            self._open[base] = span

    def end(self, base: State, attributes: Attributes) -> None:
        """Ends the span for `base`, if there is one."""
        if (span := self._open.pop(base, None)) is not None:
            span.set_attributes(dict(attributes))
            span.end()

    def supersede(self, length: int) -> None:
        """Ends the spans of states that can no longer come true, now that the sequence is longer than `length`."""
        for stale in [state for state in self._open if state.length <= length]:
            self._supersede(stale)

    def end_all(self) -> None:
        for state in list(self._open):
            self._supersede(state)

    def _supersede(self, base: State) -> None:
        span = self._open.pop(base)
        span.set_attribute("outrider.superseded", True)
        span.end()


def _asked_for() -> bool:
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    if exporter not in ("", "otlp"):
        raise InvalidArgument("OTEL_TRACES_EXPORTER", exporter, '"otlp" or "none"')
    return any(os.environ.get(name) for name in _ASKED_BY)


def _otlp_processor() -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())
