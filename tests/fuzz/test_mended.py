"""What fuzzing and the reading for it have found, one test for each fault that was mended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.emulated_model import make_folder
from engine.drafting import DraftEngine, build_draft_engine
from engine.errors import InvalidArgument
from engine.loop import TargetLoop
from engine.proposal import Proposal, RunAhead, State
from engine.sampling import SamplingParams, StopParams
from engine.settings import DraftSettings, EngineSettings
from engine.target import TargetEngine, build_target_engine
from router.wire import find_bad_text
from rpc import codecs, streams
from rpc.clients import TargetClient
from rpc.errors import error_of, status_of
from rpc.pb import generation_pb2, session_pb2, verification_pb2
from rpc.servicers import _VerificationStream
from tests.fuzz.oracle import TARGET, continuation
from tests.fuzz.stage import EMULATION
from tests.rpc.serving import GREEDY, STOPS, served_target

FEW_BLOCKS, BLOCK_SIZE = 17, 8  # 128 tokens


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    folder = make_folder(tmp_path / "model")
    return EngineSettings(folder, num_blocks=FEW_BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=128)


@pytest.fixture
def target(settings: EngineSettings) -> TargetEngine:
    return build_target_engine(settings, device=EMULATION.target_device(settings))


@pytest.fixture
def draft(settings: EngineSettings) -> DraftEngine:
    return build_draft_engine(DraftSettings(settings), EMULATION.draft_device(settings))


class Unread(Sequence[int]):
    """Tokens that nobody looks at before he knows how many they are."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("read")


def test_a_tree_wider_than_all_blocks_is_judged_as_far_as_it_fits(target: TargetEngine) -> None:
    """It waited for ever for blocks that do not exist, and took those of all sessions behind it in every step."""
    prompt = list(range(100))
    target.open(1, prompt, [], SamplingParams(), StopParams(20))
    ((_, first),) = target.step()
    tokens = [*prompt, *first.tokens]
    target.propose(1, Proposal(State.of(tokens), tuple(range(60)), (-1,) * 60))
    ((_, verdict),) = target.step()
    assert verdict.num_proposed == (FEW_BLOCKS - 1) * BLOCK_SIZE - len(tokens)
    assert list(verdict.tokens) == continuation(TARGET, 512, tokens, len(verdict.tokens), SamplingParams())
    target.check_integrity()


def test_what_is_too_long_is_refused_before_anybody_reads_it(target: TargetEngine, draft: DraftEngine) -> None:
    """A message may hold millions of tokens, and all sessions wait while an engine looks at them."""
    with pytest.raises(InvalidArgument, match="at most 128 tokens together"):
        target.open(1, Unread(1 << 24), [], SamplingParams(), StopParams(20))
    with pytest.raises(InvalidArgument, match="fewer than max_tokens"):
        target.open(1, [1], Unread(1 << 24), SamplingParams(), StopParams(20))
    with pytest.raises(InvalidArgument, match="1 to 128 tokens"):
        draft.open(1, Unread(1 << 24), SamplingParams())
    draft.open(1, [1, 2, 3], SamplingParams())
    with pytest.raises(InvalidArgument, match="one that continues this session"):
        draft.advance(1, State(5, 0), Unread(1 << 24), 3)


def test_of_a_malformed_proposal_nothing_is_kept_but_what_is_wrong_with_it(target: TargetEngine) -> None:
    """Its tokens, however many, were hashed once more when its round was over."""
    target.open(1, [1, 2, 3], [], SamplingParams(), StopParams(20))
    ((_, first),) = target.step()
    target.propose(1, Proposal.chain(State.of([1, 2, 3, *first.tokens]), range(200)))
    held = target._sessions[1].held
    assert held is not None
    assert held.proposal.tokens == ()
    ((_, verdict),) = target.step()
    assert (verdict.num_proposed, verdict.dropped) == (0, "200 tokens, allowed are 127")


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=math.nan),
        SamplingParams(temperature=-1.0),
        SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1.0, min_p=2.0),
    ],
)
def test_a_draft_refuses_sampling_that_would_end_its_engine(draft: DraftEngine, sampling: SamplingParams) -> None:
    """With a NaN there is nothing to draw from: the step raised, and with it went every session of the draft."""
    with pytest.raises(InvalidArgument, match="sampling_params"):
        draft.open(1, [1, 2, 3], sampling)
    assert draft.info().running_sessions == 0


