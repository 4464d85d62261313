"""The application graph, built without a cluster."""

from __future__ import annotations

import pytest

from deployments.config_file import parse_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import


def deployments_of(content: dict[str, object]) -> dict[str, object]:
    """Names and options of the deployments that a configuration makes."""
    from ray.serve._private.build_app import build_app as resolve

    from deployments.app import build_app

    built = resolve(build_app(parse_config(content, "test")), name="test")
    return {deployment.name: deployment for deployment in built.deployments}


def test_router_draft_and_target() -> None:
    made = deployments_of({"target": {"num_replicas": 2}, "router": {"max_concurrent": 8, "max_queued": 4}})
    assert set(made) == {"Router", "Draft", "Target"}
    assert made["Target"].num_replicas == 2
    assert made["Router"].max_ongoing_requests > 8 + 4


def test_without_a_draft_there_is_no_draft_deployment() -> None:
    assert set(deployments_of({"draft": {"enabled": False}})) == {"Router", "Target"}


def test_serve_can_import_what_it_is_told_by_name() -> None:
    from ray.serve.config import gRPCOptions

    from deployments.app import SERVICER
    from deployments.ingress import add_generation_to_server

    assert gRPCOptions(grpc_servicer_functions=[SERVICER]).grpc_servicer_func_callable == [add_generation_to_server]
