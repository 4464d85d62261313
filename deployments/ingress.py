"""Owns the router deployment: the public gRPC API over Serve's ingress. Each method translates, calls the router once,
and translates back; errors become status codes in one place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from cluster.discovery import Endpoint
from deployments.config import OutriderConfig
from deployments.metrics import RouterMetrics
from deployments.models import resolve_model
from deployments.peers import PeerKeeper
from deployments.router_settings import router_config
from engine.errors import OutriderError
from router.events import Delta
from router.peers import PeerSet, Pool
from router.service import Router
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
from rpc.errors import DELIVERED_TRAILER, status_of, trailers_of
from rpc.pb import generation_pb2 as pb
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
        peers, metrics = PeerSet(), RouterMetrics()
        tokenizer = Tokenizer(resolve_model(config.target.model))
        self._router = Router(tokenizer, peers, router_config(config), metrics)
        self._keepers: list[PeerKeeper[Any]] = []

        def keep(kind: str, handle: DeploymentHandle[Any], pool: Pool[Any], client: type[Any]) -> None:
            def seen(endpoints: Sequence[Endpoint]) -> None:
                metrics.engines_seen(kind, endpoints)
                metrics.load_seen(self._router.running_requests, self._router.queued_requests)

            period_s, fingerprint = config.router.peer_refresh_s, tokenizer.fingerprint()
            keeper: PeerKeeper[Any] = PeerKeeper(handle, pool, client, seen, period_s, fingerprint)
            pool.look = keeper.look_now
            self._keepers.append(keeper)

        keep("target", target, peers.targets, TargetClient)
        if draft is not None:
            keep("draft", draft, peers.drafts, DraftClient)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest | Unreadable, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        num_delivered = 0
        try:
            asked = generate_request(request, traceparent=grpc_context.traceparent() or "")
            asked = replace(asked, request_id=asked.request_id or grpc_context.request_id() or "")
            num_delivered = len(asked.resume_from)
            async with aclosing(self._router.generate(asked)) as events:
                async for event in events:
                    yield event_message(asked.request_id, event)
                    num_delivered += len(event.token_ids) if isinstance(event, Delta) else 0
        except Exception as error:
            _fail(error, grpc_context, num_delivered)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetModelInfoResponse:
        try:
            return model_info_message(self._router.get_model_info())
        except OutriderError as error:
            _fail(error, grpc_context)
            return pb.GetModelInfoResponse()

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest | Unreadable, grpc_context: RayServegRPCContext
    ) -> pb.TokenizeResponse:
        try:
            given, add_special_tokens = tokenize_request(request)
            ids, tokens = await self._router.tokenize(given, add_special_tokens=add_special_tokens)
            return pb.TokenizeResponse(input_ids=ids, tokens=tokens)
        except Exception as error:
            _fail(error, grpc_context)
            return pb.TokenizeResponse()

    async def __del__(self) -> None:
        for keeper in getattr(self, "_keepers", ()):
            await keeper.close()
        shutdown_tracing()


def _fail(error: Exception, context: RayServegRPCContext, num_delivered: int = 0) -> None:
    """Ends the call with the error's status. Returning, not raising, keeps Serve from adding words of its own."""
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.message)
    trailers = trailers_of(status)
    if num_delivered:
        trailers.append((DELIVERED_TRAILER, str(num_delivered)))
    if trailers:
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
