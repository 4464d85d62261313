"""Owns what KubeRay is told of Serve: `serveConfigV2` out of a configuration, as a kustomize patch. Pure.

The configuration travels inside it, so that a change of settings is a change of serveConfigV2 alone: Serve replaces
what differs in place, and KubeRay builds no second cluster.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from deployments.app import APPLICATION, SERVICER
from deployments.config import Engine, OutriderConfig, Router
from deployments.config_file import parse_config
from deployments.yaml_file import ConfigError

SERVICE = "outrider"
"""Name of the RayService that the patch is for."""
GROUP_RESOURCES: Mapping[str, str] = {
    "target": "outrider_target",
    "draft": "outrider_draft",
    "router": "outrider_router",
}
"""What the Pods of each worker group offer, by section: a target Pod one for each of its GPUs, the others one."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_HEADER = """\
# Written by `outrider render --overlay {overlay}` out of outrider.yaml beside it. Edit that one.
apiVersion: ray.io/v1
kind: RayService
metadata:
  name: {service}
spec:
  serveConfigV2: |
"""


def render_patch(given: Any, overlay: str, source: str) -> str:
    """The patch for an overlay, as YAML.

    Args:
        given: what the overlay's configuration file holds.
        overlay: its name.
        source: what errors call the file.

    Raises:
        ConfigError: the configuration is wrong, or could not work on Kubernetes.
    """
    content = yaml.safe_dump(serve_config(given, source), sort_keys=False, width=100)
    return _HEADER.format(overlay=overlay, service=SERVICE) + textwrap.indent(content, "    ")


def serve_config(given: Any, source: str) -> dict[str, Any]:
    """`serveConfigV2` as Serve reads it. Raises ConfigError."""
    config = parse_config(given, source)
    _check_fits_kubernetes(config, source)
    placed = _placed(given, config)
    parse_config(placed, source)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.server.host, "port": config.server.http_port},
        "grpc_options": {"port": config.server.grpc_port, "grpc_servicer_functions": [SERVICER]},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": {"config": placed},
            }
        ],
    }


def _placed(given: Mapping[str, Any], config: OutriderConfig) -> dict[str, Any]:
    """What was given, with a place for each kind of replica: the resource that only its worker group offers.

    Of a workload file the content travels.
    """
    placed = dict(given)
    if config.speculation.workloads is not None:
        classes = {name: each.model_dump(mode="json") for name, each in config.speculation.workloads.items()}
        placed["speculation"] = {**given["speculation"], "workloads": classes}
    sections: dict[str, Engine | Router] = {"target": config.target, "router": config.router}
    if config.draft.has_replicas:
        sections["draft"] = config.draft
    for name, section in sections.items():
        options = section.ray_actor_options
        resources = {**options.get("resources", {}), GROUP_RESOURCES[name]: 1}
        placed[name] = {**placed.get(name, {}), "ray_actor_options": {**options, "resources": resources}}
    return placed


def _check_fits_kubernetes(config: OutriderConfig, source: str) -> None:
    if config.server.host in _LOOPBACK:
        raise ConfigError(f"{source}: server.host: nobody outside a Pod reaches {config.server.host}; give 0.0.0.0")
    if not config.server.haproxy:
        raise ConfigError(f"{source}: server.haproxy: k8s/base/ray.env decides that, for all Pods; leave it out")