def test_a_draft_that_may_run_ahead_without_end_ends(draft: DraftEngine) -> None:
    """It counted to four thousand million to find out how many branches to draft."""
    draft.open(1, [1, 2, 3], SamplingParams())
    endless = RunAhead(2**32 - 1, acceptance=1.0, budget_s=1e300, round_s=1e300)
    draft.advance(1, State.of([1, 2, 3]), [3], 2, run_ahead=endless)
    outputs: list[Any] = []
    while draft.has_work():
        outputs += [output for _, output in draft.step()]
    proposal, early = outputs
    assert len(proposal.tokens) == 2
    assert early.after == proposal.base
    assert 0 < max(len(branch.tokens) for branch in early.branches) <= (FEW_BLOCKS - 1) * BLOCK_SIZE // 2
    draft.check_integrity()


class _DeafLoop:
    """A loop to which nothing is ever posted."""

    num_posted = backlog = 0


async def test_a_long_frame_leaves_other_streams_their_turn() -> None:
    """A frame of one megabyte held up the server, its health service too, for seconds."""
    loop: Any = _DeafLoop()
    stream = _VerificationStream(loop)
    close = verification_pb2.VerificationRequest(close=session_pb2.CloseSession(session=1))
    num_requests = 4 * streams._REQUESTS_PER_TURN
    sent: list[object] = []
    stream.send = sent.append  # type: ignore[method-assign]

    async def frames() -> AsyncIterator[verification_pb2.VerificationRequests]:
        yield verification_pb2.VerificationRequests(requests=[close] * num_requests)

    reading = asyncio.create_task(stream._read(frames()))
    await asyncio.sleep(0)
    assert len(sent) == streams._REQUESTS_PER_TURN
    await reading
    assert len(sent) == num_requests


async def test_a_flood_costs_only_the_stream_that_it_came_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sent the next frame, on whichever stream, lost all of its sessions."""
    monkeypatch.setattr("rpc.streams.MAX_BACKLOG", 20)
    async with served_target() as served:
        other = await TargetClient.connect(served.server.address)
        try:
            flooding = served.client.open([1, 2], [], GREEDY, STOPS)
            neighbour = other.open([1, 2, 3], [], GREEDY, STOPS)
            await flooding.verdict()
            await neighbour.verdict()
            await _hold_up(served.engine, flooding)
            for _ in range(20):
                flooding.decode(1)
            await _until_backlog(served.loop, 20)
            neighbour.decode(1)
            await _until_backlog(served.loop, 21)
            served.engine.gate.set()
            assert len((await neighbour.verdict()).tokens) == 1
            await neighbour.close()
        finally:
            await other.close()


async def _hold_up(engine: Any, session: Any) -> None:
    """Keeps the engine in a step."""
    engine.gate.clear()
    engine.in_step.clear()
    session.decode(1)
    assert await asyncio.to_thread(engine.in_step.wait, 10)


async def _until_backlog(loop: TargetLoop, number: int) -> None:
    async with asyncio.timeout(10):
        while loop.backlog < number:
            await asyncio.sleep(0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    """One NaN, and every mean that a router's policy keeps of drafts or targets was NaN from then on."""
    state = session_pb2.CommittedState(length=1, hash=2)
    with pytest.raises(InvalidArgument, match="draft_time_s"):
        codecs.decode_proposal(session_pb2.ProposalTree(base=state, draft_time_s=seconds))
    early = session_pb2.EarlyProposals(after=state, trunk=state, branches=[session_pb2.Branch()], draft_time_s=seconds)
    with pytest.raises(InvalidArgument, match="draft_time_s"):
        codecs.decode_early(early)
    for name in ("forward_time_s", "queue_time_s"):
        verdict = verification_pb2.SessionVerdict(base=state, tokens=[1], **{name: seconds})
        with pytest.raises(InvalidArgument, match=name):
            codecs.decode_verdict(verdict)


def test_a_long_value_leaves_its_message_short_and_whole() -> None:
    """2000 characters of four bytes each are 24 kB in a header: callers saw RESOURCE_EXHAUSTED from their own gRPC."""
    error = InvalidArgument("speculation.drafter", "𝔘" * 3000, "auto, draft_model, ngram")
    status = status_of(error)
    assert len(status.message.encode()) * 3 < 8 << 10  # as gRPC writes what is no ASCII
    assert status.message.endswith("(3002 characters), allowed is auto, draft_model, ngram")
    assert str(error_of(status)) == str(error)


def test_a_search_for_bad_text_ends_soon_in_a_message_of_many_fields() -> None:
    """A public request of some megabytes, all of tiny fields, held up its router for seconds."""
    bad_prompt = b"\x12\x01\xff"
    assert find_bad_text(b"\x40\x01" * 100 + bad_prompt, generation_pb2.GenerateRequest) == "prompt"
    assert find_bad_text(b"\x40\x01" * 100_000 + bad_prompt, generation_pb2.GenerateRequest) is None
