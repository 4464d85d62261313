from __future__ import annotations

import pickle

import grpc.aio
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidArgument
from engine.sampling import SamplingParams
from router.acceptance import SpeculationTotals
from router.events import Complete, Delta, Timing, Usage
from router.policy import DRAFTERS, SpeculationControl
from router.requests import Chat, ChatMessage, GenerateRequest, Input, RawPrompt, TokenIds, check_request
from router.service import ModelInfo
from router.translate import (
    Unreadable,
    as_typed,
    event_message,
    generate_request,
    model_info_message,
    read_generate_request,
    read_tokenize_request,
    tokenize_request,
)
from router.wire import find_bad_text
from rpc.pb import generation_pb2 as pb

FULL = GenerateRequest(
    input=RawPrompt("hi"),
    sampling=SamplingParams(0.7, 40, 0.9, 0.05, seed=-3),
    max_tokens=12,
    min_tokens=2,
    ignore_eos=True,
    stop=("a", "b"),
    stop_token_ids=(4, 5),
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    speculation=SpeculationControl(True, 3, "ngram", num_speculative_tokens=2, run_ahead=False),
    workload="sql",
    smooth_stream=True,
    resume_from=(8, 0, 9),
    request_id="r",
)


def generate_message(request: GenerateRequest) -> pb.GenerateRequest:
    """The message a client would send for `request`."""
    sampling, control = request.sampling, request.speculation
    message = pb.GenerateRequest(
        request_id=request.request_id,
        sampling_params=pb.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
        ),
        speculation=pb.Speculation(
            mode=pb.Speculation.MODE_AUTO if control.enabled else pb.Speculation.MODE_OFF,
            max_draft_tokens=control.max_draft_tokens,
            drafter=control.drafter,
            num_speculative_tokens=control.num_speculative_tokens,
            run_ahead=control.run_ahead,
            workload=request.workload,
        ),
        smooth_stream=request.smooth_stream,
        resume_from=request.resume_from,
    )
    match request.input:
        case RawPrompt(text):
            message.prompt = text
        case Chat(messages):
            turns = [pb.ChatMessage(role=turn.role, content=turn.content) for turn in messages]
            message.chat.CopyFrom(pb.ChatMessages(messages=turns))
        case TokenIds(input_ids):
            message.tokenized.CopyFrom(pb.TokenizedInput(input_ids=input_ids))
    return message


@pytest.mark.parametrize(
    "given_", [RawPrompt("hi"), Chat((ChatMessage("user", "x"), ChatMessage("assistant", ""))), TokenIds((1, 2))]
)
@pytest.mark.parametrize("request_", [FULL, GenerateRequest(RawPrompt(""))])
def test_requests_survive_the_wire(request_: GenerateRequest, given_: Input) -> None:
    sent = GenerateRequest(**{**_fields(request_), "input": given_})
    assert generate_request(read_generate_request(generate_message(sent).SerializeToString())) == sent


def _fields(request: GenerateRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__slots__}


def test_unset_fields_take_the_documented_defaults() -> None:
    assert generate_request(pb.GenerateRequest(prompt="x")) == GenerateRequest(RawPrompt("x"))


def test_explicit_zeros_are_not_defaults() -> None:
    params = pb.SamplingParams(max_tokens=0, top_p=0.0, seed=0, skip_special_tokens=False)
    message = pb.GenerateRequest(prompt="x", sampling_params=params, speculation=pb.Speculation(max_draft_tokens=0))
    request = generate_request(message)
    assert (request.max_tokens, request.sampling.top_p, request.sampling.seed) == (0, 0.0, 0)
    assert request.skip_special_tokens is False
    assert request.speculation.max_draft_tokens == 0


def test_no_k_at_all_is_refused_by_name() -> None:
    speculation = pb.Speculation(num_speculative_tokens=0)
    request = generate_request(pb.GenerateRequest(prompt="x", speculation=speculation))
    with pytest.raises(InvalidArgument) as refused:
        check_request(request, DRAFTERS)
    assert (refused.value.field, refused.value.found) == ("speculation.num_speculative_tokens", 0)
    assert "MODE_OFF" in refused.value.allowed


