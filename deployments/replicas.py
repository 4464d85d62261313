"""Owns the two engine deployments: each replica is one engine on one thread behind a gRPC server of its own.

Serve starts, watches and restarts them; no request passes through Serve. Routers learn the address from `endpoint`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from cluster.discovery import Endpoint
from deployments.config import OutriderConfig
from deployments.engine_settings import draft_settings, target_settings
from engine.errors import OutriderError, Unavailable
from engine.loop import EngineLoop, draft_loop, target_loop
from rpc.servers import EngineServicer, serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer
from rpc.tracing import setup_tracing, shutdown_tracing

_log = logging.getLogger(__name__)

EngineT = TypeVar("EngineT")

STOP_GRACE_S = 5.0
"""Seconds that running streams get when a replica is stopped; routers then go on elsewhere."""


class _EngineReplica:
    """What target and draft replicas share: their server, its address, and their health."""

    async def _serve(self, servicer: EngineServicer, host: str) -> None:
        self._loop: EngineLoop[Any, Any] = servicer.loop
        self._loop.start()
        self._server = await serve_engine(servicer, host=listen_host(host))

    def endpoint(self) -> Endpoint:
        """Where this replica's own server listens, and what its engine says of itself."""
        return Endpoint(self._server.address, self._loop.info)

    def check_health(self) -> None:
        """Serve restarts the replica when this raises: the engine's thread is gone or stuck in a step."""
        if (why := self._loop.unhealthy()) is not None:
            raise Unavailable(why)

    async def check_integrity(self) -> None:
        """Raises if block accounting and sessions disagree."""
        await self._loop.call(lambda engine: engine.check_integrity())

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._server.stop(STOP_GRACE_S)
            await self._loop.close()
        shutdown_tracing()


class TargetDeployment(_EngineReplica):
    """One copy of the target."""

    async def __init__(self, config: OutriderConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        from engine.target import build_target_engine

        setup_tracing("outrider-target")
        engine = await _built(lambda: build_target_engine(target_settings(config)))
        await self._serve(VerificationServicer(target_loop(engine)), config.server.host)


class DraftDeployment(_EngineReplica):
    """One copy of the draft."""

    async def __init__(self, config: OutriderConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        from engine.drafting import build_draft_engine

        setup_tracing("outrider-draft")
        engine = await _built(lambda: build_draft_engine(draft_settings(config)))
        await self._serve(DraftingServicer(draft_loop(engine)), config.server.host)


async def _built(build: Callable[[], EngineT]) -> EngineT:
    """Builds an engine off the event loop. Serve shows the start of a traceback, so a failure is raised without one."""
    try:
        return await asyncio.to_thread(build)
    except Exception as error:
        _log.exception("the engine could not be built")
        said = " ".join(str(error).split())
        raise OutriderError(said if isinstance(error, OutriderError) else f"{type(error).__name__}: {said}") from None


def listen_host(public_host: str) -> str:
    """Where an engine listens: on loopback when callers are on this machine, else on the node's address."""
    try:
        is_local = ipaddress.ip_address(public_host).is_loopback
    except ValueError:
        is_local = public_host == "localhost"
    node_address: str = ray.util.get_node_ip_address()
    return "127.0.0.1" if is_local else node_address
