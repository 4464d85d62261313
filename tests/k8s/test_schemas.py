"""Every object against the schema of its kind, unknown fields refused; nothing here asks a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.k8s.manifests import OVERLAYS, Manifest, installed, of_kind, ray_service

KUBERNETES = ("1.30", "1.37")
"""Releases that core kinds are checked against: the oldest we mean to run on and the newest there is a schema of."""
OWN_KINDS = {"RayService", "PodMonitor", "Certificate", "Issuer"}
"""Kinds of operators, which kubernetes-validate does not know."""


@pytest.fixture(scope="session")
def ray_service_schema() -> dict[str, Any]:
    """The RayService CRD of KubeRay v1.7, which is not ours to ship: 1 MB of another project's."""
    if not (path := os.environ.get("OUTRIDER_RAYSERVICE_CRD")):
        pytest.skip("OUTRIDER_RAYSERVICE_CRD names no ray.io_rayservices.yaml (config/crd/bases in KubeRay's release)")
    crd = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own; it is checked nowhere else in a CRD
    return _closed(schema)


def _closed(schema: Any) -> Any:
    """Refuses unknown fields, as the API server drops them: silently."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    open_on_purpose = closed.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in closed
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object" and not open_on_purpose:
        closed["additionalProperties"] = False
    return closed


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_ray_service_is_what_the_crd_allows(overlay: str, ray_service_schema: dict[str, Any]) -> None:
    faults = [
        f"{error.json_path}: {error.message}"
        for error in jsonschema.Draft7Validator(ray_service_schema).iter_errors(ray_service(overlay))
    ]
    assert faults == []


def test_a_misspelt_field_of_a_ray_service_is_found(ray_service_schema: dict[str, Any]) -> None:
    service = yaml.safe_load(yaml.safe_dump(ray_service("demo-cpu")))
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0][
        "imagePullPolice"
    ] = 1
    (fault,) = jsonschema.Draft7Validator(ray_service_schema).iter_errors(service)
    assert "imagePullPolice" in fault.message


def _core(manifests: tuple[Manifest, ...]) -> list[Manifest]:
    """Objects of core kinds, and Ray's Pods as the Pods they will be."""
    services = of_kind(manifests, "RayService")
    clusters = [service["spec"]["rayClusterConfig"] for service in services]
    templates = [group["template"] for each in clusters for group in [each["headGroupSpec"], *each["workerGroupSpecs"]]]
    ray = [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates]
    serve = [{"apiVersion": "v1", "kind": "Service", **service["spec"]["serveService"]} for service in services]
    return [*(each for each in manifests if each["kind"] not in OWN_KINDS), *ray, *serve]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_core_kinds_are_what_kubernetes_allows(overlay: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for manifest in _core(installed(overlay)):
        validate.validate(manifest, version, strict=True)