def test_an_unknown_class_of_request_is_refused_with_those_there_are() -> None:
    request = generate_request(pb.GenerateRequest(prompt="x", speculation=pb.Speculation(workload="poem")))
    with pytest.raises(InvalidArgument, match=r"speculation\.workload: found 'poem', allowed is code, chat"):
        check_request(request, DRAFTERS, ("code", "chat"))
    check_request(request, DRAFTERS, ("code", "poem"))
    with pytest.raises(InvalidArgument, match="allowed is none"):
        check_request(request, DRAFTERS)


@pytest.mark.parametrize(
    ("sent", "run_ahead"), [({}, True), ({"run_ahead": True}, True), ({"run_ahead": False}, False)]
)
def test_the_draft_runs_ahead_unless_told_not_to(sent: dict[str, bool], run_ahead: bool) -> None:
    message = pb.GenerateRequest(prompt="x", speculation=pb.Speculation(**sent))
    assert generate_request(message).speculation.run_ahead is run_ahead


@pytest.mark.parametrize(("mode", "enabled"), [(0, True), (1, True), (2, False)])
def test_speculation_mode(mode: int, enabled: bool) -> None:
    message = pb.GenerateRequest(prompt="x", speculation=pb.Speculation(mode=mode))
    assert generate_request(message).speculation.enabled is enabled


def test_unknown_mode_and_missing_input_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"speculation\.mode"):
        generate_request(pb.GenerateRequest(prompt="x", speculation=pb.Speculation(mode=9)))
    with pytest.raises(InvalidArgument, match="input: found 'nothing'"):
        generate_request(pb.GenerateRequest())
    with pytest.raises(InvalidArgument, match="input: found 'nothing'"):
        tokenize_request(pb.TokenizeRequest())


@given(st.decimals(min_value=0, max_value=100, places=3))
@settings(max_examples=200, deadline=None)
def test_numbers_come_back_as_they_were_typed(typed: object) -> None:
    number = float(typed)  # type: ignore[arg-type]
    assert as_typed(pb.SamplingParams(temperature=number).temperature) == number


def test_numbers_with_more_digits_stay_what_they_were_on_the_wire() -> None:
    exact = pb.SamplingParams(temperature=1 / 3).temperature
    assert as_typed(exact) == exact


def spoiled(message: Message, text: bytes = b"SPOIL") -> bytes:
    return message.SerializeToString().replace(text, b"\xff" + text[1:])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(prompt="a SPOIL"), "prompt"),
        (pb.GenerateRequest(request_id="SPOIL", prompt="fine"), "request_id"),
        (
            pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="SPOIL")])),
            "chat.messages.content",
        ),
        (
            pb.GenerateRequest(
                prompt="ü",
                sampling_params=pb.SamplingParams(temperature=1, seed=7, max_tokens=500, stop=["ok", "SPOIL"]),
            ),
            "sampling_params.stop",
        ),
        (pb.GenerateRequest(prompt="x", speculation=pb.Speculation(drafter="SPOIL")), "speculation.drafter"),
    ],
)
def test_text_that_is_no_utf8_is_named(message: pb.GenerateRequest, field: str) -> None:
    read = pickle.loads(pickle.dumps(read_generate_request(spoiled(message))))
    with pytest.raises(InvalidArgument) as caught:
        generate_request(read)
    assert caught.value.field == field
    assert "UTF-8" in str(caught.value)


