"""Our own servers: health as watchers see it, reflection, ports, shutdown."""

from __future__ import annotations

import threading

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine.errors import Unavailable
from rpc.servers import serve_engine
from rpc.servicers import VerificationServicer
from tests.rpc.fakes import CRASH
from tests.rpc.serving import GREEDY, NOT_SERVING, SERVING, STOPS, served_target


async def test_watchers_of_health_hear_of_a_crash_and_unknown_services_are_unknown() -> None:
    async with served_target() as served, grpc.aio.insecure_channel(served.server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="outrider.v1.Verification"))
        assert (await watch.read()).status == SERVING
        session = served.client.open([CRASH], [], GREEDY, STOPS)
        with pytest.raises(Unavailable):
            await session.verdict()
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services() -> None:
    async with served_target() as served, grpc.aio.insecure_channel(served.server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        answer = await call.read()
        assert [service.name for service in answer.list_services_response.service] == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "outrider.v1.Verification",
        ]


async def test_a_taken_port_is_refused() -> None:
    async with served_target() as served:
        port = int(served.server.address.rsplit(":", 1)[1])
        with pytest.raises(RuntimeError, match="address"):
            await serve_engine(VerificationServicer(served.loop), port=port)


async def test_closing_leaves_no_engine_thread_and_frees_what_was_open() -> None:
    async with served_target() as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS)
        await session.verdict()
    assert served.engine.lengths == {}
    assert "engine" not in {thread.name for thread in threading.enumerate()}
    await served.loop.close()
    await served.server.stop()
