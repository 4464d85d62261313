"""A node is lost with all that ran on it: several raylets on one machine, of which one is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.local import OBJECT_STORE_BYTES, LocalCluster, free_port, settings_of
from deployments.client import Ask, Client
from deployments.config import OutriderConfig
from deployments.config_file import parse_config
from tests.chaos import processes
from tests.serve.conftest import model_folders  # noqa: F401 - a fixture
from tests.waiting import until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, at import
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # and of its subprocesses
]

RACK = {"num_cpus": 2, "resources": {"rack": 2}, "object_store_memory": OBJECT_STORE_BYTES}


@pytest.fixture
def config(model_folders: tuple[Path, Path]) -> OutriderConfig:  # noqa: F811
    target, draft = model_folders
    return parse_config(
        {
            "target": {
                "model": str(target),
                "dtype": "float32",
                "num_replicas": 2,
                "tensor_parallel_size": 2,
                "ray_actor_options": {"num_cpus": 1, "resources": {"rack": 1}},
            },
            "draft": {"model": str(draft), "dtype": "float32"},
            "router": {"peer_refresh_s": 0.5},
            "server": {"grpc_port": free_port(), "http_port": free_port()},
        },
        "tests",
    )


@pytest.fixture
def racks(config: OutriderConfig) -> Iterator[tuple[Any, list[Any]]]:
    """A head with router and draft, and two nodes with room for one target group each; the system runs on them."""
    with settings_of(LocalCluster(num_cpus=4)):
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        from deployments.app import APPLICATION, build_app, start_serve

        head = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = [cluster.add_node(**RACK) for _ in range(2)]
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            start_serve(config.server, "HeadOnly")
            serve.run(build_app(config), name=APPLICATION, route_prefix="/")
            yield cluster, nodes
            serve.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()


def targets() -> dict[str, int]:
    """Sessions by address of the targets that answer."""
    from ray import serve

    try:
        asked = serve.get_deployment_handle("Target", "outrider").broadcast("endpoint")
        answers = asked.results(timeout_s=5, return_exceptions=True)
    except Exception:  # Serve says in many ways that no replica is up
        return {}
    return {each.address: each.info.running_sessions for each in answers if not isinstance(each, BaseException)}


def test_streams_of_a_lost_node_go_on_elsewhere(racks: tuple[Any, list[Any]], config: OutriderConfig) -> None:
    cluster, nodes = racks
    assert until(lambda: len(targets()) == 2, 60.0)
    ask = Ask(prompt="the fox", sampling={"max_tokens": 440, "ignore_eos": True}, speculation="off")
    with Client(f"127.0.0.1:{config.server.grpc_port}") as client:  # the router may be on it too
        undisturbed = client.generate(ask)
        stream, lost = client.stream(ask), None
        for response in stream:
            if lost is None and len(stream.token_ids) > 40:
                (leader,) = [
                    processes.replica("Target", address) for address, sessions in targets().items() if sessions
                ]
                (lost,) = [node for node in nodes if node.all_processes["raylet"][0].process.pid == leader.ppid()]
                cluster.remove_node(lost, allow_graceful=False)
            if response.HasField("complete"):
                assert response.complete.finish_reason == "length"
    assert lost is not None
    assert tuple(stream.token_ids) == undisturbed.token_ids
    cluster.add_node(**RACK)
    assert until(lambda: len(targets()) == 2, 90.0)  # the group has been built anew on the new node
