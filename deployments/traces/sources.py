"""Owns where traces come from: a file of the OpenTelemetry Collector, or a Jaeger that answers over HTTP.

A source gives all spans of the traces in which the wanted request may be.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlencode, urlsplit

from deployments.traces.spans import Span, parse_spans
from deployments.traces.wanted import REQUEST_ID, Wanted
from engine.errors import InvalidArgument, OutriderError, Unavailable

_TIMEOUT_S = 30.0
_LOOK_BACK_S = 14 * 24 * 3600  # Jaeger searches a span of time; few keep traces for longer
_MOST_TRACES = 20  # with one request id: a caller may give the same one to several calls


class UnreadableTraces(OutriderError):
    """A file or an answer does not hold traces. The message names the place."""


class TraceSource(Protocol):
    """Where traces are kept."""

    name: str

    def find(self, wanted: Wanted) -> list[Span]:
        """All spans of the traces it may be in; none where there is no such trace.

        Raises:
            UnreadableTraces: what is there holds no traces.
            Unavailable: nothing answers.
        """
        ...


class FileSource:
    """A file of JSON lines, one ExportTraceServiceRequest each, as the Collector's file exporter writes it.

    It is read twice, a line at a time, so that its size does not matter.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    def find(self, wanted: Wanted) -> list[Span]:
        traces = {s.trace_id for s in self._spans() if wanted.is_request(s) or s.trace_id == wanted.trace_id}
        return [span for span in self._spans() if span.trace_id in traces] if traces else []

    def _spans(self) -> Iterator[Span]:
        number = 0
        try:
            with self._path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield from self._spans_in(line, number)
        except UnicodeDecodeError as error:
            raise UnreadableTraces(f"{self.name}: not text in UTF-8 behind line {number}; compressed?") from error
        except OSError as error:
            raise UnreadableTraces(f"{self.name}: cannot be read: {error.strerror or error}") from error

    def _spans_in(self, line: str, number: int) -> Iterator[Span]:
        try:
            yield from parse_spans(line)
        except ValueError as error:
            if not line.endswith("\n") and str(error).startswith("not JSON"):
                return  # the last line of a file that is being written; its rest is still to come
            raise UnreadableTraces(f"{self.name}: line {number}: {error}") from error


class JaegerSource:
    """A Jaeger's query port, 16686 by default.

    A trace is fetched from API v3, as OTLP. It is searched for with `/api/traces`, because v3 takes no attributes in
    many versions of Jaeger 2 and ignores them silently.

    Args:
        url: where its pages are, a base path included.
        service: what traces call the router.
        clock: seconds since the epoch.
    """

    def __init__(self, url: str, service: str = "outrider-router", clock: Callable[[], float] = time.time) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise InvalidArgument("--jaeger", url, "a URL such as http://127.0.0.1:16686")
        self.name, self._service, self._clock = url.rstrip("/"), service, clock

    def find(self, wanted: Wanted) -> list[Span]:
        traces = self._traces_with(wanted.text)
        if wanted.trace_id:
            traces.append(wanted.trace_id)
        return [span for trace_id in dict.fromkeys(traces) for span in self._trace(trace_id)]

    def _traces_with(self, request_id: str) -> list[str]:
        end_s = self._clock()
        query = {
            "service": self._service,
            "tags": json.dumps({REQUEST_ID: request_id}),
            "start": round((end_s - _LOOK_BACK_S) * 1e6),
            "end": round((end_s + 60) * 1e6),  # clocks differ
            "limit": _MOST_TRACES,
        }
        answer = self._get(f"/api/traces?{urlencode(query)}")
        try:
            return [str(trace["traceID"]).lower().zfill(32) for trace in json.loads(answer or b"{}").get("data") or ()]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnreadableTraces(f"{self.name}/api/traces: not an answer of Jaeger's: {answer[:80]!r}") from error

    def _trace(self, trace_id: str) -> list[Span]:
        path = f"/api/v3/traces/{quote(trace_id)}"
        answer = self._get(path)
        try:
            result = json.loads(answer or b"{}").get("result", {})
            return list(parse_spans(json.dumps(result)))
        except (ValueError, AttributeError) as error:
            raise UnreadableTraces(f"{self.name}{path}: {error}") from error

    def _get(self, path: str) -> bytes:
        """The body of an answer; b"" where Jaeger says that there is no such thing."""
        try:
            with urllib.request.urlopen(self.name + path, timeout=_TIMEOUT_S) as reply:
                body: bytes = reply.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(200).decode(errors="replace")
            if error.code == http.client.NOT_FOUND and '"error' in said:
                return b""
            raise Unavailable(f"{self.name}: HTTP {error.code}: {said or error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise Unavailable(f"no Jaeger answers at {self.name}: {reason}") from error