async def test_a_server_that_reads_so_can_name_the_field() -> None:
    async def generate(request: pb.GenerateRequest | Unreadable, context: grpc.aio.ServicerContext) -> None:
        try:
            generate_request(request)
        except InvalidArgument as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    handler = grpc.unary_unary_rpc_method_handler(generate, request_deserializer=read_generate_request)
    server = grpc.aio.server()
    server.add_registered_method_handlers("outrider.v1.Generation", {"Generate": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/outrider.v1.Generation/Generate")(
                    spoiled(pb.GenerateRequest(prompt="SPOIL"))
                )
    finally:
        await server.stop(None)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("prompt: found 'bytes that are no UTF-8'")


def test_tokenize_text_that_is_no_utf8_is_named() -> None:
    with pytest.raises(InvalidArgument, match="text"):
        tokenize_request(read_tokenize_request(spoiled(pb.TokenizeRequest(text="SPOIL"))))


@pytest.mark.parametrize("data", [b"\x12", b"\x12\x7fab", b"\xff" * 12, b"\x0c"])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    read = read_generate_request(data)
    assert isinstance(read, Unreadable)
    with pytest.raises(InvalidArgument, match="request: found 'bytes that are no message'"):
        generate_request(read)


@given(st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_bytes_make_reading_raise(data: bytes) -> None:
    assert isinstance(read_generate_request(data), pb.GenerateRequest | Unreadable)


def test_tokenize_request_says_what_and_how() -> None:
    assert tokenize_request(pb.TokenizeRequest(text="a")) == (RawPrompt("a"), False)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")])
    message = pb.TokenizeRequest(chat=chat, add_special_tokens=True)
    assert tokenize_request(message) == (Chat((ChatMessage("user", "x"),)), True)


def test_events_become_messages() -> None:
    delta = event_message("r", Delta("text", (1, 2)))
    assert (delta.request_id, delta.delta.text, list(delta.delta.token_ids)) == ("r", "text", [1, 2])
    totals = SpeculationTotals(switched_off_reason="acceptance")
    totals.count_round(3)
    totals.count_proposal("ngram", 4, 2)
    totals.count_dropped("late")
    totals.count_dropped("stale")
    for is_hit in (True, False, True, True):
        totals.count_ahead(is_hit)
    totals.wasted_draft_tokens = 17
    event = Complete("stop", "END", Usage(5, 4, 3), totals, Timing(1, 2, 3, 4, 5, 6), failovers=2)
    complete = event_message("r", event).complete
    assert (complete.finish_reason, complete.matched_stop) == ("stop", "END")
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens, complete.usage.cached_tokens) == (5, 4, 3)
    assert complete.failovers == 2
    stats = complete.speculation
    assert (stats.rounds, stats.draft_tokens, stats.accepted_tokens, stats.dropped_proposals) == (1, 4, 2, 2)
    assert list(stats.accepted_per_position) == [1, 1, 0, 0]
    assert stats.drafters["ngram"].draft_tokens == 4
    assert (stats.mean_acceptance_length, stats.switched_off_reason) == (3.0, "acceptance")
    assert (stats.rounds_ahead, stats.early_hits, stats.early_hit_rate, stats.wasted_draft_tokens) == (4, 3, 0.75, 17)
    timing = complete.timing
    assert (timing.ttft_ms, timing.decode_tokens_per_s, timing.itl_ms_p50) == (1, 2, 3)
    assert (timing.itl_ms_p95, timing.queue_ms, timing.router_ms_p50) == (4, 5, 6)


def test_no_matched_stop_stays_unset() -> None:
    event = Complete("length", None, Usage(1, 1, 0), SpeculationTotals(), Timing(0, 0, 0, 0, 0, 0))
    assert not event_message("", event).complete.HasField("matched_stop")


def test_model_info() -> None:
    info = ModelInfo("big", "small", 100, 64, 32, (2, 0), ("ngram",), "1")
    message = model_info_message(info)
    assert (message.model, message.draft_model, message.vocab_size, message.version) == ("big", "small", 100, "1")
    assert (list(message.eos_token_ids), list(message.drafters)) == ([2, 0], ["ngram"])
    assert (message.max_context_length, message.draft_max_context_length) == (64, 32)


def test_a_number_without_an_end_is_given_up_after_ten_bytes() -> None:
    """What lies behind it is not looked at, though it is bad text: a number's length must not cost time."""
    number, bad_prompt = b"\x98\x06", b"\x12\x02\xff\xfe"  # an unknown field with a number; field 2, no UTF-8
    assert find_bad_text(number + b"\x80" * 9 + b"\x01" + bad_prompt, pb.GenerateRequest) == "prompt"
    assert find_bad_text(number + b"\x80" * 10 + b"\x01" + bad_prompt, pb.GenerateRequest) is None
