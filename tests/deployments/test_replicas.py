"""Engine replicas without Serve: their health, over engines that are made up."""

from __future__ import annotations

import asyncio

import pytest

from deployments.config_file import parse_config
from deployments.replicas import DraftDeployment, TargetDeployment
from engine.errors import Unavailable
from tests.rpc.fakes import FakeDraft, FakeTarget


class Target(TargetDeployment):
    engine = FakeTarget

    def __del__(self) -> None:
        """Serve awaits the parent's; here the test does."""


class Draft(DraftDeployment):
    engine = FakeDraft

    def __del__(self) -> None: ...


@pytest.mark.parametrize(("kind", "section"), [(Target, "target"), (Draft, "draft")])
async def test_a_replica_is_unhealthy_after_the_stall_limit_of_its_section(monkeypatch, kind, section) -> None:
    engine = kind.engine()
    monkeypatch.setattr(kind, "_build", staticmethod(lambda config: engine))
    monkeypatch.setattr(engine, "check_integrity", engine.gate.wait)
    engine.gate.clear()
    replica = kind.__new__(kind)
    await replica.__init__(parse_config({section: {"stall_limit_s": 0.01}}, "test"))
    turn = asyncio.create_task(replica.check_integrity())
    try:
        async with asyncio.timeout(30.0):  # the limit is 60 s where none is given
            while is_healthy(replica):
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="in one step"):
            replica.check_health()
    finally:
        engine.gate.set()
        await turn
        await super(kind, replica).__del__()


def is_healthy(replica: Target | Draft) -> bool:
    try:
        replica.check_health()
    except Unavailable:
        return False
    return True
