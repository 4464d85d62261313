"""Spans from files and from a Jaeger: what is there is found, and what is wrong is named by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from deployments.traces.rebuilding import NoSuchRequest, rebuild
from deployments.traces.sources import FileSource, JaegerSource, UnreadableTraces
from deployments.traces.spans import parse_spans
from deployments.traces.wanted import Wanted
from engine.errors import InvalidArgument, Unavailable
from tests.traces.jaeger import answering

TRACE, ROOT = "AB" * 16, "0" * 14 + "AA"


def line(**span: Any) -> str:
    """A line as the Collector writes it: ids in hexadecimal, 64-bit numbers as text, an enumeration as a number."""
    whole = {
        "traceId": TRACE, "spanId": ROOT, "parentSpanId": "", "name": "outrider.request", "kind": 1,
        "startTimeUnixNano": "1800000000000000000", "endTimeUnixNano": "1800000000250000000",
        "status": {}, "flags": 257,
        "attributes": [
            {"key": "outrider.request_id", "value": {"stringValue": "r1"}},
            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "7"}},
            {"key": "gen_ai.usage.output_tokens", "value": {"intValue": 3}},
            {"key": "gen_ai.response.time_to_first_chunk", "value": {"doubleValue": 0.0125}},
            {"key": "outrider.list", "value": {"arrayValue": {"values": []}}},
        ],
    }  # fmt: skip
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "outrider-router"}}]}
    spans = [{"scope": {"name": "outrider"}, "spans": [whole | span]}]
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": spans, "schemaUrl": ""}]})


def test_a_span_of_the_collectors_json() -> None:
    (span,) = parse_spans(line())
    assert (span.trace_id, span.span_id, span.service) == (TRACE.lower(), ROOT.lower(), "outrider-router")
    assert span.duration_ms == 250.0
    assert dict(span.attributes) == {
        "outrider.request_id": "r1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.time_to_first_chunk": 0.0125,
    }
    assert list(parse_spans('{"resourceMetrics": []}')) == []


@pytest.mark.parametrize(
    "name", ["r1", TRACE, TRACE.lower(), f"{TRACE}-{ROOT}", f"00-{TRACE}-{ROOT}-01".lower(), f"{TRACE}-{'0' * 15}1"]
)
def test_a_request_goes_by_its_id_its_trace_or_its_traceparent(tmp_path: Path, name: str) -> None:
    path = tmp_path / "otlp.jsonl"
    path.write_text(
        f"{line(parentSpanId='0' * 15 + '1')}\n\n{line(spanId='0' * 16, name='outrider.round', traceId='cd' * 16)}\n"
    )
    wanted = Wanted.of(name)
    found = rebuild(FileSource(path).find(wanted), wanted, "here")
    assert (found.request_id, found.prompt_tokens, found.completion_tokens, found.ttft_ms) == ("r1", 7, 3, 12.5)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{oops", "line 2: not JSON: "),
        ("[]", "line 2: "),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "x"}]}]}]}', "traceId: field required"),
        (line(startTimeUnixNano="noon"), "startTimeUnixNano: "),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: str, said: str) -> None:
    path = tmp_path / "otlp.jsonl"
    path.write_text(f"{line()}\n{bad}\n{line()}\n")
    with pytest.raises(UnreadableTraces) as caught:
        FileSource(path).find(Wanted.of("r1"))
    assert str(caught.value).startswith(f"{path}: line 2: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_last_line_of_a_file_that_is_being_written_may_be_torn(tmp_path: Path) -> None:
    path = tmp_path / "otlp.jsonl"
    path.write_text(f"{line()}\n{line()[:100]}")
    assert len(FileSource(path).find(Wanted.of("r1"))) == 1


def test_a_file_that_is_not_there_or_is_compressed(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraces, match="nowhere: cannot be read: No such file"):
        FileSource(tmp_path / "nowhere").find(Wanted.of("r1"))
    (tmp_path / "zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(UnreadableTraces, match="not text in UTF-8 behind line 0; compressed"):
        FileSource(tmp_path / "zst").find(Wanted.of("r1"))


def test_nothing_found_says_whether_the_trace_is_there(tmp_path: Path) -> None:
    path = tmp_path / "otlp.jsonl"
    path.write_text(line(name="outrider.verify") + "\n")
    for name, said in (("r2", f"{path} has no request r2"), (TRACE, "has 1 spans of trace abab.*still running")):
        wanted = Wanted.of(name)
        with pytest.raises(NoSuchRequest, match=said):
            rebuild(FileSource(path).find(wanted), wanted, str(path))


def test_jaeger_is_searched_by_attribute_and_asked_for_otlp() -> None:
    with answering({TRACE.lower(): json.loads(line())}) as jaeger:
        source = JaegerSource(f"{jaeger.url}/", "my-router", clock=lambda: 1_800_000_000.0)
        (span,) = source.find(Wanted.of("r1"))
        assert span.attributes["outrider.request_id"] == "r1"
        search, fetch = (urlsplit(path) for path in jaeger.asked)
    assert {name: values for name, values in parse_qs(search.query).items() if name != "start"} == {
        "service": ["my-router"],
        "tags": ['{"outrider.request_id": "r1"}'],
        "end": ["1800000060000000"],
        "limit": ["20"],
    }
    assert fetch.path == f"/api/v3/traces/{TRACE.lower()}"


def test_jaeger_without_the_request_has_nothing() -> None:
    with answering({TRACE.lower(): json.loads(line())}) as jaeger:
        source = JaegerSource(jaeger.url)
        assert source.find(Wanted.of("r2")) == []
        assert source.find(Wanted.of("cd" * 16)) == []
        assert len(source.find(Wanted.of(TRACE))) == 1


def test_no_jaeger_or_another_program_is_said_plainly() -> None:
    with answering({}) as jaeger:
        url = jaeger.url
        with pytest.raises(Unavailable, match=f"{url}/elsewhere: HTTP 404: 404 page not found"):
            JaegerSource(f"{url}/elsewhere").find(Wanted.of("r1"))
        with pytest.raises(UnreadableTraces, match="not an answer of Jaeger's: b'<html>'"):
            JaegerSource(f"{url}/page").find(Wanted.of("r1"))
    with pytest.raises(Unavailable, match=f"no Jaeger answers at {url}: .*refused"):
        JaegerSource(url).find(Wanted.of("r1"))
    with pytest.raises(InvalidArgument, match="--jaeger: found 'localhost:16686'"):
        JaegerSource("localhost:16686")
