"""Sessions belong to the stream that opened them: others who name them, replay them or repeat messages change nothing.

Raw streams stand for routers that do what ours never would, over real engines on emulated devices.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from bench.emulated_model import make_folder
from bench.emulation import DeviceTimes, Emulation
from engine.drafting import build_draft_engine
from engine.loop import DraftLoop, TargetLoop, draft_loop, target_loop
from engine.proposal import Branch, EarlyProposals, Proposal, State
from engine.settings import DraftSettings, EngineSettings
from engine.target import build_target_engine
from rpc import codecs
from rpc.pb import drafting_pb2, drafting_pb2_grpc, session_pb2, verification_pb2, verification_pb2_grpc
from rpc.servers import serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer

INSTANT = DeviceTimes(step_s=1e-6, row_share=0.0)
EMULATION = Emulation(target=INSTANT, draft=INSTANT, alpha=1.0)
PROMPT = (5, 6, 9)
SAMPLING = session_pb2.EngineSampling(top_p=1.0)
Verification, Drafting = verification_pb2.VerificationRequest, drafting_pb2.DraftRequest


class RawStream:
    """A router's stream, message by message."""

    def __init__(self, call: grpc.aio.StreamStreamCall, frame: type) -> None:
        self._call, self._frame = call, frame
        self._replies: list = []
        self.frames_sent: list = []

    async def send(self, *requests) -> None:
        self.frames_sent.append(self._frame(requests=requests))
        await self._call.write(self.frames_sent[-1])

    async def replay(self, frames: Sequence) -> None:
        for frame in frames:
            await self._call.write(frame)

    async def reply(self):
        while not self._replies:
            frame = await self._call.read()
            assert frame is not grpc.aio.EOF, await self._call.details()
            self._replies.extend(frame.replies)
        return self._replies.pop(0)

    async def verdict(self) -> tuple[int, ...]:
        return tuple((await self.reply()).verdict.tokens)

    async def refusal(self) -> str:
        """What a request that names no session of this stream gets."""
        failed = (await self.reply()).failed
        assert failed.code == grpc.StatusCode.NOT_FOUND.value[0]
        return failed.message


def settings_in(folder: Path) -> EngineSettings:
    return EngineSettings(make_folder(folder), num_blocks=64, vocab_size=256, max_sessions=8, max_num_batched_tokens=64)


@asynccontextmanager
async def two_routers(
    loop: TargetLoop | DraftLoop, servicer, stub_of, frame: type
) -> AsyncIterator[tuple[RawStream, RawStream]]:
    """Two streams on one engine, each over a connection of its own. At the end nothing of them is left in it."""
    loop.start()
    server = await serve_engine(servicer)
    own_pool = (("grpc.use_local_subchannel_pool", 1),)
    try:
        async with (
            grpc.aio.insecure_channel(server.address, own_pool) as first,
            grpc.aio.insecure_channel(server.address, own_pool) as second,
        ):
            calls = [stub_of(channel).Stream() for channel in (first, second)]
            yield RawStream(calls[0], frame), RawStream(calls[1], frame)
            await loop.call(lambda engine: engine.check_integrity())
            for call in calls:
                await call.done_writing()
                assert await call.code() == grpc.StatusCode.OK
        info = await loop.call(lambda engine: engine.info())
        assert (info.running_sessions, info.free_blocks) == (0, info.num_blocks - 1)
    finally:
        await server.stop()
        await loop.close()


@asynccontextmanager
async def target_with_two_routers(folder: Path) -> AsyncIterator[tuple[TargetLoop, RawStream, RawStream]]:
    settings = settings_in(folder)
    loop = target_loop(build_target_engine(settings, device=EMULATION.target_device(settings)))
    stub_of, frame = verification_pb2_grpc.VerificationStub, verification_pb2.VerificationRequests
    async with two_routers(loop, VerificationServicer(loop), stub_of, frame) as (first, second):
        yield loop, first, second


def opening(session: int = 1, prompt: Sequence[int] = PROMPT) -> Verification:
    stops = session_pb2.EngineStops(max_tokens=100, ignore_eos=True)
    return Verification(
        open=verification_pb2.OpenTarget(session=session, prompt_token_ids=prompt, sampling=SAMPLING, stops=stops)
    )


def decoding(max_tokens: int, session: int = 1) -> Verification:
    return Verification(decode=verification_pb2.Decode(session=session, max_tokens=max_tokens))


def proposing(committed: Sequence[int], tokens: Sequence[int], session: int = 1) -> Verification:
    proposal = codecs.encode_proposal(Proposal.chain(State.of([*PROMPT, *committed]), tokens))
    return Verification(propose=verification_pb2.Propose(session=session, proposal=proposal))


def closing(session: int = 1) -> Verification:
    return Verification(close=session_pb2.CloseSession(session=session))


def proposing_early(committed: Sequence[int], token: int, session: int = 1) -> Verification:
    after = State.of([*PROMPT, *committed])
    early = EarlyProposals(after, after, (Branch(0, token, (token,)),))
    return Verification(early=codecs.encode_early(session, early))


