"""Owns spans as values, and their reading from OTLP JSON, in which ids are hexadecimal and 64-bit numbers may be text.

The same JSON comes from the OpenTelemetry Collector's file exporter and from Jaeger's API v3. Fields this reader does
not need are ignored, as OTLP asks of readers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from deployments.yaml_file import explain

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened in a span; `at_ns` is since the epoch."""

    name: str
    at_ns: int
    attributes: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are nanoseconds since the epoch, by the clock of the process that made it.

    Attributes:
        trace_id, span_id, parent_id: lower-case hexadecimal; "" for no parent.
        service: `service.name` of that process.
        attributes: those with one value; lists and maps are left out.
    """

    trace_id: str
    span_id: str
    parent_id: str
    service: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()

    @property
    def duration_ms(self) -> float:
        return max(self.end_ns - self.start_ns, 0) / 1e6

    def text(self, name: str) -> str:
        """The attribute `outrider.<name>`; "" without."""
        return str(self.attributes.get(f"outrider.{name}", ""))

    def number(self, name: str) -> float:
        """The attribute `outrider.<name>`; 0 without, or if it is no number."""
        value = self.attributes.get(f"outrider.{name}", 0)
        return 0.0 if isinstance(value, str) else float(value)


def parse_spans(data: str | bytes) -> Iterator[Span]:
    """The spans of one JSON document with `resourceSpans`; none if it has no such key.

    Raises:
        ValueError: it is no such document; the message is one line and says what is wrong.
    """
    try:
        document = _Document.model_validate(json.loads(data))
    except ValidationError as error:
        raise ValueError(explain(error, lambda _: ())) from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    for group in document.resource_spans:
        service = str(_values(group.resource.attributes).get("service.name", ""))
        for scope in group.scope_spans:
            for span in scope.spans:
                yield span.value(service)


class _Message(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True)


class _AnyValue(_Message):
    string_value: str | None = None
    int_value: int | None = None
    double_value: float | None = None
    bool_value: bool | None = None

    @property
    def scalar(self) -> Scalar | None:
        found = (self.string_value, self.bool_value, self.int_value, self.double_value)
        return next((value for value in found if value is not None), None)


class _KeyValue(_Message):
    key: str = ""
    value: _AnyValue = Field(default_factory=_AnyValue)


class _Event(_Message):
    name: str = ""
    time_unix_nano: int = 0
    attributes: list[_KeyValue] = []


class _Span(_Message):
    trace_id: str
    span_id: str
    parent_span_id: str = ""
    name: str = ""
    start_time_unix_nano: int = 0
    end_time_unix_nano: int = 0
    attributes: list[_KeyValue] = []
    events: list[_Event] = []

    def value(self, service: str) -> Span:
        return Span(
            trace_id=self.trace_id.lower(),
            span_id=self.span_id.lower(),
            parent_id=self.parent_span_id.lower(),
            service=service,
            name=self.name,
            start_ns=self.start_time_unix_nano,
            end_ns=self.end_time_unix_nano,
            attributes=_values(self.attributes),
            events=tuple(SpanEvent(each.name, each.time_unix_nano, _values(each.attributes)) for each in self.events),
        )


class _Scope(_Message):
    spans: list[_Span] = []


class _Resource(_Message):
    attributes: list[_KeyValue] = []


class _ResourceSpans(_Message):
    resource: _Resource = Field(default_factory=_Resource)
    scope_spans: list[_Scope] = []


class _Document(_Message):
    resource_spans: list[_ResourceSpans] = []


def _values(pairs: list[_KeyValue]) -> dict[str, Scalar]:
    return {pair.key: value for pair in pairs if (value := pair.value.scalar) is not None}
