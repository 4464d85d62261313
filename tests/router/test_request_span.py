"""What a trace says of a request: its names are the conventions', and only what failed has the status of an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.errors import InvalidArgument
from engine.sampling import SamplingParams
from router.requests import Chat, ChatMessage, GenerateRequest, RawPrompt
from router.tokenizer import Tokenizer
from rpc import tracing
from tests.router.test_service import HELLO, Served, generate


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    tracing.setup_tracing("router", SimpleSpanProcessor(memory))
    yield memory
    tracing.shutdown_tracing()


def the_request(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = (each for each in exporter.get_finished_spans() if each.name == "outrider.request")
    return span


async def test_a_reply_by_the_conventions_names(tokenizer: Tokenizer, exporter: InMemorySpanExporter) -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=40, seed=3)
    asked = replace(HELLO, request_id="r-1", sampling=sampling, max_tokens=8)
    _, ids, complete = await generate(Served(tokenizer), asked)
    span = the_request(exporter)
    found = dict(span.attributes or {})
    assert (span.kind, span.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)
    assert found["outrider.request_id"] == "r-1"
    by_convention = {name.removeprefix("gen_ai."): value for name, value in found.items() if name.startswith("gen_ai.")}
    assert by_convention == {
        "operation.name": "text_completion",
        "provider.name": "outrider",
        "request.stream": True,
        "request.temperature": 0.5,
        "request.top_p": 0.9,
        "request.top_k": 40,
        "request.seed": 3,
        "request.model": "big",
        "response.model": "big",
        "request.max_tokens": 8,
        "usage.input_tokens": complete.usage.prompt_tokens,
        "usage.output_tokens": len(ids),
        "usage.cache_read.input_tokens": complete.usage.cached_tokens,
        "response.finish_reasons": (complete.finish_reason,),
        "response.time_to_first_chunk": complete.timing.ttft_ms / 1e3,
    }


async def test_a_failure_has_the_status_of_an_error(tokenizer: Tokenizer, exporter: InMemorySpanExporter) -> None:
    chat = GenerateRequest(Chat((ChatMessage("user", "hello"),)), max_tokens=-1)
    with pytest.raises(InvalidArgument):
        await generate(Served(tokenizer), chat)
    span = the_request(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "InvalidArgument"
    assert (span.attributes or {})["gen_ai.operation.name"] == "chat"


async def test_giving_up_is_no_error(tokenizer: Tokenizer, exporter: InMemorySpanExporter) -> None:
    async with aclosing(Served(tokenizer).router.generate(HELLO)) as events:
        await anext(events)
    span = the_request(exporter)
    assert span.status.status_code is StatusCode.UNSET
    assert (span.attributes or {})["outrider.outcome"] == "cancelled"


async def test_text_is_traced_where_it_was_asked_for(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "span_only")
    tracing.setup_tracing("router", SimpleSpanProcessor(memory := InMemorySpanExporter()))
    try:
        text, _, complete = await generate(Served(tokenizer), replace(HELLO, max_tokens=8))
    finally:
        tracing.shutdown_tracing()
    found = dict(the_request(memory).attributes or {})
    assert isinstance(HELLO.input, RawPrompt)
    asked, answered = (json.loads(str(found[f"gen_ai.{way}.messages"])) for way in ("input", "output"))
    assert asked == [{"role": "user", "parts": [{"type": "text", "content": HELLO.input.text}]}]
    parts = [{"type": "text", "content": text}]
    assert answered == [{"role": "assistant", "parts": parts, "finish_reason": complete.finish_reason}]
    assert text
    assert not tracing.text_enabled()


def test_who_asks_for_text_in_other_words_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "yes")
    with pytest.raises(InvalidArgument, match=r"CAPTURE_MESSAGE_CONTENT: found 'yes', allowed is \"SPAN_ONLY\""):
        tracing.setup_tracing("router", SimpleSpanProcessor(InMemorySpanExporter()))
    assert not tracing.enabled()
