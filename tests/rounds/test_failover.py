"""Targets that go away under real sessions: another one, or one that comes later, goes on with the same text."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.drafting import build_draft_engine
from engine.errors import DeadlineExceeded, OutriderError, Unavailable
from engine.loop import DraftLoop, TargetLoop, draft_loop, target_loop
from engine.planner import RowShapes
from engine.proposal import Verdict
from engine.sampling import SamplingParams
from engine.settings import DraftSettings, EngineSettings
from engine.target import TargetEngine, build_target_engine
from router.events import Complete
from router.peers import PeerSet
from router.policy import SpeculationControl
from router.requests import GenerateRequest, TokenIds
from router.service import Router, RouterConfig
from router.target_link import TargetLinkConfig
from router.tokenizer import Tokenizer
from rpc.clients import DraftClient, TargetClient
from rpc.servers import EngineServer, serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer
from tests.rounds.test_real_engines import ALWAYS, DRAFT, OFF, TARGET_WINDOW, make_folder

PROMPT = (5, 6, 7, 5, 6, 7, 5)
NUM_TOKENS = 60
WAYS = {
    "plain": (OFF, SamplingParams()),
    "chain": (DRAFT, SamplingParams()),
    "ngram": (SpeculationControl(drafter="ngram"), SamplingParams()),
    "seeded": (DRAFT, SamplingParams(temperature=0.8, top_p=0.95, seed=11)),
    "seeded plain": (OFF, SamplingParams(temperature=0.8, top_p=0.95, seed=11)),
}


class Turnstile:
    """Lets an engine make so many forwards more, and the next one when it is opened.

    A target that decodes plainly is asked for all its tokens at once: nothing else keeps it from being done with them
    before this process gets round to taking it away.
    """

    def __init__(self, engine: TargetEngine) -> None:
        self._engine, self._step = engine, engine.step
        self._last_forward, self._opened = math.inf, threading.Event()
        engine.step = self._turn  # type: ignore[method-assign]

    def close_after(self, forwards: int) -> None:
        self._opened.clear()
        self._last_forward = self._engine.info().forwards + forwards

    def open(self) -> None:
        self._last_forward = math.inf
        self._opened.set()

    def _turn(self) -> Sequence[tuple[int, Verdict | OutriderError]]:
        if self._engine.info().forwards >= self._last_forward:
            self._opened.wait()
        return self._step()


@dataclass
class Target:
    """One target, served until it is shut down."""

    loop: TargetLoop
    server: EngineServer
    client: TargetClient
    turnstile: Turnstile

    async def shut_down(self) -> None:
        await self.server.stop()
        self.turnstile.open()
        await self.loop.close()
        await self.client.close()


class Fleet:
    """Targets that come and go, one draft, and a router."""

    def __init__(self, target_folder: Path, tokenizer: Tokenizer, draft: DraftLoop, peers: PeerSet) -> None:
        self._folder, self._tokenizer, self._peers = target_folder, tokenizer, peers
        self.draft, self.targets = draft, dict[str, Target]()
        self.missed = asyncio.Event()
        peers.targets.look = self.missed.set

    def router(self, wait_s: float = 60.0) -> Router:
        sessions = replace(ALWAYS, target_link=TargetLinkConfig(failover_wait_s=wait_s))
        return Router(self._tokenizer, self._peers, RouterConfig(sessions=sessions))

    async def add(self, name: str) -> None:
        settings = EngineSettings(
            self._folder,
            num_blocks=128,
            dtype="float32",
            vocab_size=self._tokenizer.vocab_size,
            shapes=RowShapes(16, 8),
        )
        engine = build_target_engine(settings)
        turnstile, loop = Turnstile(engine), target_loop(engine)
        loop.start()
        server = await serve_engine(VerificationServicer(loop))
        self.targets[name] = Target(loop, server, await TargetClient.connect(server.address), turnstile)
        self._discover()

    async def lose(self) -> None:
        """Shuts down the target that has the session."""
        infos = {name: (await target.client.refresh()).running_sessions for name, target in self.targets.items()}
        busy = self.targets.pop(next(name for name, sessions in infos.items() if sessions))
        for other in self.targets.values():
            other.turnstile.open()
        await busy.shut_down()

    async def run_and_lose(self, router: Router, asked: GenerateRequest, after: int) -> tuple[list[int], Complete]:
        """Runs a request whose target is lost when it has made at least `after` tokens, and before it is done."""
        for target in self.targets.values():
            target.turnstile.close_after(after)  # a forward brings one token or more
        return await run(router, asked, after, self.lose)

    async def at_rest(self) -> None:
        """No session and no block is held by whoever is left."""
        for loop in (self.draft, *(target.loop for target in self.targets.values())):
            await loop.call(lambda engine: engine.check_integrity())
            info = await loop.call(lambda engine: engine.info())
            assert (info.running_sessions, info.free_blocks) == (0, info.num_blocks - 1)
        assert self._peers.targets.open_sessions == self._peers.drafts.open_sessions == 0

    def _discover(self) -> None:
        self._peers.targets.replace({name: target.client for name, target in self.targets.items()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("models")
    return make_folder(place / "target", 7, TARGET_WINDOW), make_folder(place / "draft", 7, TARGET_WINDOW)


@pytest.fixture
async def fleet(folders: tuple[Path, Path]) -> AsyncIterator[Fleet]:
    tokenizer = Tokenizer(folders[0])
    async with AsyncExitStack() as stack:
        peers = PeerSet()
        draft = await stack.enter_async_context(served_draft(folders, tokenizer, peers))
        made = Fleet(folders[0], tokenizer, draft, peers)
        await made.add("a")
        yield made
        for target in made.targets.values():
            await target.shut_down()


@asynccontextmanager
async def served_draft(folders: tuple[Path, Path], tokenizer: Tokenizer, peers: PeerSet) -> AsyncIterator[DraftLoop]:
    settings = EngineSettings(folders[1], num_blocks=128, dtype="float32", vocab_size=tokenizer.vocab_size)
    loop = draft_loop(build_draft_engine(DraftSettings(settings, folders[0])))
    loop.start()
    server = await serve_engine(DraftingServicer(loop))
    client = await DraftClient.connect(server.address)
    peers.drafts.replace({"draft": client})
    yield loop
    await client.close()
    await server.stop()
    await loop.close()


def request(way: str, **rest: object) -> GenerateRequest:
    control, sampling = WAYS[way]
    asked = GenerateRequest(TokenIds(PROMPT), sampling, NUM_TOKENS, ignore_eos=True, speculation=control)
    return replace(asked, **rest)


async def rest() -> None:
    """Disturbs nobody."""


async def run(
    router: Router, asked: GenerateRequest, after: int = -1, disturb: Callable[[], Awaitable[None]] = rest
) -> tuple[list[int], Complete]:
    """Ids and final event; awaits `disturb` once at least `after` tokens have come."""
    ids: list[int] = []
    complete: Complete | None = None
    async for event in router.generate(asked):
        assert complete is None
        if isinstance(event, Complete):
            complete = event
            continue
        ids += event.token_ids
        if 0 <= after <= len(ids):
            after = -1
            await disturb()
    assert complete is not None
    return ids, complete


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after", [1, 23])
async def test_another_target_goes_on_with_the_same_tokens(fleet: Fleet, way: str, after: int) -> None:
    router = fleet.router()
    expected, end = await run(router, request(way))
    assert (len(expected), end.failovers) == (NUM_TOKENS, 0)
    await fleet.add("b")
    ids, end = await fleet.run_and_lose(router, request(way), after)
    assert (ids, end.failovers) == (expected, 1)
    assert end.usage.completion_tokens == NUM_TOKENS
    await fleet.at_rest()


async def test_unseeded_sampling_goes_on_from_what_is_committed(fleet: Fleet) -> None:
    await fleet.add("b")
    asked = replace(request("chain"), sampling=SamplingParams(temperature=0.8))
    ids, end = await fleet.run_and_lose(fleet.router(), asked, 20)
    assert (len(ids), end.failovers) == (NUM_TOKENS, 1)
    await fleet.at_rest()


@pytest.mark.parametrize("way", ["plain", "chain", "seeded"])
async def test_a_target_that_comes_later_is_waited_for(fleet: Fleet, way: str) -> None:
    router = fleet.router()
    expected, _ = await run(router, request(way))
    running = asyncio.ensure_future(fleet.run_and_lose(router, request(way), 23))
    await fleet.missed.wait()
    assert fleet.targets == {}
    await fleet.add("b")
    ids, end = await running
    assert (ids, end.failovers) == (expected, 1)
    await fleet.at_rest()


async def test_many_sessions_lose_their_target_at_once(fleet: Fleet) -> None:
    router = fleet.router()
    expected = {way: (await run(router, request(way)))[0] for way in WAYS}
    await fleet.add("b")
    first = asyncio.Event()

    async def lose_once() -> None:
        if not first.is_set():
            first.set()
            await fleet.lose()

    asked = [way for way in WAYS for _ in range(6)]
    outcomes = await asyncio.gather(*(run(router, request(way), 5, lose_once) for way in asked))
    assert all(ids == expected[way] for way, (ids, _) in zip(asked, outcomes, strict=True))
    assert sum(end.failovers for _, end in outcomes) > 1
    await fleet.at_rest()


async def test_nobody_comes(fleet: Fleet) -> None:
    with pytest.raises(Unavailable, match="no target is ready"):
        await fleet.run_and_lose(fleet.router(wait_s=0.0), request("chain"), 10)
    await fleet.at_rest()


async def test_the_deadline_passes_in_the_wait(fleet: Fleet) -> None:
    with pytest.raises(DeadlineExceeded):
        await fleet.run_and_lose(fleet.router(), request("chain", deadline_s=2.0), 10)
    await fleet.at_rest()


async def test_a_caller_that_leaves_in_the_wait_frees_the_draft(fleet: Fleet) -> None:
    running = asyncio.ensure_future(fleet.run_and_lose(fleet.router(), request("chain"), 10))
    await fleet.missed.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await fleet.draft.call(lambda engine: engine.check_integrity())
    await fleet.at_rest()


@pytest.mark.parametrize("way", WAYS)
async def test_a_resumed_call_gets_the_identical_rest(fleet: Fleet, way: str) -> None:
    router = fleet.router()
    expected, end = await run(router, request(way))
    for cut in (1, 16, 33, NUM_TOKENS - 1, NUM_TOKENS):
        tail, resumed_end = await run(router, request(way, resume_from=tuple(expected[:cut])))
        assert expected[:cut] + tail == expected
        assert resumed_end.usage.completion_tokens == end.usage.completion_tokens
    await fleet.at_rest()
