"""Owns the translation between the public API's messages and the router's values, and the reading of requests.

Protobuf refuses text that is no UTF-8 before any handler runs, with a bare INTERNAL. So requests are read here:
`read_generate_request` and `read_tokenize_request` are the request deserializers a server registers; instead of
raising they hand on an `Unreadable`, and the translation of that raises InvalidArgument naming the field.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from engine.errors import InvalidArgument
from engine.sampling import SamplingParams
from router.events import Complete, Event
from router.policy import SpeculationControl
from router.requests import Chat, ChatMessage, GenerateRequest, Input, RawPrompt, TokenIds
from router.service import ModelInfo
from router.wire import find_bad_text
from rpc.pb import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A request that could not be parsed; travels in its place to the handler, through pickle if need be."""

    field: str
    found: str
    allowed: str

    def refuse(self) -> InvalidArgument:
        return InvalidArgument(self.field, self.found, self.allowed)


def read_generate_request(data: bytes) -> pb.GenerateRequest | Unreadable:
    try:
        return pb.GenerateRequest.FromString(data)
    except DecodeError:
        return _unreadable(find_bad_text(data, pb.GenerateRequest))


def read_tokenize_request(data: bytes) -> pb.TokenizeRequest | Unreadable:
    try:
        return pb.TokenizeRequest.FromString(data)
    except DecodeError:
        return _unreadable(find_bad_text(data, pb.TokenizeRequest))


def _unreadable(bad_text: str | None) -> Unreadable:
    if bad_text is None:
        return Unreadable("request", "bytes that are no message", "a message of this method's request type")
    return Unreadable(bad_text, "bytes that are no UTF-8", "valid UTF-8")


def generate_request(
    message: pb.GenerateRequest | Unreadable, *, deadline_s: float = 0.0, traceparent: str = ""
) -> GenerateRequest:
    """Raises InvalidArgument for a request that could not be read or has no input. Ranges are checked by the router."""
    if isinstance(message, Unreadable):
        raise message.refuse()
    params = message.sampling_params
    return GenerateRequest(
        input=_input(message),
        sampling=_sampling(params),
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        speculation=_speculation(message.speculation),
        workload=message.speculation.workload,
        smooth_stream=message.smooth_stream,
        resume_from=tuple(message.resume_from),
        request_id=message.request_id,
        deadline_s=deadline_s,
        traceparent=traceparent,
    )


def tokenize_request(message: pb.TokenizeRequest | Unreadable) -> tuple[RawPrompt | Chat, bool]:
    """What to tokenize, and whether special tokens are added. Raises InvalidArgument."""
    if isinstance(message, Unreadable):
        raise message.refuse()
    which = message.WhichOneof("input")
    if which is None:
        raise InvalidArgument("input", "nothing", "text or chat")
    given = RawPrompt(message.text) if which == "text" else _chat(message.chat)
    return given, message.add_special_tokens


def event_message(request_id: str, event: Event) -> pb.GenerateResponse:
    if isinstance(event, Complete):
        return pb.GenerateResponse(request_id=request_id, complete=_complete(event))
    delta = pb.Delta(text=event.text, token_ids=event.token_ids)
    return pb.GenerateResponse(request_id=request_id, delta=delta)


def model_info_message(info: ModelInfo) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        model=info.model,
        draft_model=info.draft_model,
        vocab_size=info.vocab_size,
        max_context_length=info.max_context_length,
        draft_max_context_length=info.draft_max_context_length,
        eos_token_ids=info.eos_token_ids,
        drafters=info.drafters,
        version=info.version,
    )


def _input(message: pb.GenerateRequest) -> Input:
    match message.WhichOneof("input"):
        case "prompt":
            return RawPrompt(message.prompt)
        case "chat":
            return _chat(message.chat)
        case "tokenized":
            return TokenIds(tuple(message.tokenized.input_ids))
    raise InvalidArgument("input", "nothing", "one of prompt, chat and tokenized")


def _chat(message: pb.ChatMessages) -> Chat:
    return Chat(tuple(ChatMessage(turn.role, turn.content) for turn in message.messages))


def _sampling(params: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=as_typed(params.temperature),
        top_k=params.top_k,
        top_p=as_typed(params.top_p) if params.HasField("top_p") else 1.0,
        min_p=as_typed(params.min_p),
        seed=params.seed if params.HasField("seed") else None,
    )


def as_typed(value: float) -> float:
    """The number a person typed, out of the float32 it travelled as: 0.9, not 0.8999999762."""
    short = float(f"{value:.6g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value


def _speculation(message: pb.Speculation) -> SpeculationControl:
    if message.mode not in pb.Speculation.Mode.values():
        raise InvalidArgument("speculation.mode", message.mode, "MODE_AUTO or MODE_OFF")
    return SpeculationControl(
        enabled=message.mode != pb.Speculation.MODE_OFF,
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
        drafter=message.drafter or "auto",
        num_speculative_tokens=message.num_speculative_tokens if message.HasField("num_speculative_tokens") else None,
        run_ahead=message.run_ahead if message.HasField("run_ahead") else True,
    )


def _complete(event: Complete) -> pb.Complete:
    usage, timing = event.usage, event.timing
    return pb.Complete(
        finish_reason=event.finish_reason,
        matched_stop=event.matched_stop,
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        speculation=_speculation_stats(event),
        timing=pb.Timing(
            ttft_ms=timing.ttft_ms,
            decode_tokens_per_s=timing.decode_tokens_per_s,
            itl_ms_p50=timing.itl_ms_p50,
            itl_ms_p95=timing.itl_ms_p95,
            queue_ms=timing.queue_ms,
            router_ms_p50=timing.router_ms_p50,
        ),
        failovers=event.failovers,
    )


def _speculation_stats(event: Complete) -> pb.SpeculationStats:
    totals = event.speculation
    return pb.SpeculationStats(
        rounds=totals.rounds,
        draft_tokens=totals.draft_tokens,
        accepted_tokens=totals.accepted_tokens,
        drafted_per_position=totals.drafted_per_position,
        accepted_per_position=totals.accepted_per_position,
        acceptance_rate=totals.acceptance_rate,
        mean_acceptance_length=totals.mean_acceptance_length,
        switched_off_reason=totals.switched_off_reason,
        drafters={
            name: pb.DrafterStats(
                rounds=drafter.rounds,
                draft_tokens=drafter.draft_tokens,
                accepted_tokens=drafter.accepted_tokens,
            )
            for name, drafter in totals.drafters.items()
        },
        dropped_proposals=sum(totals.dropped.values()),
        mean_num_speculative_tokens=totals.mean_num_speculative_tokens,
        rounds_ahead=totals.rounds_ahead,
        early_hits=totals.early_hits,
        early_hit_rate=totals.early_hit_rate,
        wasted_draft_tokens=totals.wasted_draft_tokens,
    )
