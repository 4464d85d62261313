"""Owns `outrider serve`: the system, up until it is told to stop."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from deployments.client import address_note
from deployments.config import OutriderConfig
from deployments.config_file import load_config
from deployments.console import err, out
from deployments.system import local_system


def serve(
    config: Annotated[str, typer.Option(help="YAML file, or a bundled configuration: demo, qwen2.5-72b, llama-3-70b.")],
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the gRPC API, instead of the file's.")
    ] = None,
) -> None:
    """Start target, draft and router, print the address, and run until interrupted."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with local_system(with_port(load_config(config), port)) as address:
        note = address_note()
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(address, encoding="utf-8")
        try:
            out.print(f"serving on {address}")
            err.print(
                f"[dim]try: outrider generate --address {address} --message 'Hello'   (Ctrl-C stops)[/]", soft_wrap=True
            )
            stop.wait()
        except KeyboardInterrupt:
            err.print("stopping")
        finally:
            note.unlink(missing_ok=True)


def with_port(config: OutriderConfig, port: int | None) -> OutriderConfig:
    """The same configuration on another gRPC port."""
    if port is None:
        return config
    return config.model_copy(update={"server": config.server.model_copy(update={"grpc_port": port})})
