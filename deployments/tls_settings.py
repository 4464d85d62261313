"""Owns the way from configuration to one replica's side of mutual TLS."""

from __future__ import annotations

from pathlib import Path

from deployments.config import OutriderConfig
from deployments.yaml_file import ConfigError
from engine.errors import InvalidArgument
from rpc.security import MutualTls, Role


def mutual_tls(config: OutriderConfig, role: Role) -> MutualTls | None:
    """What a replica of kind `role` shows and asks for; None without TLS. Raises ConfigError: the files are wrong."""
    if config.tls is None:
        return None
    try:
        return MutualTls(Path(config.tls.folder), role, config.tls.domain)
    except InvalidArgument as error:
        raise ConfigError(f"tls.folder: {error}") from None
