"""The preStop hook: it asks, then waits for as long as something runs and no longer than it may."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import psutil
import pytest

from tests.k8s.manifests import K8S


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """k8s/drain.py, which is a script of the image and in no package."""
    spec = importlib.util.spec_from_file_location("drain", K8S / "drain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drained(hook: ModuleType, limit_s: float, busy_for: int) -> tuple[bool, list[object]]:
    happened: list[object] = []
    left = iter([True] * busy_for)
    came_to_rest = hook.drain(
        limit_s,
        ask=lambda limit: happened.append(("ask", limit)),
        busy=lambda: next(left, False),
        sleep=happened.append,
    )
    return came_to_rest, happened


def test_a_pod_without_replicas_stops_at_once(hook: ModuleType) -> None:
    assert drained(hook, 600.0, busy_for=0) == (True, [("ask", 600.0)])


def test_it_waits_until_the_replicas_are_gone(hook: ModuleType) -> None:
    came_to_rest, happened = drained(hook, 600.0, busy_for=3)
    assert came_to_rest
    assert happened == [("ask", 600.0), 1.0, 1.0, 1.0]


def test_it_gives_up_when_its_time_is_over(hook: ModuleType) -> None:
    came_to_rest, happened = drained(hook, 4.0, busy_for=1000)
    assert not came_to_rest
    assert happened == [("ask", 4.0), 1.0, 1.0, 1.0, 1.0]


def test_it_knows_a_replica_by_the_name_ray_gives_its_process(hook: ModuleType) -> None:
    script = "import ray; ray._raylet.setproctitle('ray::ServeReplica:outrider:Router'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        title = hook._title(psutil.Process(process.pid))
        is_busy = hook.replicas_here()
        process.stdin.write(b"\n")
        process.stdin.close()
    assert title.strip() == "ray::ServeReplica:outrider:Router"
    assert is_busy
    assert not hook._title(psutil.Process()).startswith("ray::")
