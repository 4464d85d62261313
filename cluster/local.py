"""Owns a Ray cluster of this machine's own: what it is started with, and that nothing of it stays behind.

Ray and Serve read their settings from the environment when they are imported and when their processes start, so this
module sets it first and imports them late.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

OBJECT_STORE_BYTES = 96 * 2**20
"""Ray's object store. Nothing of size goes through it: tokens travel over gRPC."""

_FIRST_INGRESS_PORT, _LAST_INGRESS_PORT, _INGRESS_PORTS = 20_000, 32_000, 100


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """What a local cluster is started with.

    Attributes:
        num_cpus: logical CPUs, so that every replica finds a place whatever the machine has.
        haproxy: put Serve's HAProxy in front of the ingress replicas.
    """

    num_cpus: int
    haproxy: bool = True


@contextmanager
def running(cluster: LocalCluster) -> Iterator[None]:
    """Starts Ray, and on the way out stops Serve, Ray and every process of theirs.

    Enter it before anything imports ray in this process: what ray read then it does not read again.

    Raises:
        RuntimeError: this process is connected to a Ray cluster already.
    """
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(settings_of(cluster))
        import ray

        if ray.is_initialized():
            raise RuntimeError("this process is connected to a Ray cluster already")
        # A filter, since Serve sets the level of its logger anew whenever it starts.
        logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.WARNING)
        cleanup.callback(ray.shutdown)
        with _interrupt_held_back():
            ray.init(
                address="local",
                num_cpus=cluster.num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
            )
        yield


@contextmanager
def settings_of(cluster: LocalCluster) -> Iterator[Path]:
    """What Ray's processes read from the environment, set for as long as the block runs; yields their folder."""
    folder = Path(tempfile.mkdtemp(prefix="outrider-", dir="/tmp"))  # Ray's socket paths must stay short
    try:
        with _environment(_settings(cluster, folder)):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_in_use(port: int) -> bool:
    """Whether something listens on `port` of this machine."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _settings(cluster: LocalCluster, folder: Path) -> dict[str, str]:
    token = folder / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",
        # Ray's own 15 is for batch work: whatever else runs on the machine would stop engines that answer callers.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Replica code runs on the loop that serves its gRPC: no thread hop for each token, one loop per process.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # A load balancer far away needs time to notice a leaving replica; the one on this machine goes with it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if cluster.haproxy else "0",
        # A proxy that takes longer is killed and begun again; on a busy machine importing Serve alone takes over 5 s.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # One agent's channel may hold all its requests: whether there are too many is for the router to say.
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": "1000",
        # A connection to a router for each stream: on one that is shared, a caller that stops reading stops all others,
        # whoever they are (HAProxy 2.8 reads no further than what it cannot pass on).
        "RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS": "1",
        # A caller that takes nothing of what waits for it loses its call after so long. A silent stream is not counted.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "300",
        # Of a request, refused before it is read: gRPC's own limit here is 2 GiB.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(16 << 20),
        # Whenever a replica comes or goes a new HAProxy takes over; the old one has so long for the streams it serves.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",
        # Short names: Serve puts a node id of 56 characters before them, and a socket path ends at 97.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "h.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        **_ingress_ports(),
    }


def _ingress_ports() -> dict[str, str]:
    """Where HAProxy finds routers. With Serve's own ports, systems on one machine answer for each other.

    Below 32,768, where Linux begins to hand out ports to clients.
    """
    first = random.randrange(_FIRST_INGRESS_PORT, _LAST_INGRESS_PORT - 2 * _INGRESS_PORTS, 2 * _INGRESS_PORTS)
    ports = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": free_port(), "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": free_port()}
    for kind, begin in (("HTTP", first), ("GRPC", first + _INGRESS_PORTS)):
        ports[f"RAY_SERVE_DIRECT_INGRESS_MIN_{kind}_PORT"] = begin
        ports[f"RAY_SERVE_DIRECT_INGRESS_MAX_{kind}_PORT"] = begin + _INGRESS_PORTS - 1
    return {name: str(port) for name, port in ports.items()}


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Ctrl-C takes effect after the block: a Ray that is stopped half-started loses track of its processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if interrupts:
        raise KeyboardInterrupt


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Sets what is not set already, and puts things back."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
