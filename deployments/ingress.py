"""Owns the router deployment: the public gRPC API over Serve's ingress. Each method asks who calls, translates, calls
the router once, and translates back; errors become status codes in one place.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import grpc
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from cluster.discovery import Endpoint
from deployments.access import Gate
from deployments.config import OutriderConfig
from deployments.metrics import RouterMetrics
from deployments.models import resolve_model
from deployments.peers import PeerKeeper
from deployments.router_settings import router_config
from deployments.tls_settings import mutual_tls
from engine.errors import InvalidArgument, OutriderError
from router.access import Accounts, Spend, Tenant
from router.events import Delta, RequestRecord
from router.peers import PeerSet, Pool
from router.requests import GenerateRequest, output_tokens
from router.service import Router
from router.slow_reader import cut_off_slow_reader
from router.tokenizer import Tokenizer
from router.translate import (
    Unreadable,
    event_message,
    generate_request,
    model_info_message,
    read_generate_request,
    read_tokenize_request,
    tokenize_request,
)
from rpc.clients import DraftClient, TargetClient
from rpc.errors import DELIVERED_TRAILER, request_id_trailer, status_of, trailers_of
from rpc.pb import generation_pb2 as pb
from rpc.security import Role
from rpc.tracing import setup_tracing, shutdown_tracing

SERVICE = "outrider.v1.Generation"


class RouterDeployment:
    """One router.

    Args:
        config: the whole configuration.
        target: handle of the target deployment.
        draft: handle of the draft deployment; None without one.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: OutriderConfig, target: DeploymentHandle[Any], draft: DeploymentHandle[Any] | None = None
    ) -> None:
        setup_tracing("outrider-router")
        tls = mutual_tls(config, Role.ROUTER)
        peers, metrics = PeerSet(), RouterMetrics()
        tokenizer = Tokenizer(resolve_model(config.target.model))
        self._settings, self._metrics = router_config(config), metrics
        self._router = Router(tokenizer, peers, self._settings, metrics)
        self._gate, self._accounts = Gate(config.access, time.monotonic), Accounts(time.monotonic)
        self._slow_reader_s = config.router.slow_reader_s
        self._status_needs_message = not config.server.haproxy
        self._keepers: list[PeerKeeper[Any]] = []

        def keep(kind: str, handle: DeploymentHandle[Any], pool: Pool[Any], client: type[Any]) -> None:
            def seen(endpoints: Sequence[Endpoint]) -> None:
                metrics.engines_seen(kind, endpoints)
                metrics.load_seen(self._router.running_requests, self._router.queued_requests)

            period_s, fingerprint = config.router.peer_refresh_s, tokenizer.fingerprint()
            connect = partial(client.connect, tls=tls)
            keeper: PeerKeeper[Any] = PeerKeeper(handle, pool, connect, seen, period_s, fingerprint)
            pool.look = keeper.look_now
            self._keepers.append(keeper)

        keep("target", target, peers.targets, TargetClient)
        if draft is not None:
            keep("draft", draft, peers.drafts, DraftClient)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest | Unreadable, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        request_id, num_delivered = _named(request, grpc_context), 0
        try:
            with self._admitted(request, request_id, grpc_context) as (asked, spend):
                num_delivered = len(asked.resume_from)
                made = self._router.generate(asked, spend)
                async with aclosing(cut_off_slow_reader(made, self._slow_reader_s, time.monotonic)) as events:
                    async for event in events:
                        yield event_message(request_id, event)
                        num_delivered += len(event.token_ids) if isinstance(event, Delta) else 0
        except Exception as error:
            _fail(error, grpc_context, request_id, num_delivered)
            if self._status_needs_message:  # Serve's Python proxy learns status and trailers with messages only
                yield pb.GenerateResponse(request_id=request_id)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetModelInfoResponse:
        request_id = _named(request, grpc_context)
        try:
            self._accounts.count_request(self._caller(request, grpc_context))
            return model_info_message(self._router.get_model_info())
        except Exception as error:
            _fail(error, grpc_context, request_id)
            return pb.GetModelInfoResponse()

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest | Unreadable, grpc_context: RayServegRPCContext
    ) -> pb.TokenizeResponse:
        request_id = _named(request, grpc_context)
        try:
            self._accounts.count_request(self._caller(request, grpc_context))
            given, add_special_tokens = tokenize_request(request)
            ids, tokens = await self._router.tokenize(given, add_special_tokens=add_special_tokens)
            return pb.TokenizeResponse(input_ids=ids, tokens=tokens)
        except Exception as error:
            _fail(error, grpc_context, request_id)
            return pb.TokenizeResponse()

    @contextmanager
    def _admitted(
        self, request: pb.GenerateRequest | Unreadable, request_id: str, context: RayServegRPCContext
    ) -> Iterator[tuple[GenerateRequest, Spend]]:
        """What is asked, and who counts its tokens. A refusal is counted here; of all else the router tells."""
        with ExitStack() as stream:
            try:
                tenant = self._caller(request, context)
                asked = generate_request(request, traceparent=context.traceparent() or "")
                asked = replace(asked, request_id=request_id)
                expected = output_tokens(asked, self._settings.default_max_tokens, self._settings.limits)
                spend = stream.enter_context(self._accounts.stream(tenant, expected))
            except OutriderError as error:
                self._metrics.request_finished(RequestRecord(type(error).__name__, None, 0, 0.0))
                raise
            yield asked, spend

    def _caller(self, request: Message | Unreadable, context: RayServegRPCContext) -> Tenant:
        """Raises Unauthenticated, and InvalidArgument for a message that is too large to look at."""
        tenant = self._gate.tenant(context.invocation_metadata())
        most = self._settings.limits.max_message_bytes
        if isinstance(request, Message) and (size := request.ByteSize()) > most:
            raise InvalidArgument("request", f"{size} bytes", f"at most {most} bytes")
        return tenant

    async def __del__(self) -> None:
        for keeper in getattr(self, "_keepers", ()):
            await keeper.close()
        shutdown_tracing()


