"""Owns the span of a request: what it tells of what was asked for, and of how that ended. Numbers and names, no text.

Attributes are those of OpenTelemetry's semantic conventions for generative AI where there are such, ours otherwise.
"""

from __future__ import annotations

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from engine.info import EngineInfo
from engine.sampling import StopParams
from router.events import Complete
from router.requests import Chat, GenerateRequest
from rpc.tracing import start_span


def begin_request(request: GenerateRequest) -> Span | None:
    """The span under which all that is done for the request hangs; None while tracing is off."""
    sampling = request.sampling
    attributes: dict[str, str | int | float] = {
        "outrider.request_id": request.request_id,
        "outrider.workload": request.workload,
        "gen_ai.operation.name": "chat" if isinstance(request.input, Chat) else "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }
    if sampling.top_k > 0:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None:
        attributes["gen_ai.request.seed"] = sampling.seed
    return start_span("outrider.request", request.traceparent, attributes, kind=SpanKind.SERVER)


def note_target(span: Span | None, info: EngineInfo, stops: StopParams) -> None:
    """Which model answers, and how long it may."""
    if span is not None:
        span.set_attributes(
            {
                "gen_ai.request.model": info.model,
                "gen_ai.response.model": info.model,
                "gen_ai.request.max_tokens": stops.max_tokens,
            }
        )


def end_request(span: Span | None, outcome: str, complete: Complete | None) -> None:
    """Ends the span; one that failed has the status of an error, by which collectors keep it."""
    if span is None:
        return
    span.set_attribute("outrider.outcome", outcome)
    if complete is not None:
        _note_reply(span, complete)
    elif outcome != "cancelled":
        span.set_status(Status(StatusCode.ERROR))
        span.set_attribute("error.type", outcome)
    span.end()


def _note_reply(span: Span, complete: Complete) -> None:
    totals, usage, timing = complete.speculation, complete.usage, complete.timing
    span.set_attributes(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.finish_reasons": (complete.finish_reason,),
            "gen_ai.response.time_to_first_chunk": timing.ttft_ms / 1e3,
            "outrider.rounds": totals.rounds,
            "outrider.acceptance_rate": totals.acceptance_rate,
            "outrider.mean_acceptance_length": totals.mean_acceptance_length,
            "outrider.switched_off_reason": totals.switched_off_reason,
            "outrider.queue_ms": timing.queue_ms,
            "outrider.failovers": complete.failovers,
        }
    )
