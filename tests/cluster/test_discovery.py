"""Discovery with a handle and replicas that the test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.discovery import Discovery, Endpoint
from engine.info import EngineInfo

INFO = EngineInfo(
    model="m", vocab_size=8, max_context_length=64, eos_token_ids=(0,), max_proposal_tokens=7,
    num_blocks=4, free_blocks=3, block_size=16, running_sessions=0,
)  # fmt: skip


class Handle:
    """Answers each broadcast with the next of `answers`; an exception in place of answers is raised."""

    def __init__(self, *answers: list[Any] | Exception) -> None:
        self._answers = list(answers)
        self.looks = 0

    def broadcast(self, method_name: str) -> Handle:
        assert method_name == "endpoint"
        self.looks += 1
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Findings:
    """Keeps what was found, and lets a test wait for the next finding."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[list[str]] = asyncio.Queue()

    async def __call__(self, endpoints: Sequence[Endpoint]) -> None:
        await self.queue.put([endpoint.address for endpoint in endpoints])


async def nobody() -> None:
    return


async def test_replicas_that_fail_to_answer_count_as_absent() -> None:
    handle = Handle([Endpoint("a:1", INFO), RuntimeError("died"), Endpoint("b:2", INFO)])
    found = await Discovery(handle, Findings(), nobody, period_s=60).look()
    assert [endpoint.address for endpoint in found] == ["a:1", "b:2"]


async def test_a_look_now_does_not_wait_for_the_period() -> None:
    handle = Handle([Endpoint("a:1", INFO)], [Endpoint("b:2", INFO)])
    findings = Findings()
    discovery = Discovery(handle, findings, nobody, period_s=3600)
    watching = asyncio.create_task(discovery.run())
    assert await findings.queue.get() == ["a:1"]
    discovery.look_now()
    assert await findings.queue.get() == ["b:2"]
    watching.cancel()
    await asyncio.wait([watching])


async def test_a_failing_look_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    handle = Handle(RuntimeError("controller is away"), [Endpoint("a:1", INFO)])
    findings = Findings()
    missed: list[int] = []

    async def on_missed() -> None:
        missed.append(handle.looks)

    watching = asyncio.create_task(Discovery(handle, findings, on_missed, period_s=0.001).run())
    assert await findings.queue.get() == ["a:1"]
    watching.cancel()
    await asyncio.wait([watching])
    assert "controller is away" in caplog.text
    assert missed == [1]
