"""A whole system in one process on emulated devices: real engines, router and gRPC, and a reference for the tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.emulated_model import make_folder
from bench.emulation import DeviceTimes, Emulation
from engine.drafting import build_draft_engine
from engine.loop import draft_loop, target_loop
from engine.proposal import EarlyProposals, Proposal, Verdict
from engine.sampling import SamplingParams, StopParams
from engine.settings import DraftSettings, EngineSettings
from engine.target import build_target_engine
from router.events import Complete, Observer
from router.peers import PeerSet
from router.policy import SpeculationControl
from router.requests import GenerateRequest, TokenIds
from router.service import Router, RouterConfig
from router.shared import SessionConfig
from router.tokenizer import Tokenizer
from rpc.clients import DraftClient, TargetClient
from rpc.delay import DelayInterceptor, DelayLine
from rpc.servers import serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer
from tests.rpc.serving import shut_down

EMULATION = Emulation(
    target=DeviceTimes(step_s=0.05, row_share=0.004), draft=DeviceTimes(step_s=0.003, row_share=0.01), alpha=0.8
)


@dataclass
class EmulatedSystem:
    """The running system, and one way to ask it."""

    router: Router
    loops: tuple[Any, Any]

    async def ask(self, prompt: Sequence[int], num_tokens: int, **rest: Any) -> tuple[list[int], Complete]:
        rest.setdefault("speculation", SpeculationControl(drafter="draft_model"))
        request = GenerateRequest(TokenIds(tuple(prompt)), max_tokens=num_tokens, ignore_eos=True, **rest)
        events = [event async for event in self.router.generate(request)]
        assert isinstance(events[-1], Complete)
        return [token for delta in events[:-1] for token in delta.token_ids], events[-1]

    async def check_at_rest(self) -> None:
        for loop in self.loops:
            await loop.call(lambda engine: engine.check_integrity())
            info = await loop.call(lambda engine: engine.info())
            assert (info.running_sessions, info.free_blocks) == (0, info.num_blocks - 1)


@asynccontextmanager
async def emulated_system(
    folder: Path,
    sessions: SessionConfig,
    emulation: Emulation = EMULATION,
    jitter: Callable[[], float] | None = None,
    observer: Observer | None = None,
) -> AsyncIterator[EmulatedSystem]:
    """Runs one target and one draft; `jitter` delays each of their answers by so many seconds, on its own."""
    make_folder(folder)
    tokenizer = Tokenizer(folder)
    settings = EngineSettings(
        folder, num_blocks=1024, vocab_size=tokenizer.vocab_size, max_sessions=64, max_num_batched_tokens=512
    )
    target = target_loop(build_target_engine(settings, device=emulation.target_device(settings)))
    draft = draft_loop(build_draft_engine(DraftSettings(settings), emulation.draft_device(settings)))
    servers = []
    one_way_s = (emulation.target_one_way_s, emulation.draft_one_way_s)
    for servicer, seconds in zip((VerificationServicer(target), DraftingServicer(draft)), one_way_s, strict=True):
        servicer.loop.start()
        network = DelayInterceptor(DelayLine(seconds, asyncio.get_running_loop()))
        servers.append(await serve_engine(servicer, interceptors=[network] if seconds else []))
    clients = await TargetClient.connect(servers[0].address), await DraftClient.connect(servers[1].address)
    peers = PeerSet()
    peers.targets.replace({"target": clients[0] if jitter is None else JitteryTarget(clients[0], jitter)})
    peers.drafts.replace({"draft": clients[1] if jitter is None else JitteryDraft(clients[1], jitter)})
    router = Router(tokenizer, peers, RouterConfig(sessions=sessions), observer)
    try:
        yield EmulatedSystem(router, (target, draft))
    finally:
        await shut_down(clients, servers, (target, draft))


class JitteryTarget:
    """A target whose verdicts come late, each by its own delay."""

    def __init__(self, port: TargetClient, jitter: Callable[[], float]) -> None:
        self._port, self._jitter = port, jitter
        self.info = port.info

    def open(
        self, prompt: Sequence[int], committed: Sequence[int], sampling: SamplingParams, stops: StopParams, **rest: Any
    ) -> Any:
        session = self._port.open(prompt, committed, sampling, stops, **rest)
        arrived = session.verdict

        async def verdict() -> Verdict:
            came = await arrived()
            await asyncio.sleep(self._jitter())
            return came

        session.verdict = verdict  # type: ignore[method-assign]
        return session


class JitteryDraft:
    """A draft whose answers come late, and early proposals overtake the others or are overtaken by them."""

    def __init__(self, port: DraftClient, jitter: Callable[[], float]) -> None:
        self._port, self._jitter = port, jitter
        self.info = port.info

    def open(self, prompt: Sequence[int], sampling: SamplingParams, *, on_early: Any, **rest: Any) -> Any:
        def later(early: EarlyProposals) -> None:
            asyncio.get_running_loop().call_later(self._jitter(), on_early, early)

        session = self._port.open(prompt, sampling, on_early=later, **rest)
        arrived = session.proposal

        async def proposal() -> Proposal:
            came = await arrived()
            await asyncio.sleep(self._jitter())
            return came

        session.proposal = proposal  # type: ignore[method-assign]
        return session


def delays(seed: int, longest_s: float) -> Callable[[], float]:
    """Mostly short delays, now and then a long one."""
    rng = random.Random(seed)
    return lambda: longest_s * rng.random() ** 4
