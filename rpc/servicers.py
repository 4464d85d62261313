"""Owns the two services engines offer to routers. Each translates, posts to its engine loop, and translates back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from engine.errors import DeadlineExceeded, InvalidArgument
from engine.loop import Command, DraftLoop, TargetLoop
from engine.ports import DraftEngine, DraftOutput, TargetEngine, TargetOutput
from engine.proposal import EarlyProposals, State, Verdict
from rpc import codecs, tracing
from rpc.outbox import MAX_WAITING_BYTES
from rpc.pb import drafting_pb2, drafting_pb2_grpc, session_pb2, verification_pb2, verification_pb2_grpc
from rpc.streams import RouterStream, ServedSession

_FIRST_ROUND = State()  # stands for the round that opens a session
_PLAIN_RUN = State(2**32)  # stands for a run of plain decoding, which no single verdict ends

_Verified = ServedSession[TargetOutput, verification_pb2.VerificationReply]
_Drafted = ServedSession[DraftOutput, drafting_pb2.DraftReply]


class VerificationServicer(verification_pb2_grpc.VerificationServicer):
    """Verification over one target engine."""

    name = "outrider.v1.Verification"

    def __init__(self, loop: TargetLoop, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.loop, self._max_waiting_bytes = loop, max_waiting_bytes

    def add_to(self, server: grpc.aio.Server) -> None:
        verification_pb2_grpc.add_VerificationServicer_to_server(self, server)

    async def Stream(  # noqa: N802 - named by the proto
        self,
        request_iterator: AsyncIterator[verification_pb2.VerificationRequests],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await _VerificationStream(self.loop, self._max_waiting_bytes).run(request_iterator, context)

    async def GetInfo(  # noqa: N802
        self, request: session_pb2.EngineInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> session_pb2.EngineInfo:
        return codecs.encode_info(self.loop.info)


class DraftingServicer(drafting_pb2_grpc.DraftingServicer):
    """Drafting over one draft engine."""

    name = "outrider.v1.Drafting"

    def __init__(self, loop: DraftLoop, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.loop, self._max_waiting_bytes = loop, max_waiting_bytes

    def add_to(self, server: grpc.aio.Server) -> None:
        drafting_pb2_grpc.add_DraftingServicer_to_server(self, server)

    async def Stream(  # noqa: N802
        self,
        request_iterator: AsyncIterator[drafting_pb2.DraftRequests],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await _DraftingStream(self.loop, self._max_waiting_bytes).run(request_iterator, context)

    async def GetInfo(  # noqa: N802
        self, request: session_pb2.EngineInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> session_pb2.EngineInfo:
        return codecs.encode_info(self.loop.info)


class _VerificationStream(RouterStream[TargetEngine, TargetOutput, verification_pb2.VerificationReply]):
    def reply(self, **kind: Any) -> verification_pb2.VerificationReply:
        return verification_pb2.VerificationReply(**kind)

    def frame(self, replies: list[verification_pb2.VerificationReply]) -> verification_pb2.VerificationReplies:
        return verification_pb2.VerificationReplies(replies=replies)

    def encode_output(self, session: _Verified, output: TargetOutput) -> verification_pb2.VerificationReply:
        first, verdict = session.num_outputs == 0, output.verdict
        if tracing.enabled():
            _trace_verdict(session, _FIRST_ROUND if first else verdict.base, verdict)
        cached_tokens = output.cached_tokens if first else 0
        return self.reply(verdict=codecs.encode_verdict(session.number, verdict, cached_tokens))

    def command_of(self, session: _Verified, kind: str, request: Any) -> Command[TargetEngine]:
        match kind:
            case "open":
                return self._open_command(session, request)
            case "propose":
                return self._propose_command(session, request)
            case "early":
                return self._early_command(request)
            case _:
                return self._decode_command(session, request)

    def _open_command(self, session: _Verified, request: verification_pb2.OpenTarget) -> Command[TargetEngine]:
        codecs.require(request, "sampling", "sampling")
        codecs.require(request, "stops", "stops")
        prompt, committed = tuple(request.prompt_token_ids), tuple(request.committed_token_ids)
        sampling, stops = codecs.decode_sampling(request.sampling), codecs.decode_stops(request.stops)
        self._arm_deadline(session, request.deadline_s)
        _note_request(session, request.traceparent)
        _begin_span(session, _FIRST_ROUND, "outrider.verify", request.traceparent, "")
        trace = _sampled(request.traceparent) if tracing.enabled() else ""
        return lambda engine, number: engine.open(number, prompt, committed, sampling, stops, trace)

    def _propose_command(self, session: _Verified, request: verification_pb2.Propose) -> Command[TargetEngine]:
        codecs.require(request, "proposal", "proposal")
        proposal = codecs.decode_proposal(request.proposal)
        _begin_span(session, proposal.base, "outrider.verify", request.traceparent, proposal.drafter)
        return lambda engine, number: engine.propose(number, proposal)

    def _early_command(self, request: session_pb2.EarlyProposals) -> Command[TargetEngine]:
        early = codecs.decode_early(request)
        return lambda engine, number: engine.propose_early(number, early)

    def _decode_command(self, session: _Verified, request: verification_pb2.Decode) -> Command[TargetEngine]:
        max_tokens = request.max_tokens
        if not max_tokens:
            session.spans.stop(_PLAIN_RUN)
        elif not session.spans.prolong(_PLAIN_RUN, max_tokens):
            _begin_span(session, _PLAIN_RUN, "outrider.decode", request.traceparent, "", num_outputs=max_tokens)
        return lambda engine, number: engine.decode(number, max_tokens)

    def _arm_deadline(self, session: _Verified, deadline_s: float) -> None:
        if not 0.0 <= deadline_s < math.inf:
            raise InvalidArgument("deadline_s", deadline_s, "0 (none) or seconds from now")
        if deadline_s:
            error = DeadlineExceeded(f"the request was not done within its {deadline_s:g} s")
            session.deadline = asyncio.get_running_loop().call_later(
                deadline_s, lambda: self.loop.close_session(session.engine_session, error)
            )


class _DraftingStream(RouterStream[DraftEngine, DraftOutput, drafting_pb2.DraftReply]):
    def reply(self, **kind: Any) -> drafting_pb2.DraftReply:
        return drafting_pb2.DraftReply(**kind)

    def frame(self, replies: list[drafting_pb2.DraftReply]) -> drafting_pb2.DraftReplies:
        return drafting_pb2.DraftReplies(replies=replies)

    def encode_output(self, session: _Drafted, output: DraftOutput) -> drafting_pb2.DraftReply:
        if isinstance(output, EarlyProposals):
            if tracing.enabled():
                _trace_early(session, output)
            return self.reply(early=codecs.encode_early(session.number, output))
        if tracing.enabled():
            session.spans.end(
                output.base,
                {
                    "outrider.num_proposed": len(output.tokens),
                    "outrider.forward_ms": output.draft_time_s * 1e3,
                    "outrider.drafter": output.drafter,
                },
            )
            session.spans.supersede(output.base.length)
        message = codecs.encode_proposal(output)
        return self.reply(proposal=drafting_pb2.SessionProposal(session=session.number, proposal=message))

    def command_of(self, session: _Drafted, kind: str, request: Any) -> Command[DraftEngine]:
        return self._open_command(session, request) if kind == "open" else self._advance_command(session, request)

    def _open_command(self, session: _Drafted, request: drafting_pb2.OpenDraft) -> Command[DraftEngine]:
        codecs.require(request, "sampling", "sampling")
        _note_request(session, request.traceparent)
        prompt, sampling = tuple(request.prompt_token_ids), codecs.decode_sampling(request.sampling)
        return lambda engine, number: engine.open(number, prompt, sampling)

    def _advance_command(self, session: _Drafted, request: drafting_pb2.Advance) -> Command[DraftEngine]:
        codecs.require(request, "base", "base")
        base, tail = codecs.decode_state(request.base), tuple(request.tail)
        num_tokens, threshold = request.num_speculative_tokens, request.confidence_threshold
        run_ahead = codecs.decode_run_ahead(request)
        if num_tokens:
            _begin_span(session, base, "outrider.draft", request.traceparent, "")
        arrived = time.monotonic()  # the engine may be amid a forward

        def command(engine: DraftEngine, number: int) -> None:
            ahead = run_ahead and run_ahead.later(time.monotonic() - arrived)
            engine.advance(number, base, tail, num_tokens, threshold, ahead)

        return command


def _sampled(traceparent: str) -> str:
    """What all ranks of a target are told: 55 characters of ASCII; "" of a trace that is not sampled, or is none."""
    context = tracing.sampled_context(traceparent)
    return "" if context is None else tracing.spelt(context)


def _note_request(session: ServedSession[Any, Any], traceparent: str) -> None:
    if tracing.enabled():
        session.spans.traceparent = traceparent


def _begin_span(
    session: ServedSession[Any, Any], base: State, name: str, traceparent: str, drafter: str, num_outputs: int = 1
) -> None:
    if tracing.enabled():
        attributes: dict[str, str | int | float] = {"outrider.session": session.number}
        if drafter:
            attributes["outrider.drafter"] = drafter
        session.spans.begin(base, name, traceparent, attributes, num_outputs=num_outputs)


def _trace_verdict(session: _Verified, base: State, verdict: Verdict) -> None:
    """Ends the span of the round or plain run; a round that the target began by itself gets one now."""
    spans = session.spans
    attributes: dict[str, str | int | float] = {
        "outrider.num_proposed": verdict.num_proposed,
        "outrider.num_accepted": verdict.num_accepted,
        "outrider.rows": verdict.rows,
        "outrider.forward_ms": verdict.forward_time_s * 1e3,
        "outrider.queue_ms": verdict.queue_time_s * 1e3,
    }
    if not spans.end(base, attributes) and not spans.end(_PLAIN_RUN, {}):
        seconds = verdict.queue_time_s + verdict.forward_time_s
        unasked: dict[str, str | int | float] = {"outrider.session": session.number, "outrider.early": True}
        spans.record("outrider.verify", seconds, attributes | unasked)
    spans.supersede(verdict.base.length)
    if verdict.finish_reason is not None:
        spans.stop(_PLAIN_RUN)


def _trace_early(session: _Drafted, early: EarlyProposals) -> None:
    attributes: dict[str, str | int | float] = {
        "outrider.session": session.number,
        "outrider.drafter": early.drafter,
        "outrider.num_branches": len(early.branches),
        "outrider.num_tokens": early.num_tokens,
    }
    session.spans.record("outrider.draft_ahead", early.draft_time_s, attributes)
