"""Owns the two engine deployments: each replica is one engine on one thread behind a gRPC server of its own.

Serve starts, watches and restarts them; no request passes through Serve. Routers learn the address from `endpoint`.
A target spread over several devices is one replica all the same: rank 0, with followers that live and die with it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from cluster.discovery import Endpoint
from deployments.config import OutriderConfig
from deployments.engine_settings import draft_settings, target_settings
from deployments.memory import target_memory
from deployments.tls_settings import mutual_tls
from engine.errors import OutriderError, Unavailable
from engine.loop import EngineLoop, draft_loop, target_loop
from engine.ports import DraftEngine, TargetEngine
from rpc.delay import DelayInterceptor, DelayLine
from rpc.security import MutualTls, Role
from rpc.servers import EngineServicer, serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer
from rpc.tracing import setup_tracing, shutdown_tracing

_log = logging.getLogger(__name__)

EngineT = TypeVar("EngineT")

STOP_GRACE_S = 5.0
"""Seconds that running streams get when a replica is stopped; routers then go on elsewhere."""


class _EngineReplica:
    """What target and draft replicas share: their server, its address, their health, and their end."""

    async def _serve(self, servicer: EngineServicer, host: str, tls: MutualTls | None, one_way_s: float) -> None:
        """Serves on `host`; `one_way_s` is what an emulated network adds to each message."""
        self._loop: EngineLoop[Any, Any] = servicer.loop
        self._loop.start()
        network = [DelayInterceptor(DelayLine(one_way_s, asyncio.get_running_loop()))] if one_way_s else []
        self._server = await serve_engine(servicer, host=listen_host(host), tls=tls, interceptors=network)
        self._watching = asyncio.create_task(self._end_with_engine())

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

    async def _end_with_engine(self) -> None:
        _end_process(str(await self._loop.failure()))

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._server.stop(STOP_GRACE_S)
            await self._loop.close()
        shutdown_tracing()


class TargetDeployment(_EngineReplica):
    """One copy of the target, on one device or as the first rank of a group."""

    async def __init__(self, config: OutriderConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        setup_tracing("outrider-target")
        self._lost = ""
        tls = mutual_tls(config, Role.TARGET)  # before weights are read, which takes minutes
        engine = await _built(lambda: self._build(config))
        loop = target_loop(engine, stall_limit_s=config.target.stall_limit_s)
        one_way_s = config.emulation.target_one_way_s if config.emulation else 0.0
        await self._serve(VerificationServicer(loop), config.server.host, tls, one_way_s)
        if self._lost:
            _end_process(self._lost)

    async def __del__(self) -> None:
        await super().__del__()
        if hasattr(self, "_group"):
            await asyncio.to_thread(self._followers.disband, self._group)

    def _build(self, config: OutriderConfig) -> TargetEngine:
        from engine.target import build_target_engine

        settings, size = target_settings(config), config.target.tensor_parallel_size
        for rank in target_memory(config):
            _log.info("memory in bytes: %s", rank)
        if size == 1:
            device = config.emulation.target_device(settings) if config.emulation else None
            return build_target_engine(settings, device=device)
        from cluster.followers import Followers
        from engine.parallel import Rendezvous, join

        rendezvous = Rendezvous(ray.util.get_node_ip_address(), size, config.target.collective_timeout_s)
        places = [rendezvous.place(rank) for rank in range(size)]
        self._followers = Followers(settings, places[1:], config.target.ray_actor_options, self._lost_rank)
        try:
            self._group = join(places[0], settings.device, rendezvous)
            return build_target_engine(settings, self._group)
        except Exception as error:
            self._followers.close()
            if self._lost:
                raise OutriderError(self._lost) from error
            raise

    def _lost_rank(self, why: str) -> None:
        """A group is rebuilt as a whole. While it forms, the collective that waits for the rank fails and says why."""
        self._lost = why
        if hasattr(self, "_server"):
            _end_process(why)


class DraftDeployment(_EngineReplica):
    """One copy of the draft."""

    async def __init__(self, config: OutriderConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        setup_tracing("outrider-draft")
        tls = mutual_tls(config, Role.DRAFT)
        engine = await _built(lambda: self._build(config))
        loop = draft_loop(engine, stall_limit_s=config.draft.stall_limit_s)
        one_way_s = config.emulation.draft_one_way_s if config.emulation else 0.0
        await self._serve(DraftingServicer(loop), config.server.host, tls, one_way_s)

    @staticmethod
    def _build(config: OutriderConfig) -> DraftEngine:
        from engine.drafting import build_draft_engine

        settings = draft_settings(config)
        device = config.emulation.draft_device(settings.engine) if config.emulation else None
        return build_draft_engine(settings, device)


def _end_process(why: str) -> None:
    """Ends this replica at once: Serve sees a dead process immediately, and an unhealthy one after several checks.

    Routers go on elsewhere as soon as its connections close; followers die with their owner.
    """
    _log.critical("this replica ends: %s", why)
    logging.shutdown()
    os._exit(1)


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
