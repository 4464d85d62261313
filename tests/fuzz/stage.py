"""What is fuzzed: real target and draft engines on emulated devices, their servers, and a router that uses both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.emulated_model import make_folder
from bench.emulation import DeviceTimes, Emulation
from engine.drafting import build_draft_engine
from engine.loop import DraftLoop, TargetLoop, draft_loop, target_loop
from engine.settings import DraftSettings, EngineSettings
from engine.target import build_target_engine
from router.peers import PeerSet
from router.service import Router, RouterConfig
from router.shared import SessionConfig
from router.speed_gate import PolicyConfig
from router.tokenizer import Tokenizer
from rpc.clients import DraftClient, TargetClient
from rpc.servers import EngineServer, serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer
from tests.rpc.serving import SERVING, health_of

INSTANT = DeviceTimes(step_s=1e-6, row_share=0.0)
EMULATION = Emulation(target=INSTANT, draft=INSTANT, alpha=0.8)
NUM_BLOCKS, BLOCK_SIZE = 128, 8  # few: sessions lose their blocks to each other
MAX_SESSIONS = 64
REST_S = 20.0
MAX_GROWTH_BYTES = 256 << 20

Loop = TargetLoop | DraftLoop


@dataclass(frozen=True)
class Stage:
    """The running system."""

    target: TargetLoop
    draft: DraftLoop
    servers: tuple[EngineServer, EngineServer]
    router: Router
    tokenizer: Tokenizer

    @property
    def loops(self) -> tuple[Loop, Loop]:
        return self.target, self.draft

    async def check_integrity(self) -> None:
        """Raises unless both engines' books are right, and both servers say that they serve."""
        for loop, server in zip(self.loops, self.servers, strict=True):
            await loop.call(lambda engine: engine.check_integrity())
            assert loop.unhealthy() is None
            assert await health_of(server.address) == SERVING

    async def is_at_rest(self) -> bool:
        """Whether no session is open any more, and every block is free."""
        infos = [await loop.call(lambda engine: engine.info()) for loop in self.loops]
        left = [loop.backlog + len(loop._subscribers) for loop in self.loops]
        return not any(left) and all(info.free_blocks == info.num_blocks - 1 for info in infos)


async def until_at_rest(stage: Stage) -> None:
    """Returns once what was closed is gone. Raises TimeoutError if that does not happen, for then it is a leak."""
    async with asyncio.timeout(REST_S):
        while not await stage.is_at_rest():
            await asyncio.sleep(0.01)
    await stage.check_integrity()


async def turn(loop: Loop) -> None:
    """Returns once all that was posted is applied and the step after it is over."""
    for _ in range(2):
        await loop.call(lambda engine: None)


@asynccontextmanager
async def running_stage(folder: Path) -> AsyncIterator[Stage]:
    """One target and one draft on `folder`, which is made. At the end they must be at rest."""
    tokenizer = Tokenizer(make_folder(folder))
    settings = EngineSettings(
        folder,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=tokenizer.vocab_size,
        max_sessions=MAX_SESSIONS,
        max_num_batched_tokens=128,
    )
    target = target_loop(build_target_engine(settings, device=EMULATION.target_device(settings)))
    draft = draft_loop(build_draft_engine(DraftSettings(settings), EMULATION.draft_device(settings)))
    target.start()
    draft.start()
    servers = await serve_engine(VerificationServicer(target)), await serve_engine(DraftingServicer(draft))
    clients = await TargetClient.connect(servers[0].address), await DraftClient.connect(servers[1].address)
    peers = PeerSet()
    peers.targets.replace({"target": clients[0]})
    peers.drafts.replace({"draft": clients[1]})
    always = SessionConfig(policy=PolicyConfig(off_below=0.0, acceptance_floor=0.0))
    router = Router(tokenizer, peers, RouterConfig(sessions=always))
    stage = Stage(target, draft, servers, router, tokenizer)
    try:
        yield stage
        await until_at_rest(stage)
    finally:
        for closing in (*clients, *(_Stopping(server) for server in servers), target, draft):
            await closing.close()


@dataclass(frozen=True)
class _Stopping:
    server: EngineServer

    async def close(self) -> Any:
        await self.server.stop()


def resident_bytes() -> int:
    """Memory of this process, in which the servers run too."""
    rss: int = psutil.Process().memory_info().rss
    return rss