def _named(request: Message | Unreadable, context: RayServegRPCContext) -> str:
    """The id of the call, which from now on its trailers tell, however it ends: the caller's own, in the message or
    else in the metadata; else the one that Serve has made for it, under which Serve logs what is done for the call.

    Before this runs there is none: what HAProxy, gRPC or Serve refuse by themselves (a message over
    RAY_SERVE_GRPC_MAX_MESSAGE_SIZE, no router, too many calls) has only an id that its caller gave.
    """
    given = getattr(request, "request_id", "") or context.request_id()
    request_id: str = given or dict(context.trailing_metadata()).get("request_id", "") or uuid4().hex
    context.set_trailing_metadata([request_id_trailer(request_id)])
    return request_id


def _fail(error: Exception, context: RayServegRPCContext, request_id: str, num_delivered: int = 0) -> None:
    """Ends the call with the error's status. Returning, not raising, keeps Serve from adding words of its own."""
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.message)
    trailers = [request_id_trailer(request_id), *trailers_of(status)]
    if num_delivered:
        trailers.append((DELIVERED_TRAILER, str(num_delivered)))
    context.set_trailing_metadata(trailers)


def add_generation_to_server(servicer: Any, server: Any) -> None:
    """What Serve calls to learn the API's methods. Unlike the generated function it reads requests that are no
    messages, so that the caller is told which field is wrong.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            servicer.Generate, read_generate_request, pb.GenerateResponse.SerializeToString
        ),
        "GetModelInfo": grpc.unary_unary_rpc_method_handler(
            servicer.GetModelInfo, pb.GetModelInfoRequest.FromString, pb.GetModelInfoResponse.SerializeToString
        ),
        "Tokenize": grpc.unary_unary_rpc_method_handler(
            servicer.Tokenize, read_tokenize_request, pb.TokenizeResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
