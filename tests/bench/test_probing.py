"""Forwards of real engines over gRPC on emulated devices whose clocks only forwards move: times are found again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from bench.calibration import fit_times
from bench.emulated_model import NUM_WORDS, make_folder
from bench.emulation import DeviceTimes, Emulation
from bench.probing import Plan, Prompts, Text, draft_wait_s, ranks, time_devices
from engine.drafting import DraftEngine
from engine.emulated import EmulatedDevice
from engine.loop import draft_loop, target_loop
from engine.runner import Runner
from engine.settings import EngineSettings
from engine.target import TargetEngine
from rpc.clients import DraftClient, TargetClient
from rpc.servers import serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer

EMULATION = Emulation(
    target=DeviceTimes(step_s=0.05, row_share=0.004, prompt_row_share=0.002, context_token_s=1e-6),
    draft=DeviceTimes(step_s=0.003, row_share=0.01, prompt_row_share=0.02, context_token_s=2e-6),
    alpha=0.7,
    recall=0.5,
)
PLAN = Plan(rows=(1, 2, 8), sessions=(1,), contexts=(64, 512), prompt_rows=(200, 100), num_drafted=4, repeats=1)


class _Clock:
    """Stands still but for what a device sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[TargetClient, DraftClient]]:
    """A target and a draft that serve."""
    settings = EngineSettings(make_folder(folder), num_blocks=512, max_num_batched_tokens=256)
    clocks = _Clock(), _Clock()
    devices = [
        EmulatedDevice(settings, stub, times.forward_time(1.0), clock, clock.sleep)
        for stub, times, clock in zip(
            (EMULATION.target_stub(), EMULATION.draft_stub()), (EMULATION.target, EMULATION.draft), clocks, strict=True
        )
    ]
    target = TargetEngine(Runner(settings, devices[0], clocks[0]), clock=clocks[0])
    draft = DraftEngine(Runner(settings, devices[1], clocks[1]), clock=clocks[1])
    servicers = VerificationServicer(target_loop(target)), DraftingServicer(draft_loop(draft))
    servers = []
    for servicer in servicers:
        servicer.loop.start()
        servers.append(await serve_engine(servicer))
    clients = await TargetClient.connect(servers[0].address), await DraftClient.connect(servers[1].address)
    yield clients
    for client, server, servicer in zip(clients, servers, servicers, strict=True):
        await client.close()
        await server.stop()
        await servicer.loop.call(lambda engine: engine.check_integrity())
        await servicer.loop.close()


async def test_times_are_those_of_the_devices(tmp_path: Path) -> None:
    told: list[None] = []
    async with pair(tmp_path / "emulated") as (target, draft):
        devices = await time_devices(target, draft, Prompts(range(100)), PLAN, lambda: told.append(None))
    assert len(told) == PLAN.num_cells
    for found, times in (
        (fit_times(devices.target), EMULATION.target),
        (fit_times(devices.draft), EMULATION.draft),
    ):
        assert found.step_s == pytest.approx(times.step_s, rel=0.01)
        assert found.context_token_s == pytest.approx(times.context_token_s, rel=0.03)
        assert found.prompt_row_share == pytest.approx(times.prompt_row_share, rel=0.03)
    assert fit_times(devices.target).row_share == pytest.approx(EMULATION.target.row_share, rel=0.03)


async def test_what_a_proposal_takes_besides_forwards_is_its_wait(tmp_path: Path) -> None:
    ticks = (0.1 * number for number in count())
    async with pair(tmp_path / "emulated") as (_, draft):
        wait_s = await draft_wait_s(draft, Prompts(range(100)), 4, lambda: next(ticks))
    forwards_s = 4 * (EMULATION.draft.step_s + 90 * EMULATION.draft.context_token_s)
    assert wait_s == pytest.approx(0.1 - forwards_s, abs=0.001)


async def test_ranks_are_those_of_the_emulated_draft(tmp_path: Path) -> None:
    prompts = [[(7 * each + place) % NUM_WORDS for place in range(16)] for each in range(6)]
    texts = [Text(tuple(prompt), tuple(EMULATION.reference(prompt, 101))) for prompt in prompts]
    async with pair(tmp_path / "emulated") as (_, draft):
        found = await ranks(draft, texts, EMULATION.num_ranked, lambda: None)
    assert found.total == 600
    assert found.first / found.total == pytest.approx(EMULATION.alpha, abs=0.05)
    assert found.recall == pytest.approx(EMULATION.recall, abs=0.08)


def test_prompts_of_one_turn_are_the_same() -> None:
    prompts = Prompts(range(50))
    assert prompts.made(64, "0") == prompts.made(64, "0") != prompts.made(64, "1")
    assert set(prompts.made(64, "0")) <= set(range(50))
