"""Owns the way from configuration to a router's settings."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from deployments.config import OutriderConfig
from deployments.workloads import PACKAGED, read_workloads
from router.acceptance import DRAFT_MODEL
from router.service import RouterConfig
from router.shared import SessionConfig
from router.speed_gate import PolicyConfig
from router.target_link import TargetLinkConfig


def router_config(config: OutriderConfig) -> RouterConfig:
    """What a router is made with."""
    speculation = config.speculation
    drafters = tuple(name for name in speculation.drafters if config.draft.enabled or name != DRAFT_MODEL)
    policy = PolicyConfig(
        max_temperature=speculation.temperature_threshold,
        acceptance_floor=speculation.acceptance_floor,
        run_ahead=speculation.run_ahead,
    )
    workloads = read_workloads(PACKAGED) if speculation.workloads is None else speculation.workloads
    return RouterConfig(
        max_concurrent=config.router.max_concurrent,
        max_queued=config.router.max_queued,
        version=installed_version(),
        limits=config.access.requests.as_limits(),
        sessions=SessionConfig(
            drafters=drafters if speculation.enabled else (),
            max_draft_tokens=speculation.max_draft_tokens,
            costs=speculation.costs.as_defaults(),
            batch_weight=speculation.batch_weight,
            workloads={name: workload.draft_acceptance for name, workload in workloads.items()},
            policy=policy,
            target_link=TargetLinkConfig(failover_wait_s=config.router.failover_wait_s),
        ),
    )


def installed_version() -> str:
    """Version of the installed distribution; "" when run from a bare checkout."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return ""
