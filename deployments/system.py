"""Owns starting the whole system on this machine, and stopping it: models, Ray, Serve, the application, readiness."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import grpc

from cluster.local import LocalCluster, port_in_use, running
from deployments.access import Gate
from deployments.client import CallFailed, Client
from deployments.config import Engine, OutriderConfig, Router
from deployments.config_file import ConfigError
from deployments.console import err, stage
from deployments.engine_settings import draft_settings
from deployments.memory import memory_table, target_memory
from engine.errors import Unavailable

READY_TIMEOUT_S = 60.0
_OWN_ERROR = re.compile(r"^engine\.errors\.\w+: ")


@contextmanager
def local_system(config: OutriderConfig) -> Iterator[str]:
    """Runs everything `config` asks for on this machine; yields the address of the public API once it answers.

    Raises:
        ModelNotFound, PairMismatch, ConfigError, InvalidArgument: before anything is started.
        Unavailable: a deployment did not come up.
    """
    prepare(config)
    with ExitStack() as stack:
        with stage("Starting Ray"):
            stack.enter_context(running(LocalCluster(_logical_cpus(config), config.server.haproxy)))
        with stage("Starting target, draft and router"):
            _deploy(config)
            address = f"127.0.0.1:{config.server.grpc_port}"
            _await_ready(address, with_draft=config.draft.enabled)
        yield address


def prepare(config: OutriderConfig) -> None:
    """Everything that can be wrong without a cluster: models, the pair, memory, ports. Shows where memory will go."""
    if config.draft.has_replicas:
        draft_settings(config)
    Gate(config.access, time.monotonic)
    for name in ("grpc_port", "http_port"):
        port = getattr(config.server, name)
        if port_in_use(port):
            raise ConfigError(f"server.{name}: something listens on {port} already")
    err.print(memory_table(target_memory(config, config.target.num_replicas)))


def _logical_cpus(config: OutriderConfig) -> int:
    """Ray places by logical CPUs; a small machine runs all replicas of a demo all the same."""
    parts: list[Engine | Router] = [config.router, *[config.target] * config.target.tensor_parallel_size]
    if config.draft.has_replicas:
        parts.append(config.draft)
    wanted = sum(part.num_replicas * float(part.ray_actor_options.get("num_cpus", 1)) for part in parts)
    return max(math.ceil(wanted), os.cpu_count() or 1)


def _deploy(config: OutriderConfig) -> None:
    import ray
    from ray import serve

    from deployments.app import APPLICATION, build_app, start_serve

    start_serve(config.server)
    try:
        serve.run(build_app(config), name=APPLICATION, route_prefix="/")
    except (RuntimeError, ray.exceptions.RayError) as error:
        status = serve.status().applications.get(APPLICATION)
        messages = {} if status is None else {name: each.message for name, each in status.deployments.items()}
        raise Unavailable(f"the system did not come up: {why_it_failed(messages) or error}") from error


def why_it_failed(messages: Mapping[str, str]) -> str:
    """Out of what Serve says of its deployments, the last line of each traceback: that is what went wrong."""
    found = {name: text.strip().splitlines()[-1].strip() for name, text in messages.items() if "Traceback" in text}
    return "; ".join(f"{name}: {_OWN_ERROR.sub('', line)}" for name, line in found.items())


def _await_ready(address: str, with_draft: bool) -> None:
    """Returns when the router answers through the ingress and has found its peers."""
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    with Client(address) as client:
        while True:
            try:
                if client.model_info().draft_model or not with_draft:
                    return
            except CallFailed as error:
                if error.code is grpc.StatusCode.UNAUTHENTICATED:
                    return  # a router is there; what it has found it tells callers with a key
                if error.code is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > give_up_at:
                    raise
            if time.monotonic() > give_up_at:
                raise Unavailable(f"the router found no draft within {READY_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
