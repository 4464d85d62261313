"""Owns the rebuilding of one request from its spans: its rounds in order, what happened in between, what devices did.

All times are those of the router's spans, so that rounds never overlap; what draft and target say of themselves they
say in attributes, because their clocks may differ. Only `work`, which is for pictures, trusts their clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from deployments.traces.request_trace import SPECULATION, TARGET_LOST, Happening, RequestTrace, Round, Work
from deployments.traces.spans import Span
from deployments.traces.wanted import REQUEST, Wanted
from engine.errors import OutriderError

_WORK = {  # spans by who makes them
    "draft": "draft", "draft_ahead": "draft", "verify": "target", "decode": "target", "follow": "follower",
}  # fmt: skip

# By OpenTelemetry's semantic conventions for generative AI.
_PROMPT_TOKENS, _COMPLETION_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"


class NoSuchRequest(OutriderError):
    """No trace has the request that was asked for, or more than one request goes by the name."""


def rebuild(spans: Sequence[Span], wanted: Wanted, source: str) -> RequestTrace:
    """The request among `spans`, which hold its whole trace.

    Args:
        source: where they are from, for errors.

    Raises:
        NoSuchRequest: there is none, or several go by the name.
    """
    unique = list({(span.trace_id, span.span_id): span for span in spans}.values())
    request = _the_request(unique, wanted, source)
    in_trace = [span for span in unique if span.trace_id == request.trace_id]
    rounds = sorted((s for s in _children(in_trace, {request.span_id}) if s.name == "outrider.round"), key=_start)
    below = _children(in_trace, {request.span_id, *(span.span_id for span in rounds)})
    return RequestTrace(
        trace_id=request.trace_id,
        span_id=request.span_id,
        request_id=request.text("request_id"),
        outcome=request.text("outcome"),
        began=datetime.fromtimestamp(request.start_ns / 1e9, UTC),
        duration_ms=request.duration_ms,
        ttft_ms=None if (first_s := _reported(request, _FIRST_CHUNK_S)) is None else 1e3 * first_s,
        prompt_tokens=_count(request, _PROMPT_TOKENS),
        completion_tokens=_count(request, _COMPLETION_TOKENS),
        rounds=_rounds(request, rounds, below),
        happenings=_happenings(request),
        work=tuple(_work(span, request) for span in sorted(below, key=_start) if _kind(span) in _WORK),
        services=tuple(sorted({span.service for span in (request, *rounds, *below)})),
    )


def _the_request(spans: Sequence[Span], wanted: Wanted, source: str) -> Span:
    found = sorted((span for span in spans if wanted.is_request(span)), key=_start)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{span.trace_id}-{span.span_id}" for span in found)
        raise NoSuchRequest(f"{wanted.text} names {len(found)} requests, oldest first; give one of {names}")
    if spans:
        raise NoSuchRequest(
            f"{source} has {len(spans)} spans of trace {wanted.trace_id}, but none of a request so named: it is still "
            "running, or was not sampled, or its router's spans were lost"
        )
    raise NoSuchRequest(
        f"{source} has no request {wanted.text}; traced requests arrive seconds after they end, through a collector "
        "that samples a minute later, and not all of them"
    )


def _rounds(request: Span, spans: Sequence[Span], below: Sequence[Span]) -> tuple[Round, ...]:
    drafts = {span.parent_id: span.number("forward_ms") for span in below if span.name == "outrider.draft"}
    return tuple(_round(span, request, number, drafts.get(span.span_id, 0.0)) for number, span in enumerate(spans, 1))


def _round(span: Span, request: Span, number: int, draft_ms: float) -> Round:
    return Round(
        number=number,
        start_ms=(span.start_ns - request.start_ns) / 1e6,
        duration_ms=span.duration_ms,
        drafter=span.text("drafter"),
        num_speculative_tokens=int(span.number("num_speculative_tokens")),
        num_proposed=int(span.number("num_proposed")),
        num_accepted=int(span.number("num_accepted")),
        num_tokens=int(span.number("num_tokens")),
        reason=span.text("reason"),
        dropped=span.text("dropped"),
        is_early=bool(span.number("early")),
        is_stretch=span.number("plain_tokens") > 1,
        is_lost="outrider.num_tokens" not in span.attributes,
        forward_ms=span.number("forward_ms"),
        queue_ms=span.number("queue_ms"),
        draft_wait_ms=span.number("draft_wait_ms"),
        draft_ms=draft_ms,
        num_wasted=int(span.number("num_wasted")),
    )


def _happenings(request: Span) -> tuple[Happening, ...]:
    found = []
    for event in sorted(request.events, key=lambda each: each.at_ns):
        said = {name.removeprefix("outrider."): value for name, value in event.attributes.items()}
        if event.name == TARGET_LOST:
            what = f"{said.get('target', 'target')} lost: {said.get('error', '?')}"
        elif event.name == SPECULATION:
            reason, before = said.get("reason", ""), said.get("reason_before", "")
            what = f"speculation off: {reason}" if reason else f"speculation on again (was off: {before})"
        else:
            what = event.name
        found.append(Happening((event.at_ns - request.start_ns) / 1e6, event.name, what))
    return tuple(found)


def _work(span: Span, request: Span) -> Work:
    kind = _kind(span)
    opens = kind == "verify" and span.parent_id == request.span_id and not span.number("early")
    return Work(
        who=_WORK[kind],
        kind="prefill" if opens else kind,
        start_ms=(span.start_ns - request.start_ns) / 1e6,
        duration_ms=span.duration_ms,
        rank=int(span.number("rank")),
        is_early=bool(span.number("early")),
        num_branches=int(span.number("num_branches")),
        is_superseded=bool(span.number("superseded")),
    )


def _children(spans: Iterable[Span], parents: set[str]) -> list[Span]:
    return [span for span in spans if span.parent_id in parents and span.name != REQUEST]


def _kind(span: Span) -> str:
    return span.name.removeprefix("outrider.")


def _start(span: Span) -> int:
    return span.start_ns


def _number(span: Span | None, name: str) -> float:
    return 0.0 if span is None else span.number(name)


def _reported(span: Span, attribute: str) -> float | None:
    value = span.attributes.get(attribute)
    return None if value is None or isinstance(value, str) else float(value)


def _count(span: Span, attribute: str) -> int | None:
    return None if (value := _reported(span, attribute)) is None else int(value)
