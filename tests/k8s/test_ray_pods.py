"""How Ray is started in a Pod, and when a Pod counts as dead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s.manifests import K8S, OVERLAYS, Manifest, Pod, pods, ray_service

WORKERS_WAIT_S = 600
"""RAY_gcs_rpc_server_reconnect_timeout_s, as KubeRay sets it for workers of a cluster whose GCS may come back."""


def groups(overlay: str) -> dict[str, Manifest]:
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"], **{each["groupName"]: each for each in cluster["workerGroupSpecs"]}}


def ray_pods(overlay: str) -> dict[str, Pod]:
    return {pod.labels["app.kubernetes.io/component"]: pod for pod in pods((ray_service(overlay),))}


def gives_up_after_s(probe: dict[str, Any]) -> int:
    return probe["initialDelaySeconds"] + probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_counts_no_gpus_where_none_is_asked_for(overlay: str) -> None:
    for name in ("head", "router"):
        (container,) = ray_pods(overlay)[name].containers
        assert not [kind for kind in container["resources"]["limits"] if kind.startswith("nvidia.com/")]
        assert groups(overlay)[name]["rayStartParams"]["num-gpus"] == "0"
    for name in ("draft", "target"):
        assert "num-gpus" not in groups(overlay)[name]["rayStartParams"], "KubeRay takes it from the Pod's limits"


def test_the_image_shows_no_container_gpus_that_it_did_not_ask_for() -> None:
    assert "NVIDIA_VISIBLE_DEVICES" not in (K8S / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_head_that_hangs_is_back_before_workers_give_it_up(overlay: str) -> None:
    found = {name: pod.containers[0]["livenessProbe"] for name, pod in ray_pods(overlay).items()}
    assert gives_up_after_s(found.pop("head")) <= WORKERS_WAIT_S / 2
    assert all(gives_up_after_s(probe) >= WORKERS_WAIT_S for probe in found.values())
