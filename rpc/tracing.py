"""Owns tracing: whether it is on, how spans begin, and how they travel inside messages as `traceparent`.

Off unless the standard OpenTelemetry environment variables ask for it; off, no span is ever made. The provider is
kept here and never set globally, so that a host (Ray Serve sets its own) keeps its tracing. Spans hold numbers and
names, and the text of prompts and outputs only where the variable for that asks for it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanContext, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.errors import InvalidArgument

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

Attributes = Mapping[str, "str | int | float"]

_TEXT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_ASKED_BY = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_SPANS_AT_ONCE = 32  # encoding a batch keeps the interpreter to itself, and OpenTelemetry's 512 for as long as a round
_propagator = TraceContextTextMapPropagator()
_NO_TRACER: Tracer = NoOpTracer()
_SCOPE = "outrider"


@dataclass
class _Tracing:
    """Whether this process traces, and text too. One instance, below."""

    provider: TracerProvider | None = None
    tracer: Tracer = _NO_TRACER
    finish: Callable[..., None] | None = None
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
        processor = processor or _otlp_processor()
        _state.provider.add_span_processor(processor)
        _state.tracer = _state.provider.get_tracer(_SCOPE)
        _state.finish = _finisher(_state.provider.resource, processor)
    return _state.provider is not None


def shutdown_tracing() -> None:
    """Sends what is still waiting and turns tracing off."""
    if _state.provider is not None:
        _state.provider.shutdown()
    _state.provider, _state.tracer, _state.finish, _state.text = None, _NO_TRACER, None, False


def enabled() -> bool:
    return _state.provider is not None


def text_enabled() -> bool:
    """Whether spans are to hold what was asked and answered: for debugging, never without being asked for."""
    return _state.text


def tracer() -> Tracer:
    """The tracer of this process; a no-op while tracing is off."""
    return _state.tracer


def start_span(
    name: str, traceparent: str, attributes: Attributes, *, kind: SpanKind = SpanKind.INTERNAL
) -> Span | None:
    """A span whose parent is `traceparent` (a new trace if that is empty or malformed); None while tracing is off."""
    if _state.provider is None:
        return None
    parent = parse_traceparent(traceparent)
    return _state.tracer.start_span(name, context=parent, kind=kind, attributes=dict(attributes))


def begin_work(name: str, traceparent: str, attributes: Attributes, start_ns: int | None = None) -> WorkSpan | None:
    """A span of work for the request, or the round, that `traceparent` names; it is sampled if that is.

    Args:
        start_ns: when it began, in nanoseconds since the epoch; None: now.

    Returns:
        None while tracing is off, and where `traceparent` is empty, malformed or not sampled.
    """
    if _state.provider is None or (parent := sampled_context(traceparent)) is None:
        return None
    return WorkSpan(name, parent, dict(attributes), start_ns or time.time_ns())


class WorkSpan:
    """Many are made for each request, and its rounds wait while they are.

    The SDK's own spans check and lock at every call: 35 µs for one of a round, which all sessions of a batch wait for.
    This one becomes such a span, a finished one, when it ends.

    Attributes:
        traceparent: under which its children travel.
    """

    __slots__ = ("_attributes", "_context", "_name", "_parent", "_start_ns")

    def __init__(self, name: str, parent: SpanContext, attributes: dict[str, str | int | float], start_ns: int) -> None:
        self._name, self._parent, self._attributes, self._start_ns = name, parent, attributes, start_ns
        span_id = random.getrandbits(64) or 1  # 0 is none
        self._context = SpanContext(parent.trace_id, span_id, is_remote=False, trace_flags=parent.trace_flags)

    @property
    def traceparent(self) -> str:
        return spelt(self._context)

    def set_attributes(self, attributes: Attributes) -> None:
        self._attributes.update(attributes)

    def end(self, end_ns: int | None = None) -> None:
        """Hands it on to be exported; to be called once. `end_ns`: nanoseconds since the epoch; None: now."""
        if _state.finish is not None:  # tracing may have gone off meanwhile
            _state.finish(
                name=self._name,
                context=self._context,
                parent=self._parent,
                attributes=self._attributes,
                start_time=self._start_ns,
                end_time=end_ns or time.time_ns(),
            )


def traceparent_of(span: Span | None) -> str:
    """The W3C traceparent under which children of `span` travel; "" without one."""
    if span is None or not span.get_span_context().is_valid:
        return ""
    return spelt(span.get_span_context())


def spelt(context: SpanContext) -> str:
    """The W3C traceparent of a span: 55 characters of ASCII."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def parse_traceparent(traceparent: str) -> Context:
    """The context that makes its bearer the parent; an empty one if `traceparent` is empty or malformed."""
    return _propagator.extract({"traceparent": traceparent} if traceparent else {}, Context())


@lru_cache(maxsize=256)  # all rounds of a request have the same parent
def sampled_context(traceparent: str) -> SpanContext | None:
    """The span that `traceparent` names, if it names one and that is sampled."""
    found = trace.get_current_span(parse_traceparent(traceparent)).get_span_context()
    return found if found.is_valid and found.trace_flags.sampled else None


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


def _finisher(resource: Resource, processor: SpanProcessor) -> Callable[..., None]:
    """What hands finished spans of this process to the processor."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    scope = InstrumentationScope(_SCOPE)

    def finish(**span: Any) -> None:
        processor.on_end(ReadableSpan(**span, resource=resource, instrumentation_scope=scope))

    return finish


def _otlp_processor() -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    size = None if os.environ.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE") else _SPANS_AT_ONCE
    return BatchSpanProcessor(OTLPSpanExporter(), max_export_batch_size=size)
