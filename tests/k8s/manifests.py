"""The kustomizations as a cluster would get them: every object, and the Pods that come of them, KubeRay's included."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = tuple(sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml")))
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A Pod template: what kind of Pod, how often, with which labels."""

    name: str
    replicas: int
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    offers: Mapping[str, str] = field(default_factory=dict)

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", ())}


@functools.cache
def built(folder: str) -> tuple[Manifest, ...]:
    """What `kubectl kustomize` makes of a folder of k8s/."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not on PATH, and nothing else here builds a kustomization")
    done = subprocess.run([kubectl, "kustomize", str(K8S / folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def installed(overlay: str) -> tuple[Manifest, ...]:
    """An overlay and the monitoring that goes beside it: all that shares the namespace."""
    return (*built(f"overlays/{overlay}"), *built("monitoring"))


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def ray_service(overlay: str) -> Manifest:
    (service,) = of_kind(built(f"overlays/{overlay}"), "RayService")
    return service


def pods(manifests: tuple[Manifest, ...]) -> Iterator[Pod]:
    """Every Pod there will be, with the labels that KubeRay adds to Ray's."""
    for each in manifests:
        spec = each.get("spec", {})
        if each["kind"] in ("Deployment", "StatefulSet"):
            template = spec["template"]
            yield Pod(each["metadata"]["name"], spec["replicas"], template["metadata"]["labels"], template["spec"])
        elif each["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            yield _ray_pod("head", "headgroup", cluster["headGroupSpec"], 1)
            for group in cluster["workerGroupSpecs"]:
                yield _ray_pod("worker", group["groupName"], group, group["replicas"])


def _ray_pod(node_type: str, name: str, group: Manifest, replicas: int) -> Pod:
    added = {
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": node_type,
        "ray.io/group": name,
        "ray.io/cluster": "outrider-abcde",
        "ray.io/serve": "true" if node_type == "worker" else "false",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    template = group["template"]
    labels = {**added, **template["metadata"]["labels"]}
    return Pod(name, replicas, labels, template["spec"], group.get("resources", {}))


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Kubernetes takes something with these labels."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    assert all(each["operator"] == "In" for each in selector.get("matchExpressions", ())), selector
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


def selected(selector: Mapping[str, Any], among: tuple[Manifest, ...]) -> list[Pod]:
    return [pod for pod in pods(among) if matches(selector, pod.labels)]
