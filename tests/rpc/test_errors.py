"""One mapping for all kinds of calls, there and back; nothing internal leaves a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from engine import errors
from engine.errors import (
    DeadlineExceeded,
    EngineFault,
    InternalError,
    InvalidArgument,
    LimitExceeded,
    ModelNotFound,
    OutriderError,
    Overloaded,
    PairMismatch,
    PermissionDenied,
    SlowReader,
    Unauthenticated,
    Unavailable,
    UnknownSession,
)
from rpc.errors import ErrorInterceptor, decode_failure, encode_failure, error_of_call

Code = grpc.StatusCode

CASES = [
    (InvalidArgument("sampling_params.top_p", 2.0, "above 0, at most 1"), Code.INVALID_ARGUMENT, InvalidArgument),
    (InvalidArgument("stop", "a, allowed is b", "c"), Code.INVALID_ARGUMENT, InvalidArgument),
    (PairMismatch("token 5 differs"), Code.FAILED_PRECONDITION, PairMismatch),
    (ModelNotFound("no such folder"), Code.FAILED_PRECONDITION, PairMismatch),
    (Overloaded("full", 2.5), Code.RESOURCE_EXHAUSTED, Overloaded),
    (PermissionDenied("not a router"), Code.PERMISSION_DENIED, PermissionDenied),
    (LimitExceeded("60 requests a minute", 2.5), Code.RESOURCE_EXHAUSTED, Overloaded),
    (SlowReader("nothing was read", 2.5), Code.RESOURCE_EXHAUSTED, Overloaded),
    (Unauthenticated("no key"), Code.UNAUTHENTICATED, Unauthenticated),
    (Unavailable("gone"), Code.UNAVAILABLE, Unavailable),
    (UnknownSession("session 5"), Code.NOT_FOUND, UnknownSession),
    (DeadlineExceeded("too late"), Code.DEADLINE_EXCEEDED, DeadlineExceeded),
    (EngineFault("session 3: NaN"), Code.INTERNAL, EngineFault),
    (InternalError("abc123"), Code.INTERNAL, InternalError),
]
IDS = [f"{type(case[0]).__name__}-{i}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("error", "code", "back"), CASES, ids=IDS)
def test_failures_survive_the_wire(error: OutriderError, code: grpc.StatusCode, back: type) -> None:
    message = encode_failure(9, error)
    assert (message.session, message.code) == (9, code.value[0])
    decoded = decode_failure(message)
    assert type(decoded) is back
    assert str(decoded) == str(error)


def test_every_error_class_has_a_code() -> None:
    classes = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, OutriderError)}
    assert classes - {OutriderError} == {type(error) for error, _, _ in CASES}


def _handlers(error: BaseException) -> grpc.GenericRpcHandler:
    """Every kind of behaviour grpc.aio knows, each raising `error` once it has its input."""

    async def unary(request, context):
        raise error

    async def generator(request, context):
        yield b"first"
        raise error

    async def writer(request, context):
        await context.write(b"first")
        raise error

    async def consuming(requests, context):
        async for _ in requests:
            raise error

    async def consuming_generator(requests, context):
        async for request in requests:
            yield request
            raise error

    return grpc.method_handlers_generic_handler(
        "test.Kinds",
        {
            "unary_unary": grpc.unary_unary_rpc_method_handler(unary),
            "unary_stream": grpc.unary_stream_rpc_method_handler(generator),
            "unary_stream_writer": grpc.unary_stream_rpc_method_handler(writer),
            "stream_unary": grpc.stream_unary_rpc_method_handler(consuming),
            "stream_stream": grpc.stream_stream_rpc_method_handler(consuming_generator),
            "stream_stream_writer": grpc.stream_stream_rpc_method_handler(consuming),
        },
    )


KINDS = [
    "unary_unary",
    "unary_stream",
    "unary_stream_writer",
    "stream_unary",
    "stream_stream",
    "stream_stream_writer",
]


@asynccontextmanager
async def raising_server(error: BaseException) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),), options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((_handlers(error),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def call_kind(channel: grpc.aio.Channel, kind: str) -> grpc.aio.AioRpcError:
    method = getattr(channel, "_".join(kind.split("_")[:2]))(f"/test.Kinds/{kind}")
    call = method(iter([b"x"]) if kind.startswith("stream") else b"x")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (drain(call) if "_stream" in kind else call)
    return raised.value


async def drain(call: grpc.aio.UnaryStreamCall) -> None:
    async for _ in call:
        pass


@pytest.mark.parametrize("kind", KINDS)
async def test_all_kinds_of_calls_carry_code_and_trailers(kind: str) -> None:
    for error, code, back in CASES:
        async with raising_server(error) as channel:
            failed = await call_kind(channel, kind)
        assert failed.code() == code
        assert failed.details() == str(error)
        decoded = error_of_call(failed)
        assert type(decoded) is back
        assert str(decoded) == str(error)
        trailers = dict(failed.trailing_metadata())
        if isinstance(error, InvalidArgument):
            assert trailers["outrider-field"] == error.field
        if isinstance(error, Overloaded):
            assert float(trailers["outrider-retry-after-s"]) == 2.5


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_leaves_only_an_id(kind: str, caplog) -> None:
    async with raising_server(RuntimeError("secret of line 12")) as channel:
        failed = await call_kind(channel, kind)
    assert failed.code() == Code.INTERNAL
    everything = f"{failed.details()} {failed.debug_error_string()} {failed.trailing_metadata()}"
    assert "secret" not in everything
    assert "Traceback" not in everything
    decoded = error_of_call(failed)
    assert isinstance(decoded, InternalError)
    assert decoded.incident in caplog.text
    assert "secret of line 12" in caplog.text


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_stream"])
async def test_an_abort_of_the_servicer_is_left_alone(kind: str) -> None:
    async def unary(request, context):
        await context.abort(Code.OUT_OF_RANGE, "on purpose")

    async def generator(request, context):
        yield b"first"
        await context.abort(Code.OUT_OF_RANGE, "on purpose")

    behaviour = unary if kind == "unary_unary" else generator
    handler = grpc.method_handlers_generic_handler(
        "test.Kinds", {kind: getattr(grpc, f"{kind}_rpc_method_handler")(behaviour)}
    )
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),), options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        failed = await call_kind(channel, kind)
    assert (failed.code(), failed.details()) == (Code.OUT_OF_RANGE, "on purpose")
    await server.stop(None)


async def test_cancellation_passes_through() -> None:
    cancelled = asyncio.Event()
    started = asyncio.Event()

    async def unary(request, context):
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server = grpc.aio.server(interceptors=(ErrorInterceptor(),), options=(("grpc.so_reuseport", 0),))
    handler = grpc.method_handlers_generic_handler(
        "test.Kinds", {"unary_unary": grpc.unary_unary_rpc_method_handler(unary)}
    )
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/test.Kinds/unary_unary")(b"x")
        await started.wait()
        call.cancel()
        await cancelled.wait()
    await server.stop(None)
