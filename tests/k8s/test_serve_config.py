"""serveConfigV2 of every overlay: in step with its configuration, accepted by Serve and by the application itself."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from deployments.config import OutriderConfig
from deployments.config_file import parse_config
from tests.k8s.manifests import K8S, OVERLAYS, Pod, built, of_kind, pods, ray_service

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at import


def serve_config(overlay: str) -> dict[str, Any]:
    return yaml.safe_load(ray_service(overlay)["spec"]["serveConfigV2"])


def configuration(overlay: str) -> OutriderConfig:
    (application,) = serve_config(overlay)["applications"]
    return parse_config(application["args"]["config"], overlay)


def worker_pods(overlay: str) -> dict[str, Pod]:
    return {
        pod.name: pod for pod in pods(built(f"overlays/{overlay}")) if pod.labels.get("ray.io/node-type") == "worker"
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_committed_is_what_render_writes(overlay: str) -> None:
    from deployments.render import render_patch

    folder = K8S / "overlays" / overlay
    given = yaml.safe_load((folder / "outrider.yaml").read_text(encoding="utf-8"))
    assert (folder / "serve-config.yaml").read_text(encoding="utf-8") == render_patch(given, overlay, "outrider.yaml")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_accepts_it_and_ignores_nothing_of_it(overlay: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    def unknown(given: Any, accepted: Any, place: str = "") -> list[str]:
        if not isinstance(given, dict):
            return []
        lost = [f"{place}{key}" for key in given if key not in accepted]
        return lost + [
            fault
            for key in given.keys() & accepted.keys() - {"args"}
            for fault in unknown(given[key], accepted[key], f"{place}{key}.")
        ]

    given = serve_config(overlay)
    accepted = ServeDeploySchema.model_validate(given).model_dump(mode="json")
    assert unknown(given, accepted) == []
    assert [unknown(*pair) for pair in zip(given["applications"], accepted["applications"], strict=True)] == [[]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_application_is_built_from_its_arguments(overlay: str) -> None:
    from ray._common.utils import import_attr
    from ray.serve._private.build_app import build_app as resolve

    (application,) = serve_config(overlay)["applications"]
    made = resolve(import_attr(application["import_path"])(application["args"]), name=application["name"])
    assert {each.name for each in made.deployments} == {"Router", "Draft", "Target"}
    for each in made.deployments:
        assert f"outrider_{each.name.lower()}" in each._replica_config.ray_actor_options["resources"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_replica_finds_its_place(overlay: str) -> None:
    """What replicas ask for, beside what the Pods of their group offer: CPUs, GPUs and the group's own resource."""
    config, groups = configuration(overlay), worker_pods(overlay)
    asked = {"target": config.target.tensor_parallel_size, "draft": 1, "router": 1}
    assert set(groups) == set(asked)
    for name, processes in asked.items():
        section, pod = getattr(config, name), groups[name]
        options = section.ray_actor_options
        limits = pod.spec["containers"][0]["resources"]["limits"]
        gpus = sum(int(count) for kind, count in limits.items() if kind.startswith("nvidia.com/"))
        assert section.num_replicas <= pod.replicas, "one copy a Pod"
        assert processes == int(pod.offers[f"outrider_{name}"]), "a second copy, or a part of one, would land beside it"
        assert processes * options["num_cpus"] <= int(limits["cpu"])
        assert processes * options.get("num_gpus", 0) == gpus


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_models_come_from_the_image_or_from_the_volume(overlay: str) -> None:
    from deployments.models import DEFAULT_DRAFT, DEFAULT_TARGET

    config = configuration(overlay)
    from_image = [engine.model in (DEFAULT_TARGET, DEFAULT_DRAFT) for engine in (config.target, config.draft)]
    from_volume = [engine.model.startswith("/models/") for engine in (config.target, config.draft)]
    assert all(from_image) or all(from_volume)
    assert bool(of_kind(built(f"overlays/{overlay}"), "PersistentVolumeClaim")) == all(from_volume)
    for pod in pods(built(f"overlays/{overlay}")):
        mounted = {mount["name"]: mount["mountPath"] for mount in pod.containers[0]["volumeMounts"]}
        assert mounted.get("models") == ("/models" if all(from_volume) and pod.name in worker_pods(overlay) else None)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_stream_is_over_before_anything_ends_it(overlay: str) -> None:
    spec, config = ray_service(overlay)["spec"], configuration(overlay)
    lines = (K8S / "base/ray.env").read_text(encoding="utf-8").splitlines()
    env = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    longest_s = int(env["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    assert config.router.drain_s >= longest_s
    assert spec["rayClusterDeletionDelaySeconds"] > longest_s
    for pod in worker_pods(overlay).values():
        (container,) = pod.spec["containers"]
        *_, waited_s = container["lifecycle"]["preStop"]["exec"]["command"]
        assert longest_s <= int(waited_s) < pod.spec["terminationGracePeriodSeconds"]
