"""The pool follows the replicas: each is connected to once, and let go of when it is gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from cluster.discovery import Endpoint
from deployments.peers import PeerKeeper
from engine.errors import DeadlineExceeded, Unavailable
from router.peers import Pool
from tests.cluster.test_discovery import INFO, Findings


class Replicas:
    """A handle whose deployment has the replicas that the test puts here."""

    def __init__(self, *addresses: str) -> None:
        self.addresses, self.answering = list(addresses), True
        self.strangers: set[str] = set()

    def broadcast(self, method_name: str) -> Replicas:
        return self

    async def results_async(self, **limits: Any) -> list[Endpoint]:
        if not self.answering:
            raise TimeoutError
        return [
            Endpoint(address, replace(INFO, tokenizer="another") if address in self.strangers else INFO)
            for address in self.addresses
        ]


class FakeClient:
    """Stands in for TargetClient; remembers who was connected to and closed."""

    log: ClassVar[list[str]] = []
    dead: ClassVar[set[str]] = set()

    def __init__(self, address: str) -> None:
        self.address = address

    @classmethod
    async def connect(cls, address: str) -> FakeClient:
        if address in cls.dead:
            raise Unavailable(address)
        cls.log.append(f"connect {address}")
        return cls(address)

    async def refresh(self, timeout_s: float) -> None:
        self.log.append(f"ask {self.address}")
        if self.address in self.dead:
            raise DeadlineExceeded(self.address)

    async def close(self) -> None:
        self.log.append(f"close {self.address}")


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    FakeClient.log.clear()
    FakeClient.dead.clear()


class Watch:
    """A keeper over scripted replicas, and a way to wait for its next look."""

    def __init__(self, *addresses: str) -> None:
        self.replicas, self.pool, self.findings = Replicas(*addresses), Pool[Any](), Findings()
        self.keeper: PeerKeeper[Any] = PeerKeeper(
            self.replicas,
            self.pool,
            FakeClient.connect,
            self.findings.queue.put_nowait,
            period_s=3600,
            tokenizer=INFO.tokenizer,
        )

    async def look(self) -> None:
        """Returns once the look under way has been acted on: the one after it has begun."""
        await self.findings.queue.get()
        self.keeper.look_now()
        await self.findings.queue.get()


async def test_new_replicas_are_connected_to_once_and_lost_ones_closed() -> None:
    watch = Watch("a:1", "b:2")
    await watch.look()
    assert sorted(FakeClient.log) == ["connect a:1", "connect b:2"]
    watch.replicas.addresses = ["b:2", "c:3"]
    watch.keeper.look_now()
    await watch.look()
    assert sorted(FakeClient.log[2:]) == ["close a:1", "connect c:3"]
    await watch.keeper.close()
    assert sorted(FakeClient.log[4:]) == ["close b:2", "close c:3"]


async def test_a_replica_that_does_not_answer_is_left_out_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    FakeClient.dead.add("a:1")
    watch = Watch("a:1")
    for _ in range(3):
        watch.keeper.look_now()
        await watch.look()
    assert watch.pool.any() is None
    assert caplog.messages == ["the replica at a:1 cannot be used: a:1"]  # said once
    FakeClient.dead.clear()
    watch.keeper.look_now()
    await watch.look()
    assert watch.pool.any().address == "a:1"
    await watch.keeper.close()


async def test_a_hung_replica_is_let_go_of_though_it_makes_every_look_time_out() -> None:
    watch = Watch("a:1", "b:2")
    await watch.look()
    watch.replicas.answering = False
    FakeClient.dead.add("a:1")
    watch.keeper.look_now()
    while "close a:1" not in FakeClient.log:
        await asyncio.sleep(0)
    assert watch.pool.any().address == "b:2"
    assert sorted(FakeClient.log[2:]) == ["ask a:1", "ask b:2", "close a:1"]
    await watch.keeper.close()


async def test_a_replica_with_another_vocabulary_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch("a:1", "b:2")
    watch.replicas.strangers.add("a:1")
    await watch.look()
    watch.keeper.look_now()
    await watch.look()
    assert FakeClient.log == ["connect b:2"]
    assert caplog.text.count("another vocabulary") == 1
    await watch.keeper.close()
