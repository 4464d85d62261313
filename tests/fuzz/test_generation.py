"""The public API under garbage, with a real router over real engines, beside a neighbour that must not notice."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from router.requests import Chat, GenerateRequest, RawPrompt, TokenIds
from router.translate import (
    event_message,
    generate_request,
    read_generate_request,
    read_tokenize_request,
    tokenize_request,
)
from rpc.errors import status_of, trailers_of
from rpc.pb import generation_pb2 as pb
from tests.fuzz.asking import generate_message, tokenize_message
from tests.fuzz.books import check_refusal
from tests.fuzz.cases import cases
from tests.fuzz.mutations import spoil_bytes, spoil_fields
from tests.fuzz.neighbour import neighbour
from tests.fuzz.oracle import TARGET, continuation, is_foreseeable
from tests.fuzz.stage import MAX_GROWTH_BYTES, Stage, resident_bytes, running_stage

SHARE = 0.05
AT_ONCE = 4
ENOUGH_TOKENS = 24  # of an output, after which the caller hangs up
SERVICE = "outrider.v1.Generation"
METHODS = (("Generate", generate_message), ("Generate", generate_message), ("Tokenize", tokenize_message))


class PublicServicer:
    """Calls the router as the deployment does, without Serve and without keys."""

    def __init__(self, stage: Stage) -> None:
        self._router = stage.router

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            asked = generate_request(request)
            async with aclosing(self._router.generate(asked)) as events:
                async for event in events:
                    yield event_message(asked.request_id, event)
        except Exception as error:
            _fail(error, context)

    async def Tokenize(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> pb.TokenizeResponse:
        try:
            given, add_special_tokens = tokenize_request(request)
            ids, tokens = await self._router.tokenize(given, add_special_tokens=add_special_tokens)
            return pb.TokenizeResponse(input_ids=ids, tokens=tokens)
        except Exception as error:
            _fail(error, context)
            return pb.TokenizeResponse()


def _fail(error: Exception, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.message)
    context.set_trailing_metadata(tuple(trailers_of(status)))


@asynccontextmanager
async def public_server(stage: Stage) -> AsyncIterator[str]:
    server, servicer = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), PublicServicer(stage)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            servicer.Generate, read_generate_request, pb.GenerateResponse.SerializeToString
        ),
        "Tokenize": grpc.unary_unary_rpc_method_handler(
            servicer.Tokenize, read_tokenize_request, pb.TokenizeResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def plan_calls(number: int) -> list[tuple[str, bytes]]:
    """Methods and bytes of their requests: a third of them sound, which are sure to be answered."""
    rng, calls = cases.rng("generation"), list[tuple[str, bytes]]()
    for _ in range(number):
        method, make = rng.choice(METHODS)
        message = make(rng)
        kind = rng.randrange(6)
        if kind in (2, 3):
            spoil_fields(message, rng)
        data = message.SerializeToString()
        calls.append((method, spoil_bytes(data, rng) if kind > 2 else data))
    return calls


async def test_no_crash_no_leak_no_wrong_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    calls = plan_calls(cases.share(SHARE))
    async with running_stage(tmp_path) as stage, public_server(stage) as address:
        before, answers = resident_bytes(), Counter[str]()
        waiting = iter(calls)

        async def caller() -> None:
            async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                for method, data in waiting:
                    answers[await call(stage, channel, method, data)] += 1

        async with neighbour(stage, cases.seed):
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(caller())
            await stage.check_integrity()
        assert stage.router.running_requests == stage.router.queued_requests == 0
        assert resident_bytes() - before < MAX_GROWTH_BYTES
    assert answers["OK"] > len(calls) // 4
    assert answers["INVALID_ARGUMENT"] > len(calls) // 10
    assert not caplog.records


async def call(stage: Stage, channel: grpc.aio.Channel, method: str, data: bytes) -> str:
    """One call and what comes of it: "OK", "hung up", or the code of a refusal that can be acted on."""
    try:
        async with asyncio.timeout(60):
            if method == "Tokenize":
                await channel.unary_unary(f"/{SERVICE}/{method}")(data)
                return "OK"
            return await _generate(stage, channel.unary_stream(f"/{SERVICE}/{method}")(data), data)
    except grpc.aio.AioRpcError as error:
        try:
            check_refusal(error.code(), error.details() or "")
        except AssertionError as refusal:
            refusal.add_note(f"{method}, seed {cases.seed}: {data[: 1 << 12].hex()}")
            raise
        return error.code().name
    except BaseException as error:
        error.add_note(f"{method}, seed {cases.seed}: {data[: 1 << 12].hex()}")
        raise


async def _generate(stage: Stage, answer: grpc.aio.UnaryStreamCall[bytes, bytes], data: bytes) -> str:
    tokens: list[int] = []
    async for reply in answer:
        message = pb.GenerateResponse.FromString(reply)
        tokens += message.delta.token_ids
        if message.WhichOneof("response") == "complete":
            assert message.complete.usage.completion_tokens >= len(tokens)
            check_output(stage, data, tokens)
            return "OK"
        if len(tokens) > ENOUGH_TOKENS:
            answer.cancel()
            check_output(stage, data, tokens)
            return "hung up"
    raise AssertionError("an output without an end")


def check_output(stage: Stage, data: bytes, tokens: Sequence[int]) -> None:
    """Raises unless an output is the target's own, as far as a request has only one."""
    asked = generate_request(read_generate_request(data))
    plain_stops = not asked.stop and not asked.stop_token_ids
    if not plain_stops or not is_foreseeable(asked.sampling):
        return
    prompt = [*prompt_of(stage, asked), *asked.resume_from]
    assert list(tokens) == continuation(TARGET, stage.tokenizer.vocab_size, prompt, len(tokens), asked.sampling)


def prompt_of(stage: Stage, asked: GenerateRequest) -> list[int]:
    match asked.input:
        case RawPrompt(text):
            return stage.tokenizer.encode_prompt(text)
        case Chat(messages):
            return stage.tokenizer.encode_chat([{"role": turn.role, "content": turn.content} for turn in messages])
        case TokenIds(input_ids):
            return list(input_ids)
