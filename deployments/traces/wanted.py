"""Owns how a person names a request: by its id, its trace, or the traceparent it was sent with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deployments.traces.spans import Span

REQUEST = "outrider.request"
REQUEST_ID = "outrider.request_id"

_TRACEPARENT = re.compile(r"(?:00-)?([0-9a-f]{32})(?:-([0-9a-f]{16})(?:-[0-9a-f]{2})?)?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for.

    Attributes:
        text: as it was given; a request id may look like anything, a trace id too.
        trace_id: of the trace it names, lower case; "" if it can only be a request id.
        span_id: of the request's span or of its caller's; "" for whichever request of the trace.
    """

    text: str
    trace_id: str = ""
    span_id: str = ""

    @classmethod
    def of(cls, text: str) -> Wanted:
        named = _TRACEPARENT.fullmatch(text.lower())
        return cls(text) if named is None else cls(text, named[1], named[2] or "")

    def is_request(self, span: Span) -> bool:
        """Whether `span` is of a request so named."""
        if span.name != REQUEST:
            return False
        in_trace = bool(self.trace_id) and span.trace_id == self.trace_id
        return span.attributes.get(REQUEST_ID) == self.text or (
            in_trace and self.span_id in ("", span.span_id, span.parent_id)
        )
