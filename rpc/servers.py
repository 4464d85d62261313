"""Owns the grpc.aio server of each draft and target replica, beside Serve's: limits, health, reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from engine.loop import EngineLoop
from rpc.errors import ErrorInterceptor
from rpc.outbox import MAX_MESSAGE_BYTES
from rpc.security import MutualTls

HEALTH_PERIOD_S = 1.0  # how often watchers hear of a change; a check always sees the present

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers must never share a port unnoticed
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class EngineServicer(Protocol):
    """A service over one engine loop."""

    @property
    def name(self) -> str: ...

    @property
    def loop(self) -> EngineLoop[Any, Any]: ...

    def add_to(self, server: grpc.aio.Server) -> None: ...


class _EngineHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1, answered from the engine loop: SERVING means that the serving thread turns."""

    def __init__(self, servicer: EngineServicer) -> None:
        super().__init__()
        self._servicer = servicer

    async def refresh(self) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        now = status.SERVING if self._servicer.loop.unhealthy() is None else status.NOT_SERVING
        for name in ("", self._servicer.name):
            await self.set(name, now)

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        await self.refresh()
        response: health_pb2.HealthCheckResponse = await super().Check(request, context)
        return response

    async def keep_fresh(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(HEALTH_PERIOD_S)


@dataclass(frozen=True, slots=True)
class EngineServer:
    """A running server. Its engine loop belongs to whoever made it, and is closed after the server."""

    address: str
    _server: grpc.aio.Server
    _health: _EngineHealth
    _freshener: asyncio.Task[None]

    async def stop(self, grace: float | None = None) -> None:
        """Says NOT_SERVING, refuses new calls, gives running ones `grace` seconds, then ends them. Idempotent."""
        self._freshener.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)


async def serve_engine(
    servicer: EngineServicer,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: MutualTls | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> EngineServer:
    """Serves an engine with health and reflection on `host`; port 0 takes a free one.

    With `tls`, routers alone are answered, whatever they ask. Interceptors given stand between those that map errors
    and check callers, and the service.

    Raises:
        RuntimeError: the port is taken.
    """
    callers = () if tls is None else (tls.callers(),)
    server = grpc.aio.server(interceptors=(ErrorInterceptor(), *callers, *interceptors), options=_OPTIONS)
    health_servicer = _EngineHealth(servicer)
    servicer.add_to(server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((servicer.name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    where = f"[{host}]" if ":" in host else host
    if tls is None:
        bound = server.add_insecure_port(f"{where}:{port}")
    else:
        bound = server.add_secure_port(f"{where}:{port}", tls.server_credentials())
    await server.start()
    freshener = asyncio.create_task(health_servicer.keep_fresh())
    return EngineServer(f"{where}:{bound}", server, health_servicer, freshener)