@pytest.fixture
async def truth(tmp_path: Path) -> list[int]:
    """What plain decoding puts behind PROMPT."""
    async with target_with_two_routers(tmp_path) as (_, router, _other):
        await router.send(opening(), decoding(11))
        return [token for _ in range(12) for token in await router.verdict()]


async def test_another_routers_session_is_unknown_and_goes_on_undisturbed(tmp_path: Path, truth: list[int]) -> None:
    async with target_with_two_routers(tmp_path) as (_, owner, stranger):
        await owner.send(opening())
        told = [*await owner.verdict()]
        wrong = (truth[1] + 1) % 200
        for request in (decoding(5), proposing(told, [wrong]), proposing_early(told, wrong), decoding(0)):
            await stranger.send(request)
            assert await stranger.refusal() == "session 1 is not open on this stream"
        await stranger.send(closing())
        assert (await stranger.reply()).closed.session == 1  # nothing of its own is open under that id, now as before
        await owner.send(proposing(told, truth[1:4]))
        told += await owner.verdict()
        assert told == truth[:5]
        await owner.send(decoding(2))
        assert [*await owner.verdict(), *await owner.verdict()] == truth[5:7]


async def test_one_id_on_two_streams_is_two_sessions(tmp_path: Path, truth: list[int]) -> None:
    async with target_with_two_routers(tmp_path) as (_, first, second):
        await first.send(opening())
        assert await first.verdict() == (truth[0],)
        await second.send(opening(prompt=[*PROMPT, *truth[:3]]))
        assert await second.verdict() == (truth[3],)
        await second.send(closing())
        assert (await second.reply()).closed.session == 1
        await first.send(decoding(1))
        assert await first.verdict() == (truth[1],)


async def test_a_replayed_stream_is_a_session_of_whoever_replays_it(tmp_path: Path, truth: list[int]) -> None:
    async with target_with_two_routers(tmp_path) as (_, owner, stranger):
        await owner.send(opening())
        told = [*await owner.verdict()]
        await owner.send(proposing(told, truth[1:3]))
        told += await owner.verdict()
        await stranger.replay(owner.frames_sent[:1])
        heard = [*await stranger.verdict()]
        await stranger.replay(owner.frames_sent[1:])
        heard += await stranger.verdict()
        assert told == heard == truth[:4]
        await owner.send(decoding(1))
        assert await owner.verdict() == (truth[4],)


async def test_the_id_of_a_closed_session_names_nothing_until_it_is_opened_anew(
    tmp_path: Path, truth: list[int]
) -> None:
    async with target_with_two_routers(tmp_path) as (_, owner, _stranger):
        await owner.send(opening())
        told = await owner.verdict()
        await owner.send(closing())
        assert (await owner.reply()).closed.session == 1
        for request in (proposing(told, truth[1:2]), decoding(3)):
            await owner.send(request)
            assert await owner.refusal() == "session 1 is not open on this stream"
        await owner.send(opening(), proposing([told[0] + 1], truth[1:2]))  # of a past that this session does not have
        assert await owner.verdict() == (truth[0],)
        await owner.send(decoding(1))
        assert await owner.verdict() == (truth[1],)


async def test_repeated_and_stale_messages_yield_every_token_once(tmp_path: Path, truth: list[int]) -> None:
    async with target_with_two_routers(tmp_path) as (loop, owner, _stranger):
        await owner.send(opening())
        told = [*await owner.verdict()]
        first = proposing(told, truth[1:3])
        await owner.send(first, first)
        told += await owner.verdict()
        await owner.send(first, proposing(told, truth[4:6]), first)
        told += await owner.verdict()
        await owner.send(proposing([*told, 0], [1]), first, decoding(1))
        told += await owner.verdict()
        assert told == truth[:8]
        for _ in range(2):
            await owner.send(closing())
            assert (await owner.reply()).closed.session == 1
        assert await loop.call(lambda engine: engine.stale_proposals) >= 4


async def test_another_routers_draft_session_is_unknown_and_goes_on_undisturbed(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    loop = draft_loop(build_draft_engine(DraftSettings(settings), EMULATION.draft_device(settings)))

    def advancing(num_tokens: int) -> Drafting:
        base = codecs.encode_state(State.of(PROMPT))
        return Drafting(
            advance=drafting_pb2.Advance(session=1, base=base, tail=PROMPT[-1:], num_speculative_tokens=num_tokens)
        )

    frame = drafting_pb2.DraftRequests
    async with two_routers(loop, DraftingServicer(loop), drafting_pb2_grpc.DraftingStub, frame) as (owner, stranger):
        opened = drafting_pb2.OpenDraft(session=1, prompt_token_ids=PROMPT, sampling=SAMPLING)
        await owner.send(Drafting(open=opened), advancing(3))
        before = (await owner.reply()).proposal
        await stranger.send(advancing(5))
        assert await stranger.refusal() == "session 1 is not open on this stream"
        await stranger.send(Drafting(close=session_pb2.CloseSession(session=1)))
        assert (await stranger.reply()).closed.session == 1
        await owner.send(advancing(3))
        again = (await owner.reply()).proposal
        assert again.proposal.tokens == before.proposal.tokens
        assert len(again.proposal.tokens) == 3
