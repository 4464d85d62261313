"""Every call that reaches a router says which request it was, through real gRPC and Serve's own context, so that its
trace can be found: the calls that fail above all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.errors import DeadlineExceeded, InvalidArgument, Overloaded, SlowReader, Unavailable
from router.events import Delta
from rpc.errors import request_id_in
from rpc.pb import generation_pb2 as pb
from rpc.pb import generation_pb2_grpc as pb_grpc
from tests.deployments.test_ingress import FailingRouter, Keyed, ingress

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import
Code = grpc.StatusCode


@asynccontextmanager
async def served(deployment: Any) -> AsyncIterator[grpc.aio.Channel]:
    """The deployment behind real gRPC, with Serve's own context between them, used the way its replicas do."""
    from ray.serve.grpc_util import RayServegRPCContext

    from deployments.ingress import add_generation_to_server

    def as_serve(context: Any) -> Any:
        made = RayServegRPCContext(context)
        made.set_trailing_metadata([("request_id", made.request_id() or "made-by-serve")])
        return made

    async def generate(request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        made = as_serve(context)
        async for reply in deployment.Generate(request, made):
            yield reply
        made._set_on_grpc_context(context)

    def unary(method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            made = as_serve(context)
            reply = await method(request, made)
            made._set_on_grpc_context(context)
            return reply

        return call

    methods = {"GetModelInfo": unary(deployment.GetModelInfo), "Tokenize": unary(deployment.Tokenize)}
    server = grpc.aio.server()
    add_generation_to_server(SimpleNamespace(Generate=generate, **methods), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def ending(call: Any) -> tuple[Code, dict[str, str]]:
    """Status and trailers of a call."""
    return await call.code(), dict(await call.trailing_metadata() or ())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, Code.OK),
        (InvalidArgument("prompt", "", "text"), Code.INVALID_ARGUMENT),
        (Overloaded("full", 1.5), Code.RESOURCE_EXHAUSTED),
        (SlowReader("nothing was read", 1.0), Code.RESOURCE_EXHAUSTED),
        (Unavailable("gone"), Code.UNAVAILABLE),
        (DeadlineExceeded("too late"), Code.DEADLINE_EXCEEDED),
        (ValueError("not for people"), Code.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_every_call_names_its_request_however_it_ends(error: Exception | None, code: Code) -> None:
    async with served(ingress(FailingRouter([Delta("a", (1,))], error))) as channel:
        call = pb_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(prompt="x", request_id="mine/1"))
        assert (await call.read()).request_id == "mine/1"
        found, trailers = await ending(call)
    assert (found, trailers["outrider-request-id"]) == (code, "mine/1")
    assert ("outrider-retry-after-s" in trailers) == isinstance(error, Overloaded)


@pytest.mark.parametrize(
    ("request_id", "metadata", "named"),
    [
        ("", [], "made-by-serve"),
        ("", [("request_id", "of-the-metadata")], "of-the-metadata"),
        ("of the message", [("request_id", "of-the-metadata")], "of the message"),
        ("grüße\n🦊 100%", [], "grüße\n🦊 100%"),
        ("x" * 100_000, [], "x" * 256),
    ],
    ids=["none", "metadata", "message", "any script", "long"],
)
async def test_a_request_is_named_by_its_caller_or_else_by_serve(
    request_id: str, metadata: list[tuple[str, str]], named: str
) -> None:
    """All of it passes through gRPC, which takes printable ASCII only, and 8 KiB of that."""
    router = FailingRouter([], Unavailable("gone"))
    async with served(ingress(router)) as channel:
        request = pb.GenerateRequest(prompt="x", request_id=request_id)
        code, trailers = await ending(pb_grpc.GenerationStub(channel).Generate(request, metadata=metadata))
    assert (code, request_id_in(trailers)) == (Code.UNAVAILABLE, named)
    assert router.asked == [request_id or named], "its span has the whole id"


@pytest.mark.parametrize(
    ("method", "request_bytes"),
    [
        ("Generate", pb.GenerateRequest(prompt="x", request_id="mine").SerializeToString()),
        ("Generate", b"\x12\x02\xff\xfe"),
        ("GetModelInfo", b""),
        ("Tokenize", b""),
    ],
    ids=["Generate", "unreadable", "GetModelInfo", "Tokenize"],
)
async def test_what_is_refused_before_it_is_looked_at_has_an_id_too(
    tmp_path: Path, method: str, request_bytes: bytes
) -> None:
    async with served(Keyed(tmp_path).ingress) as channel:
        kind: Callable[..., Any] = channel.unary_stream if method == "Generate" else channel.unary_unary
        found, trailers = await ending(kind(f"/outrider.v1.Generation/{method}")(request_bytes))
    own = b"mine" in request_bytes
    assert (found, trailers["outrider-request-id"]) == (Code.UNAUTHENTICATED, "mine" if own else "made-by-serve")


async def test_a_message_that_cannot_be_read_has_the_id_that_serve_gave_it() -> None:
    async with served(ingress()) as channel:
        for method, kind in (("Generate", channel.unary_stream), ("Tokenize", channel.unary_unary)):
            code, trailers = await ending(kind(f"/outrider.v1.Generation/{method}")(b"\xff"))
            assert (code, trailers["outrider-field"]) == (Code.INVALID_ARGUMENT, "request")
            assert trailers["outrider-request-id"] == trailers["request_id"] == "made-by-serve"


async def test_what_fails_as_it_never_should_tells_its_id_and_nothing_of_the_inside() -> None:
    async with served(ingress()) as channel:  # without a router
        call = pb_grpc.GenerationStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        code, trailers = await ending(call)
        assert (code, trailers["outrider-request-id"]) == (Code.INTERNAL, "made-by-serve")
        assert (await call.details()).startswith("internal error, see the server log under id ")
