"""What a Pod may do, and who may talk to whom."""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s.manifests import OVERLAYS, Manifest, Pod, installed, matches, of_kind, pods

AGENT = {"outrider.dev/agents": "true"}
PORTS = (22, 443, 4317, 6379, 8000, 8080, 8265, 8888, 9000, 10001, 13133, 16686, 21000, 22000, 52365)
"""What is asked of every Pod: all that listens somewhere, and some that do nowhere."""
PROMETHEUS = {"outrider.dev/prometheus": "true"}


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return installed(request.param)


def test_no_container_may_more_than_it_needs(objects: tuple[Manifest, ...]) -> None:
    for pod in pods(objects):
        assert pod.spec["automountServiceAccountToken"] is False
        security = pod.spec["securityContext"]
        assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        assert security["runAsUser"] > 0
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_every_container_says_what_it_takes(objects: tuple[Manifest, ...]) -> None:
    for pod in pods(objects):
        for container in pod.containers:
            for side in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(container["resources"][side])
            asked, most = container["resources"]["requests"], container["resources"]["limits"]
            assert all(asked[kind] == most[kind] for kind in most if kind.startswith("nvidia.com/"))


def test_models_are_read_only_and_what_is_written_has_a_limit(objects: tuple[Manifest, ...]) -> None:
    for pod in pods(objects):
        for volume in pod.spec.get("volumes", ()):
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"]
        for container in pod.containers:
            for mount in container.get("volumeMounts", ()):
                assert mount["name"] != "models" or mount["readOnly"]


def test_ray_pods_may_write_where_ray_does(objects: tuple[Manifest, ...]) -> None:
    for pod in pods(objects):
        if "ray.io/node-type" in pod.labels:
            (container,) = pod.containers
            writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert writable == {"/tmp", "/home/outrider"}  # KubeRay adds /dev/shm


class Network:
    """NetworkPolicies as Kubernetes applies them: what no policy allows of a Pod that one selects is refused."""

    def __init__(self, objects: tuple[Manifest, ...]) -> None:
        self.policies = [each["spec"] for each in of_kind(objects, "NetworkPolicy")]
        self.pods: dict[str, Pod] = {pod.labels["app.kubernetes.io/component"]: pod for pod in pods(objects)}

    def lets_in(self, to: str, port: int, namespace: dict[str, str], labels: dict[str, str]) -> bool:
        return any(
            self._peer(rule.get("from"), namespace, labels) and self._port(rule.get("ports"), port, self.pods[to])
            for policy in self._of(to, "Ingress")
            for rule in policy.get("ingress", ())
        )

    def lets_out(self, of: str, port: int, namespace: dict[str, str], to: dict[str, str]) -> bool:
        return any(
            self._peer(rule.get("to"), namespace, to) and self._port(rule.get("ports"), port, None)
            for policy in self._of(of, "Egress")
            for rule in policy.get("egress", ())
        )

    def connects(self, of: str, to: str, port: int) -> bool:
        """Between two of our own Pods: let out and let in."""
        own: dict[str, str] = {}
        labels = {name: dict(self.pods[name].labels) for name in (of, to)}
        return self.lets_out(of, port, own, labels[to]) and self.lets_in(to, port, own, labels[of])

    def _of(self, name: str, direction: str) -> list[dict[str, Any]]:
        labels = self.pods[name].labels
        return [p for p in self.policies if matches(p["podSelector"], labels) and direction in p["policyTypes"]]

    @staticmethod
    def _peer(peers: list[dict[str, Any]] | None, namespace: dict[str, str], labels: dict[str, str]) -> bool:
        assert peers, "a rule without peers is open to everybody"
        return any(
            (matches(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else not namespace)
            and ("podSelector" not in peer or matches(peer["podSelector"], labels))
            for peer in peers
        )

    @staticmethod
    def _port(ports: list[dict[str, Any]] | None, port: int, pod: Pod | None) -> bool:
        numbers = [each["port"] for each in ports or ()]
        if pod is not None:
            numbers = [pod.ports[each] if isinstance(each, str) else each for each in numbers]
        assert all(isinstance(each, int) for each in numbers), "egress rules by name depend on the other Pod"
        return ports is None or port in numbers


@pytest.fixture
def network(objects: tuple[Manifest, ...]) -> Network:
    return Network(objects)


RAY = ("head", "router", "draft", "target")


def test_everything_is_denied_first(network: Network) -> None:
    for name in network.pods:
        assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in network._of(name, "Ingress")
        assert not network.lets_in(name, 9000, {"name": "somewhere"}, {})
        assert not network.lets_out(name, 443, {"name": "internet"}, {})
        assert not network.lets_in(name, 6379, AGENT, {})


def test_everybody_may_ask_for_names(network: Network) -> None:
    dns = {"kubernetes.io/metadata.name": "kube-system"}
    assert all(network.lets_out(name, 53, dns, {"k8s-app": "kube-dns"}) for name in network.pods)


def test_ray_pods_reach_each_other_on_any_port(network: Network) -> None:
    assert all(network.connects(one, other, 34567) for one in RAY for other in RAY)


def test_agents_reach_the_api_and_nothing_else(network: Network) -> None:
    reached = {(name, port) for name in network.pods for port in PORTS if network.lets_in(name, port, AGENT, {})}
    assert reached == {(name, 9000) for name in ("router", "draft", "target")} | {("otel-collector", 4317)}


def test_the_operator_reaches_the_dashboard(network: Network) -> None:
    ray_system = {"kubernetes.io/metadata.name": "ray-system"}
    operator = {"app.kubernetes.io/name": "kuberay-operator"}
    reached = {
        (name, port) for name in network.pods for port in PORTS if network.lets_in(name, port, ray_system, operator)
    }
    assert reached == {("head", 8265), ("head", 8000)}


def test_prometheus_reaches_metrics(network: Network) -> None:
    reached = {(name, port) for name in network.pods for port in PORTS if network.lets_in(name, port, PROMETHEUS, {})}
    assert reached == {(name, 8080) for name in RAY} | {("otel-collector", 8888)}


def test_redis_is_the_heads_alone(network: Network) -> None:
    assert {name for name in network.pods if network.connects(name, "redis", 6379)} == {"head"}


def test_spans_go_by_the_collector(network: Network) -> None:
    assert all(network.connects(name, "otel-collector", 4317) for name in RAY)
    assert {name for name in network.pods if network.connects(name, "jaeger", 4317)} == {"otel-collector"}
