"""A system with something to lose: two targets of two ranks each, a draft, two routers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cluster.discovery import Endpoint
from cluster.local import free_port
from deployments.config import OutriderConfig
from deployments.config_file import parse_config
from deployments.system import local_system
from tests.chaos import processes
from tests.serve.conftest import client, model_folders, stub  # noqa: F401 - fixtures, over this package's system
from tests.waiting import until

NUM_GROUPS, GROUP_SIZE, NUM_ROUTERS = 2, 2, 2
COLLECTIVE_TIMEOUT_S = 4.0


@dataclass(frozen=True)
class System:
    """The running system, and the processes it is made of."""

    address: str

    def endpoints(self, deployment: str) -> list[Endpoint]:
        """The live replicas; fewer, or none, while some are being rebuilt."""
        from ray import serve

        try:
            asked = serve.get_deployment_handle(deployment, "outrider").broadcast("endpoint")
            return [each for each in asked.results(timeout_s=5, return_exceptions=True) if isinstance(each, Endpoint)]
        except Exception:  # Serve says in many ways that no replica is up
            return []

    def leader(self, *, running: int) -> psutil.Process:
        """The rank 0 of a target that has so many sessions."""
        for endpoint in self.endpoints("Target"):
            if endpoint.info.running_sessions == running:
                return processes.replica("Target", endpoint.address)
        raise LookupError(f"no target has {running} sessions: {self.endpoints('Target')}")

    def is_whole(self) -> bool:
        """Every engine answers, with all its followers; there are as many routers as there should be, and no more
        placement groups than copies of the target.
        """
        from ray.util import placement_group_table

        groups = [each["state"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
        return (
            groups == ["CREATED"] * NUM_GROUPS
            and len(processes.workers(processes.FOLLOWER)) == NUM_GROUPS * (GROUP_SIZE - 1)
            and len(processes.workers("ray::ServeReplica:outrider:Router")) == NUM_ROUTERS
            and len(self.endpoints("Target")) == NUM_GROUPS
            and len(self.endpoints("Draft")) == 1
        )

    def check_integrity(self) -> None:
        """Raises if any engine's block accounting and sessions disagree."""
        from ray import serve

        for deployment in ("Target", "Draft"):
            serve.get_deployment_handle(deployment, "outrider").broadcast("check_integrity").results(timeout_s=30)

    def is_at_rest(self) -> bool:
        """No session is open anywhere, and every block is free."""
        infos = [each.info for name in ("Target", "Draft") for each in self.endpoints(name)]
        return bool(infos) and all(i.running_sessions == 0 and i.free_blocks == i.num_blocks - 1 for i in infos)


@pytest.fixture(scope="package")
def config(model_folders: tuple[Path, Path]) -> OutriderConfig:  # noqa: F811
    target, draft = model_folders
    engine = {"dtype": "float32", "kv_cache": {"num_blocks": 512, "block_size": 16}, "max_sessions": 256}
    return parse_config(
        {
            "target": {
                **engine,
                "model": str(target),
                "num_replicas": NUM_GROUPS,
                "tensor_parallel_size": GROUP_SIZE,
                "collective_timeout_s": COLLECTIVE_TIMEOUT_S,
            },
            "draft": {**engine, "model": str(draft)},
            "router": {"peer_refresh_s": 0.5, "num_replicas": NUM_ROUTERS, "max_concurrent": 32, "max_queued": 64},
            "server": {"grpc_port": free_port(), "http_port": free_port()},
        },
        "tests",
    )


@pytest.fixture(scope="package")
def running(config: OutriderConfig) -> Iterator[System]:
    with local_system(config) as address:
        yield System(address)


@pytest.fixture
def system(running: System) -> Iterator[System]:
    """Whole at the beginning of every test, with every block accounted for at its end."""
    assert until(running.is_whole, 90.0), running.endpoints("Target")
    yield running
    assert until(running.is_whole, 90.0), running.endpoints("Target")
    assert until(running.is_at_rest, 5.0), running.endpoints("Target")
    running.check_integrity()
