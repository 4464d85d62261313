"""What callers outside come by: a gateway with TLS, and keys that routers find."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest
import yaml

from deployments.access_config import Access
from rpc.pb import generation_pb2
from tests.k8s.manifests import K8S, OVERLAYS, Manifest, built, of_kind, pods, ray_service

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
OPERATIONS = (K8S.parent / "docs/operations.md").read_text(encoding="utf-8")


@pytest.fixture
def gateway() -> Manifest:
    (found,) = of_kind(built("gateway"), "Gateway")
    return found


@pytest.fixture
def route() -> Manifest:
    (found,) = of_kind(built("gateway"), "GRPCRoute")
    return found


def test_nothing_comes_in_without_tls(gateway: Manifest) -> None:
    for listener in gateway["spec"]["listeners"]:
        assert (listener["protocol"], listener["tls"]["mode"]) == ("HTTPS", "Terminate")
        (certificate,) = listener["tls"]["certificateRefs"]
        assert f"create secret tls {certificate['name']} " in OPERATIONS


def test_the_route_leads_from_the_listener_to_the_serve_service(gateway: Manifest, route: Manifest) -> None:
    (parent,) = route["spec"]["parentRefs"]
    (listener,) = gateway["spec"]["listeners"]
    assert (parent["name"], parent["sectionName"]) == (gateway["metadata"]["name"], listener["name"])
    assert route["spec"]["hostnames"] == [listener["hostname"]]
    assert gateway["metadata"]["namespace"] == route["metadata"]["namespace"] == "outrider"
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    service = ray_service("demo-cpu")["spec"]["serveService"]
    ports = {port["port"]: port["name"] for port in service["spec"]["ports"]}
    assert (backend["name"], ports[backend["port"]]) == (service["metadata"]["name"], "serve-grpc")


def test_only_the_public_service_is_reached(route: Manifest) -> None:
    assert [rule["matches"] for rule in route["spec"]["rules"]] == [[{"method": {"service": SERVICE}}]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_routers_alone_see_what_keys_are_checked_against(overlay: str) -> None:
    mounted = {}
    for pod in pods(built(f"overlays/{overlay}")):
        volumes = {each["name"]: each["secret"] for each in pod.spec.get("volumes", ()) if "secret" in each}
        if (secret := volumes.get("access")) is not None:
            (mount,) = [each for each in pod.containers[0]["volumeMounts"] if each["name"] == "access"]
            mounted[pod.name] = (secret["secretName"], secret["optional"], mount["mountPath"], mount["readOnly"])
            assert "subPath" not in mount, "a file mounted by itself does not follow the Secret"
    assert mounted == {"router": ("outrider-access", True, "/etc/outrider/access", True)}


def test_the_documented_section_and_secret_fit_the_mount() -> None:
    (section,) = re.findall(r"```yaml\n(access:\n.*?)```", OPERATIONS, re.DOTALL)
    access = Access.model_validate(yaml.safe_load(section)["access"])
    assert access.api_keys is not None
    assert access.jwt is not None
    files = {PurePosixPath(access.api_keys), PurePosixPath(access.jwt.jwks)}
    assert {str(file.parent) for file in files} == {"/etc/outrider/access"}
    created = re.findall(r"create secret generic outrider-access((?: --from-file=\S+)+)", OPERATIONS)
    assert created
    for keys in created:
        assert set(re.findall(r"--from-file=(\S+)", keys)) <= {file.name for file in files}
