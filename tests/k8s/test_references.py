"""What one object says of another is so: names, ports, labels, keys, images."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.k8s.manifests import K8S, OVERLAYS, Manifest, Pod, built, installed, matches, of_kind, pods, selected

SECRETS_BY_HAND = {"outrider-ray-auth": {"auth_token"}, "outrider-redis": {"password"}}
"""Secrets with their keys that docs/operations.md has people create; none is in the repository."""
ADDED_BY_KUBERAY = {"metrics"}


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return installed(request.param)


def found(value: Any, key: str) -> list[Any]:
    """Everything under `key`, wherever it stands."""
    if isinstance(value, list):
        return [each for item in value for each in found(item, key)]
    if not isinstance(value, dict):
        return []
    here = [value[key]] if key in value else []
    return here + [each for inner in value.values() for each in found(inner, key)]


def test_all_is_in_one_namespace(objects: tuple[Manifest, ...]) -> None:
    (namespace,) = of_kind(objects, "Namespace")
    assert {each["metadata"]["namespace"] for each in objects if each is not namespace} == {
        namespace["metadata"]["name"]
    }


def test_no_two_objects_have_one_name(objects: tuple[Manifest, ...]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


def test_config_maps_secrets_and_claims_exist(objects: tuple[Manifest, ...]) -> None:
    config_maps = {each["metadata"]["name"]: set(each["data"]) for each in of_kind(objects, "ConfigMap")}
    claims = {each["metadata"]["name"] for each in of_kind(objects, "PersistentVolumeClaim")}
    for each in objects:
        for reference in found(each, "configMapRef") + found(each, "configMap"):
            assert reference["name"] in config_maps
        for reference in found(each, "configMapKeyRef"):
            assert reference["key"] in config_maps[reference["name"]]
        for reference in found(each, "secretKeyRef"):
            assert reference["key"] in SECRETS_BY_HAND[reference["name"]]
        for reference in found(each, "persistentVolumeClaim"):
            assert reference["claimName"] in claims
    (auth,) = found(of_kind(objects, "RayService")[0], "authOptions")
    assert (auth["mode"], SECRETS_BY_HAND[auth["secretName"]]) == ("token", {"auth_token"})


def test_the_secrets_are_created_by_the_documented_commands() -> None:
    text = (K8S.parent / "docs/operations.md").read_text(encoding="utf-8")
    created = re.findall(r"create secret generic (\S+) --from-literal=(\w+)=", text)
    assert {name: {key for each, key in created if each == name} for name, _ in created} == SECRETS_BY_HAND


def test_there_is_no_secret_in_the_tree(objects: tuple[Manifest, ...]) -> None:
    assert of_kind(objects, "Secret") == []


def test_every_mount_has_its_volume(objects: tuple[Manifest, ...]) -> None:
    claimed = {claim["metadata"]["name"] for claims in found(list(objects), "volumeClaimTemplates") for claim in claims}
    for pod in pods(objects):
        volumes = {volume["name"] for volume in pod.spec.get("volumes", ())} | claimed
        for container in pod.containers:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes


def test_configuration_files_lie_where_they_are_looked_for(objects: tuple[Manifest, ...]) -> None:
    config_maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    checked = 0
    for pod in pods(objects):
        mounted = {
            volume["name"]: volume["configMap"]["name"]
            for volume in pod.spec.get("volumes", ())
            if "configMap" in volume
        }
        for container in pod.containers:
            folders = {
                mount["mountPath"]: mounted[mount["name"]]
                for mount in container.get("volumeMounts", ())
                if mount["name"] in mounted
            }
            for argument in container.get("args", ()):
                if argument.startswith("--config="):
                    folder, _, name = argument.removeprefix("--config=").rpartition("/")
                    assert name in config_maps[folders[folder]]
                    checked += 1
    assert checked == 2


def port_of(pod: Pod, port: int | str) -> int:
    """The number a port name or number stands for in a Pod. Fails if the Pod has no such port."""
    if isinstance(port, str):
        return pod.ports[port]
    assert port in pod.ports.values(), (pod.name, port)
    return port


def test_services_lead_to_ports_that_pods_have(objects: tuple[Manifest, ...]) -> None:
    for service in of_kind(objects, "Service"):
        behind = selected({"matchLabels": service["spec"]["selector"]}, objects)
        assert behind, service["metadata"]["name"]
        for pod in behind:
            for port in service["spec"]["ports"]:
                port_of(pod, port["targetPort"])


def test_the_serve_service_has_the_ports_that_serve_listens_on(objects: tuple[Manifest, ...]) -> None:
    (service,) = of_kind(objects, "RayService")
    given, config = service["spec"]["serveService"]["spec"], yaml.safe_load(service["spec"]["serveConfigV2"])
    listening = {"serve": config["http_options"]["port"], "serve-grpc": config["grpc_options"]["port"]}
    assert {port["name"]: port["port"] for port in given["ports"]} == listening
    assert all(port["port"] == port["targetPort"] for port in given["ports"]), "a headless Service maps no port"
    assert {port["name"]: port["appProtocol"] for port in given["ports"]}["serve-grpc"] == "kubernetes.io/h2c"
    for pod in pods(objects):
        if "ray.io/node-type" in pod.labels:
            assert pod.ports.items() >= listening.items()


def test_probes_ask_ports_that_answer(objects: tuple[Manifest, ...]) -> None:
    dashboard_agent = 52365
    for pod in pods(objects):
        for container in pod.containers:
            for kind in ("livenessProbe", "readinessProbe"):
                asked = container[kind].get("httpGet") or container[kind]["tcpSocket"]
                if asked["port"] != dashboard_agent:
                    port_of(pod, asked["port"])
    assert "wget" not in json.dumps(objects)


def test_names_of_services_that_are_called_exist(objects: tuple[Manifest, ...]) -> None:
    services = {
        each["metadata"]["name"]: {p["port"] for p in each["spec"]["ports"]} for each in of_kind(objects, "Service")
    }
    (ray,) = of_kind(objects, "RayService")
    text = json.dumps(
        [each["data"] for each in of_kind(objects, "ConfigMap") if "dashboard" not in each["metadata"]["name"]]
    )
    called = [*re.findall(r"(outrider-[a-z-]+):(\d+)", text), *re.findall(r"(outrider-[a-z-]+):(\d+)", json.dumps(ray))]
    assert {name for name, _ in called} == {"outrider-redis", "outrider-otel-collector", "outrider-jaeger"}
    for name, port in called:
        assert int(port) in services[name]


def test_budgets_and_monitors_take_pods_that_exist(objects: tuple[Manifest, ...]) -> None:
    for budget in of_kind(objects, "PodDisruptionBudget"):
        taken = selected(budget["spec"]["selector"], objects)
        assert taken
        assert isinstance(budget["spec"]["minAvailable"], int), "all that Pods of a custom resource may have"
        assert budget["spec"]["minAvailable"] <= sum(pod.replicas for pod in taken)
    for monitor in of_kind(objects, "PodMonitor"):
        for pod in selected(monitor["spec"]["selector"], objects) or pytest.fail(monitor["metadata"]["name"]):
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                assert endpoint["port"] in {*pod.ports, *ADDED_BY_KUBERAY}


def test_router_and_target_have_a_budget_where_there_is_more_than_a_demo() -> None:
    for overlay in set(OVERLAYS) - {"demo-cpu"}:
        names = {each["metadata"]["name"] for each in of_kind(built(f"overlays/{overlay}"), "PodDisruptionBudget")}
        assert names == {"outrider-router", "outrider-target"}


def test_pods_spread_by_labels_that_they_have(objects: tuple[Manifest, ...]) -> None:
    for pod in pods(objects):
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            assert matches(constraint["labelSelector"], pod.labels)


def test_images_have_a_tag_and_ray_pods_one_and_the_same(objects: tuple[Manifest, ...]) -> None:
    images = {(pod.name, container["image"]) for pod in pods(objects) for container in pod.containers}
    for _, image in images:
        assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+[a-z0-9.-]*", image), image
    assert len({image for name, image in images if name in ("headgroup", "router", "draft", "target")}) == 1


def test_kuberay_and_python_agree_on_rays_version(objects: tuple[Manifest, ...]) -> None:
    (service,) = of_kind(objects, "RayService")
    lock = (K8S.parent / "requirements.lock").read_text(encoding="utf-8")
    assert f"\nray=={service['spec']['rayClusterConfig']['rayVersion']}\n" in lock
