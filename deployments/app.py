"""Owns the Serve application: which deployments there are, with what options, bound to what.

`serve run deployments.app:build config=demo` builds it from a configuration file.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.schema import LoggingConfig

from deployments.config import Engine, OutriderConfig, Server, Target
from deployments.config_file import load_config, parse_config
from deployments.ingress import RouterDeployment
from deployments.replicas import DraftDeployment, TargetDeployment

APPLICATION = "outrider"
SERVICER = "deployments.ingress.add_generation_to_server"
HUNG_AFTER_S = 10.0
"""A replica whose event loop does not answer for so long, three times in a row, is replaced."""
_REFUSAL_MARGIN = 4096
"""Calls that Serve lets in beyond what the router queues, so that it is the router that refuses, with a retry hint."""


def build(arguments: dict[str, Any]) -> Application:
    """Builds the application from `config`: a file or a bundled name for `serve run`, its content from KubeRay."""
    config = arguments.get("config", "demo")
    return build_app(load_config(config) if isinstance(config, str) else parse_config(config, "config"))


def build_app(config: OutriderConfig) -> Application:
    """Target, draft and router, the router bound to the others; the draft may be another application's."""
    peers: dict[str, Any] = {
        "target": _engine("Target", TargetDeployment, config.target, **_group(config.target)).bind(config)
    }
    if config.draft.has_replicas:
        peers["draft"] = _engine("Draft", DraftDeployment, config.draft).bind(config)
    elif config.draft.enabled:
        peers["draft"] = serve.get_deployment_handle("Draft", config.draft.application)
    router = _deployment(
        "Router",
        RouterDeployment,
        num_replicas=config.router.num_replicas,
        ray_actor_options=config.router.ray_actor_options,
        graceful_shutdown_timeout_s=config.router.drain_s,
        max_ongoing_requests=config.router.max_concurrent + config.router.max_queued + _REFUSAL_MARGIN,
    )
    return router.bind(config, **peers)


def _engine(name: str, kind: type, engine: Engine, **group: Any) -> Deployment:
    return _deployment(
        name, kind, num_replicas=engine.num_replicas, ray_actor_options=engine.ray_actor_options, **group
    )


def _group(target: Target) -> dict[str, Any]:
    """A place for each rank of a copy; the replica itself, rank 0, takes the first."""
    if target.tensor_parallel_size == 1:
        return {}
    bundles = [target.rank_resources] * target.tensor_parallel_size
    return {"placement_group_bundles": bundles, "placement_group_strategy": target.placement_strategy}


def _deployment(name: str, kind: type, **options: Any) -> Deployment:
    made = cast(Deployment, serve.deployment(kind, name=name))
    quiet = LoggingConfig(enable_access_log=False)  # a line for each call costs more than routing it
    return made.options(health_check_period_s=2.0, health_check_timeout_s=HUNG_AFTER_S, logging_config=quiet, **options)


def start_serve(server: Server, proxy_location: Literal["EveryNode", "HeadOnly"] = "EveryNode") -> None:
    """Starts Serve's ingress on the configured ports."""
    serve.start(
        proxy_location=proxy_location,
        http_options=HTTPOptions(host=server.host, port=server.http_port),
        grpc_options=gRPCOptions(port=server.grpc_port, grpc_servicer_functions=[SERVICER]),
    )
