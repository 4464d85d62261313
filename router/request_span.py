"""Owns the span of a request: what it tells of what was asked for, and of how that ended.

Attributes are those of OpenTelemetry's semantic conventions for generative AI where there are such, ours otherwise.
Numbers and names, no text unless rpc.tracing says that it was asked for.
"""

from __future__ import annotations

import json

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from engine.info import EngineInfo
from engine.sampling import StopParams
from router.events import Complete, Delta
from router.requests import Chat, GenerateRequest, Input, RawPrompt
from rpc.tracing import start_span, text_enabled


class RequestSpan:
    """One request's span, from its arrival to `end`.

    Attributes:
        span: what all that is done for the request hangs under; None while tracing is off.
    """

    def __init__(self, request: GenerateRequest) -> None:
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
        if text_enabled():
            attributes["gen_ai.input.messages"] = json.dumps(_messages(request.input), ensure_ascii=False)
        self.span = start_span("outrider.request", request.traceparent, attributes, kind=SpanKind.SERVER)
        self._texts: list[str] | None = [] if text_enabled() else None

    def note_target(self, info: EngineInfo, stops: StopParams) -> None:
        """Which model answers, and how long it may."""
        if self.span is not None:
            self.span.set_attributes(
                {
                    "gen_ai.request.model": info.model,
                    "gen_ai.response.model": info.model,
                    "gen_ai.request.max_tokens": stops.max_tokens,
                }
            )

    def delivered(self, delta: Delta) -> None:
        if self._texts is not None:
            self._texts.append(delta.text)

    def end(self, outcome: str, complete: Complete | None) -> None:
        """Ends the span; one that failed has the status of an error, by which collectors keep it."""
        if self.span is None:
            return
        self.span.set_attribute("outrider.outcome", outcome)
        if self._texts is not None:
            answer = {**_message("assistant", "".join(self._texts)), "finish_reason": outcome}
            self.span.set_attribute("gen_ai.output.messages", json.dumps([answer], ensure_ascii=False))
        if complete is not None:
            _note_reply(self.span, complete)
        elif outcome != "cancelled":
            self.span.set_status(Status(StatusCode.ERROR))
            self.span.set_attribute("error.type", outcome)
        self.span.end()


def _messages(given: Input) -> list[dict[str, object]]:
    """What was asked, as the conventions have it. Token ids are no text: a caller who sends those has it himself."""
    if isinstance(given, Chat):
        return [_message(each.role, each.content) for each in given.messages]
    return [_message("user", given.text)] if isinstance(given, RawPrompt) else []


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


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
