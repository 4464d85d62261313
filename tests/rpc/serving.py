"""Real servers on free ports over fake engines, and what tests ask of them. All end with the `async with`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.loop import DraftLoop, TargetLoop, draft_loop, target_loop
from engine.sampling import SamplingParams, StopParams
from rpc.clients import DraftClient, TargetClient
from rpc.security import MutualTls
from rpc.servers import EngineServer, serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer
from tests.rpc.fakes import FakeDraft, FakeTarget

GREEDY = SamplingParams()
STOPS = StopParams(max_tokens=64)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def shut_down(
    clients: Iterable[TargetClient | DraftClient],
    servers: Iterable[EngineServer],
    loops: Iterable[TargetLoop | DraftLoop],
) -> None:
    """Ends a system from its callers inwards."""
    for client in clients:
        await client.close()
    for server in servers:
        await server.stop()
    for loop in loops:
        await loop.close()


@dataclass(frozen=True)
class Sides:
    """How server and client show who they are."""

    server: MutualTls | None = None
    client: MutualTls | None = None


PLAINTEXT = Sides()


@dataclass
class Served:
    engine: FakeTarget
    loop: TargetLoop
    server: EngineServer
    client: TargetClient

    async def settle(self) -> None:
        """Returns once the engine thread has applied all that was posted before."""
        await self.loop.call(lambda engine: engine.check_integrity())


@asynccontextmanager
async def served_target(
    clock: Callable[[], float] | None = None,
    stall_limit_s: float = 60.0,
    max_waiting_bytes: int = 1 << 20,
    tls: Sides = PLAINTEXT,
) -> AsyncIterator[Served]:
    engine = FakeTarget()
    timing = {} if clock is None else {"clock": clock}
    loop = target_loop(engine, stall_limit_s=stall_limit_s, **timing)
    loop.start()
    server = await serve_engine(VerificationServicer(loop, max_waiting_bytes), tls=tls.server)
    client = await TargetClient.connect(server.address, tls=tls.client)
    try:
        yield Served(engine, loop, server, client)
    finally:
        engine.gate.set()
        await client.close()
        await server.stop()
        await loop.close()


@asynccontextmanager
async def served_draft(tls: Sides = PLAINTEXT) -> AsyncIterator[tuple[FakeDraft, DraftLoop, DraftClient]]:
    engine = FakeDraft()
    loop = draft_loop(engine)
    loop.start()
    server = await serve_engine(DraftingServicer(loop), tls=tls.server)
    client = await DraftClient.connect(server.address, tls=tls.client)
    try:
        yield engine, loop, client
    finally:
        await client.close()
        await server.stop()
        await loop.close()


async def health_of(address: str, service: str = "") -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return response.status
