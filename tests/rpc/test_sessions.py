"""Sessions over real sockets: interleaving, isolation, ends of every kind, limits."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest

from engine.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    OutriderError,
    Overloaded,
    Unavailable,
    UnknownSession,
)
from engine.proposal import Branch, EarlyProposals, Proposal, RunAhead, SparseProbs, State
from engine.sampling import SamplingParams, StopParams
from rpc import codecs
from rpc.clients import TargetClient
from rpc.pb import session_pb2, verification_pb2, verification_pb2_grpc
from rpc.servicers import _VerificationStream
from tests.rpc.fakes import BUG, CRASH, FAULT, OVERLOAD, next_token
from tests.rpc.serving import GREEDY, NOT_SERVING, SERVING, STOPS, Served, health_of, served_draft, served_target
from tests.waiting import until


async def rounds(served: Served, prompt_length: int, num_rounds: int) -> list[int]:
    """Generates with one right and one wrong draft token per round."""
    session = served.client.open([1] * prompt_length, [], GREEDY, STOPS)
    tokens = list((await session.verdict()).tokens)
    for _ in range(num_rounds):
        length = prompt_length + len(tokens)
        session.propose(Proposal.chain(State(length, 5), [next_token(length), 999]))
        verdict = await session.verdict()
        assert (verdict.base, verdict.num_proposed, verdict.num_accepted) == (State(length, 5), 2, 1)
        tokens += verdict.tokens
    await session.close()
    return tokens


async def test_interleaved_sessions_each_get_their_own_tokens() -> None:
    async with served_target() as served:
        lengths = range(1, 33)
        outputs = await asyncio.gather(*(rounds(served, length, 6) for length in lengths))
        for length, tokens in zip(lengths, outputs, strict=True):
            assert tokens == [next_token(length + i) for i in range(13)]
        assert served.engine.lengths == {}


async def test_first_verdict_tells_cached_tokens_and_later_ones_keep_it() -> None:
    async with served_target() as served:
        session = served.client.open([1] * 10, [], GREEDY, STOPS)
        await session.verdict()
        assert session.cached_tokens == 5
        session.decode(1)
        await session.verdict()
        assert session.cached_tokens == 5


async def test_decode_runs_on_by_itself_until_the_finish() -> None:
    async with served_target() as served:
        session = served.client.open([1, 2], [], GREEDY, StopParams(max_tokens=4))
        session.decode(3)
        verdicts = [await session.verdict() for _ in range(4)]
        assert [v.finish_reason for v in verdicts] == [None, None, None, "length"]


async def test_draft_proposes_from_the_state_it_was_told() -> None:
    async with served_draft() as (engine, _, client):
        early: list[EarlyProposals] = []
        session = client.open([1, 2, 3], GREEDY, on_early=early.append)
        session.advance(State(5, 77), [8, 9], 3)
        proposal = await session.proposal()
        assert proposal.base == State(5, 77)
        assert proposal.tokens == (next_token(5), next_token(6), next_token(7))
        assert proposal.draft_probs is None
        assert (engine.run_ahead, early) == ({1: None}, [])
        await session.close()
        assert engine.lengths == {}


AHEAD = RunAhead(num_speculative_tokens=2, budget_s=60.0, acceptance=0.75)


async def test_a_draft_is_told_to_run_ahead_and_what_it_makes_ahead_arrives() -> None:
    async with served_draft() as (engine, _, client):
        arrived: asyncio.Queue[EarlyProposals] = asyncio.Queue()
        session = client.open([1, 2, 3], GREEDY, on_early=arrived.put_nowait)
        session.advance(State(3, 77), [3], 2, run_ahead=AHEAD)
        proposal, early = await session.proposal(), await arrived.get()
        told = engine.run_ahead[1]
        assert told is not None
        assert told == AHEAD.later(AHEAD.budget_s - told.budget_s)
        assert 0.0 < told.budget_s <= AHEAD.budget_s  # less the time it has waited for the engine
        assert (early.after, early.trunk) == (State(3, 77), State(3, 77).extend(proposal.tokens))
        assert early.branches == (Branch(2, next_token(5), (next_token(6), next_token(7))),)
        session.advance(early.trunk, proposal.tokens, 0, run_ahead=AHEAD)  # no proposal is owed
        assert (await arrived.get()).after == early.trunk
        session.advance(State(9, 1), [3], 1)
        assert (await session.proposal()).base == State(9, 1)
        await session.close()


async def test_early_proposals_are_each_told_to_their_own_session() -> None:
    async with served_draft() as (_, _, client):
        arrived: list[asyncio.Queue[EarlyProposals]] = [asyncio.Queue() for _ in range(8)]
        for length, queue in enumerate(arrived, start=1):
            session = client.open([1] * length, GREEDY, on_early=queue.put_nowait)
            session.advance(State(length, length), [1], 1, run_ahead=AHEAD)
        assert [(await queue.get()).after for queue in arrived] == [State(n, n) for n in range(1, 9)]
        assert all(queue.empty() for queue in arrived)


def early_proposals(base: State) -> EarlyProposals:
    half = SparseProbs((4, 5), (0.5, 0.5))
    branches = (Branch(0, 3, (4, 5), (half, half)), Branch(1, 6, (7,)))
    return EarlyProposals(base, base.extend([8]), branches, "fake", 0.125)


async def test_early_proposals_reach_the_target_in_the_order_they_were_sent() -> None:
    async with served_target() as served:
        first, second = (served.client.open([1] * n, [], GREEDY, STOPS) for n in (2, 3))
        first.propose_early(early_proposals(State(9, 9)))
        first.propose_early(early_proposals(State(2, 5)))
        second.propose_early(early_proposals(State(3, 5)))
        second.propose(Proposal.chain(State(4, 5), []))
        await asyncio.gather(first.verdict(), second.verdict())
        assert (await second.verdict()).base == State(4, 5)
        assert served.engine.early == {1: early_proposals(State(2, 5)), 2: early_proposals(State(3, 5))}


async def test_early_proposals_that_cannot_be_read_fail_their_session_alone() -> None:
    unreadable = session_pb2.EarlyProposals(session=1, after=session_pb2.CommittedState(length=2))
    async with served_target() as served:
        failing = served.client.open([1, 2], [], GREEDY, STOPS)
        neighbour = served.client.open([1] * 4, [], GREEDY, STOPS)
        await asyncio.gather(failing.verdict(), neighbour.verdict())
        served.client._peer.connection().send(verification_pb2.VerificationRequest(early=unreadable))
        with pytest.raises(InvalidArgument, match=r"early\.trunk: found 'nothing'"):
            await failing.verdict()
        neighbour.decode(1)
        assert (await neighbour.verdict()).tokens == (next_token(5),)
        assert list(served.engine.lengths) == [2]


async def test_a_draft_whose_early_proposals_cannot_be_read_is_lost_to_that_session_alone(monkeypatch) -> None:
    encode = codecs.encode_early

    def without_trunk(session: int, early: EarlyProposals) -> session_pb2.EarlyProposals:
        message = encode(session, early)
        if session == 1:
            message.ClearField("trunk")
        return message

    monkeypatch.setattr(codecs, "encode_early", without_trunk)
    async with served_draft() as (_, _, client):
        arrived: list[EarlyProposals] = []
        failing, neighbour = (client.open([1] * n, GREEDY, on_early=arrived.append) for n in (2, 3))
        failing.advance(State(2, 5), [1], 0, run_ahead=AHEAD)
        with pytest.raises(Unavailable, match=r"cannot be read: early\.trunk"):
            await failing.proposal()
        for base, run_ahead in ((State(3, 5), AHEAD), (State(4, 5), None)):
            neighbour.advance(base, [1], 1, run_ahead=run_ahead)
            assert (await neighbour.proposal()).base == base
        assert [early.after for early in arrived] == [State(3, 5)]


async def test_running_ahead_by_numbers_that_are_none_fails_the_session_alone() -> None:
    async with served_draft() as (_, _, client):
        failing, neighbour = (client.open([1] * n, GREEDY, on_early=lambda _: None) for n in (2, 3))
        failing.advance(State(2, 5), [1], 1, run_ahead=RunAhead(2, 0.5, float("nan")))
        with pytest.raises(InvalidArgument, match=r"run_ahead\.budget_s"):
            await failing.proposal()
        neighbour.advance(State(3, 5), [1], 1)
        assert (await neighbour.proposal()).base == State(3, 5)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "text"),
    [
        ([], GREEDY, InvalidArgument, "prompt_token_ids: found 'nothing', allowed is at least one token"),
        ([1], SamplingParams(top_p=2.0), InvalidArgument, "sampling_params.top_p: found 2.0, allowed is above 0"),
        ([OVERLOAD], GREEDY, Overloaded, "all 3 sessions of this target are in use; retry in 1.5 s"),
        ([BUG], GREEDY, InternalError, "internal error, see the server log under id"),
        ([FAULT], GREEDY, OutriderError, "this one only"),
    ],
)
async def test_a_session_fails_alone(prompt, sampling, error, text) -> None:
    async with served_target() as served:
        neighbour = served.client.open([1] * 4, [], GREEDY, STOPS)
        failing = served.client.open(prompt, [], sampling, STOPS)
        with pytest.raises(error) as raised:
            await failing.verdict()
        assert str(raised.value).startswith(text)
        assert "secret" not in str(raised.value)
        assert (await neighbour.verdict()).tokens == (next_token(4),)
        neighbour.decode(1)
        assert (await neighbour.verdict()).tokens == (next_token(5),)
        await failing.close()  # returns although the session is long gone
        assert list(served.engine.lengths) == [1]
        assert await health_of(served.server.address) == SERVING


async def test_errors_keep_their_parts_across_the_wire() -> None:
    async with served_target() as served:
        invalid = served.client.open([], [], GREEDY, STOPS)
        with pytest.raises(InvalidArgument) as raised:
            await invalid.verdict()
        assert (raised.value.field, raised.value.allowed) == ("prompt_token_ids", "at least one token")
        overloaded = served.client.open([OVERLOAD], [], GREEDY, STOPS)
        with pytest.raises(Overloaded) as refused:
            await overloaded.verdict()
        assert refused.value.retry_after_s == 1.5
        with pytest.raises(Overloaded):
            await overloaded.verdict()


async def test_requests_on_a_session_that_is_not_open_fail_as_unknown() -> None:
    async with served_target() as served, grpc.aio.insecure_channel(served.server.address) as channel:
        call = verification_pb2_grpc.VerificationStub(channel).Stream()
        decode = verification_pb2.VerificationRequest(decode=verification_pb2.Decode(session=4, max_tokens=1))
        close = verification_pb2.VerificationRequest(close=session_pb2.CloseSession(session=5))
        await call.write(verification_pb2.VerificationRequests(requests=[decode, close]))
        frame = await call.read()
        assert [reply.WhichOneof("reply") for reply in frame.replies] == ["failed", "closed"]
        assert frame.replies[0].failed.code == grpc.StatusCode.NOT_FOUND.value[0]
        call.cancel()


@pytest.mark.parametrize("twice", [False, True], ids=["an empty request", "one id opened twice"])
async def test_a_router_that_breaks_the_protocol_loses_its_stream(twice: bool) -> None:
    opening = verification_pb2.OpenTarget(
        session=1,
        prompt_token_ids=[1],
        sampling=session_pb2.EngineSampling(top_p=1.0),
        stops=session_pb2.EngineStops(max_tokens=4),
    )
    request = verification_pb2.VerificationRequest(open=opening)
    last = request if twice else verification_pb2.VerificationRequest()
    async with served_target() as served, grpc.aio.insecure_channel(served.server.address) as channel:
        call = verification_pb2_grpc.VerificationStub(channel).Stream()
        await call.write(verification_pb2.VerificationRequests(requests=[request, last]))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_all(call)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await served.settle()
        assert served.engine.lengths == {}


async def test_a_request_without_its_parts_fails_its_session_alone() -> None:
    opening = verification_pb2.OpenTarget(session=1, prompt_token_ids=[1])
    request = verification_pb2.VerificationRequest(open=opening)
    async with served_target() as served, grpc.aio.insecure_channel(served.server.address) as channel:
        call = verification_pb2_grpc.VerificationStub(channel).Stream()
        await call.write(verification_pb2.VerificationRequests(requests=[request]))
        failed = (await call.read()).replies[0].failed
        assert (failed.session, failed.field) == (1, "sampling")
        call.cancel()


async def test_close_returns_once_the_engine_has_let_go() -> None:
    async with served_target() as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS)
        await session.verdict()
        served.engine.gate.clear()
        served.engine.in_step.clear()
        session.decode(1)
        assert await asyncio.to_thread(served.engine.in_step.wait, 10)
        closing = asyncio.create_task(session.close())
        again = asyncio.create_task(session.close())
        await served.client.refresh()  # a full round trip: the request to close has been sent by now
        assert not closing.done()
        assert served.engine.closed == []
        served.engine.gate.set()
        await asyncio.gather(closing, again)
        assert served.engine.closed == [1]
        assert (await served.client.refresh()).free_blocks == 64
        await session.verdict()  # the one that was under way
        with pytest.raises(UnknownSession):
            await session.verdict()


async def test_the_end_of_a_stream_closes_its_sessions_and_no_others() -> None:
    async with served_target() as served:
        other = await TargetClient.connect(served.server.address)
        leaving = [other.open([1] * n, [], GREEDY, STOPS) for n in (1, 2, 3)]
        staying = served.client.open([1] * 9, [], GREEDY, STOPS)
        await asyncio.gather(staying.verdict(), *(session.verdict() for session in leaving))
        await other.close()
        await other.close()
        with pytest.raises(Unavailable, match="was closed"):
            await leaving[0].verdict()
        while len(served.engine.closed) < 3:  # the server hears of a cancel in its own time
            await served.settle()
        assert sorted(served.engine.lengths.values()) == [10]
        staying.decode(1)
        assert (await staying.verdict()).tokens == (next_token(10),)


async def test_a_broken_stream_fails_its_sessions_and_the_next_open_makes_a_new_one() -> None:
    async with served_target() as served:
        first = served.client.open([1, 2], [], GREEDY, STOPS)
        await first.verdict()
        waiting = asyncio.create_task(first.verdict())
        served.client._peer.connection()._call.cancel()
        with pytest.raises(Unavailable):
            await waiting
        await first.close()
        second = served.client.open([1, 2, 3], [], GREEDY, STOPS)
        assert (await second.verdict()).tokens == (next_token(3),)


async def test_a_stopped_server_makes_its_sessions_unavailable() -> None:
    async with served_target() as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS)
        await session.verdict()
        await served.server.stop()
        with pytest.raises(Unavailable, match=served.server.address):
            await session.verdict()
        late = served.client.open([1, 2], [], GREEDY, STOPS)
        with pytest.raises(Unavailable):
            await late.verdict()


async def test_nobody_there() -> None:
    with pytest.raises(Unavailable):
        await TargetClient.connect("127.0.0.1:1", timeout_s=10.0)


async def test_deadline_closes_the_session_and_says_so() -> None:
    async with served_target() as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS, deadline_s=0.05)
        with contextlib.suppress(DeadlineExceeded):  # on a busy machine the first verdict comes too late already
            await session.verdict()
        with pytest.raises(DeadlineExceeded, match=r"within its 0\.05 s"):
            await session.verdict()
        assert served.engine.closed == [1]


@pytest.mark.parametrize("deadline_s", [-1.0, float("inf"), float("nan")])
async def test_a_deadline_that_is_none_is_refused(deadline_s: float) -> None:
    async with served_target() as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS, deadline_s=deadline_s)
        with pytest.raises(InvalidArgument, match="deadline_s"):
            await session.verdict()


async def test_a_crash_of_the_step_fails_every_session_and_health(caplog) -> None:
    async with served_target() as served:
        bystander = served.client.open([1, 2], [], GREEDY, STOPS)
        await bystander.verdict()
        crashing = served.client.open([CRASH], [], GREEDY, STOPS)
        for session in (bystander, crashing):
            with pytest.raises(Unavailable) as raised:  # others of its kind can go on with what it had
                await session.verdict()
            assert "secret" not in str(raised.value)
        assert str(raised.value).rpartition(" ")[2] in caplog.text  # the incident's id
        assert "secret detail of a crash" in caplog.text
        assert await served.loop.failure() is not None
        assert await health_of(served.server.address) == NOT_SERVING
        assert await health_of(served.server.address, "outrider.v1.Verification") == NOT_SERVING
        late = served.client.open([1, 2], [], GREEDY, STOPS)
        with pytest.raises(Unavailable):
            await late.verdict()
        await bystander.close()


async def test_a_stuck_step_is_unhealthy_and_idleness_is_not() -> None:
    now = [100.0]
    async with served_target(clock=lambda: now[0], stall_limit_s=30.0) as served:
        await served.settle()
        now[0] += 1000.0
        # The thread says that it idles a moment after it has answered.
        assert await asyncio.to_thread(until, lambda: served.loop.unhealthy() is None, 10.0)
        assert await health_of(served.server.address) == SERVING
        served.engine.gate.clear()
        session = served.client.open([1, 2], [], GREEDY, STOPS)
        assert await asyncio.to_thread(served.engine.in_step.wait, 10)
        now[0] += 29.0
        assert await health_of(served.server.address) == SERVING
        now[0] += 2.0
        assert await health_of(served.server.address) == NOT_SERVING
        assert "31 s" in (served.loop.unhealthy() or "")
        served.engine.gate.set()
        await session.verdict()
        assert await health_of(served.server.address) == SERVING


async def test_a_prompt_of_10_mb_passes() -> None:
    async with served_target() as served:
        length = 5_500_000
        session = served.client.open([200] * length, [], GREEDY, STOPS)
        assert (await session.verdict()).tokens == (next_token(length),)


async def test_a_prompt_no_frame_can_carry_fails_alone(monkeypatch) -> None:
    monkeypatch.setattr("rpc.connections.MAX_MESSAGE_BYTES", 4096)
    async with served_target() as served:
        neighbour = served.client.open([1, 2], [], GREEDY, STOPS)
        session = served.client.open([200] * 4000, [], GREEDY, STOPS)
        with pytest.raises(InvalidArgument, match="prompt_token_ids"):
            await session.verdict()
        await neighbour.verdict()


async def test_a_router_that_does_not_read_loses_its_stream() -> None:
    async with (
        served_target(max_waiting_bytes=50_000) as served,
        grpc.aio.insecure_channel(
            served.server.address, (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        ) as channel,
    ):
        call = verification_pb2_grpc.VerificationStub(channel).Stream()
        opening = verification_pb2.OpenTarget(
            session=1,
            prompt_token_ids=[1],
            sampling=session_pb2.EngineSampling(top_p=1.0),
            stops=session_pb2.EngineStops(max_tokens=2**31),
        )
        endless = verification_pb2.Decode(session=1, max_tokens=2**31)
        requests = [
            verification_pb2.VerificationRequest(open=opening),
            verification_pb2.VerificationRequest(decode=endless),
        ]
        await call.write(verification_pb2.VerificationRequests(requests=requests))
        while not served.engine.closed:
            await served.settle()
        with pytest.raises(grpc.aio.AioRpcError, match="the peer does not read"):
            await read_all(call)


async def read_all(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_router_that_floods_the_engine_loses_its_stream(monkeypatch) -> None:
    monkeypatch.setattr("rpc.streams.MAX_BACKLOG", 20)
    async with served_target() as served:
        session = served.client.open([1, 2], [], GREEDY, STOPS)
        await session.verdict()
        served.engine.gate.clear()
        served.engine.in_step.clear()
        session.decode(1)
        assert await asyncio.to_thread(served.engine.in_step.wait, 10)
        for _ in range(21):
            session.decode(1)
        with pytest.raises(Unavailable, match="21 commands wait for the engine"):
            await session.verdict()
        served.engine.gate.set()
        while not served.engine.closed:
            await served.settle()


async def test_what_is_asked_in_one_tick_leaves_in_one_frame_and_returns_in_one(monkeypatch) -> None:
    requests: list[int] = []
    replies: list[int] = []

    def recording(frame_of, sizes):
        def record(*args):
            sizes.append(len(args[-1]))
            return frame_of(*args)

        return record

    monkeypatch.setattr(_VerificationStream, "frame", recording(_VerificationStream.frame, replies))
    async with served_target() as served:
        warm = served.client.open([1], [], GREEDY, STOPS)
        await warm.verdict()
        connection = served.client._peer.connection()
        monkeypatch.setattr(connection, "_frame_of", recording(connection._frame_of, requests))
        served.engine.gate.clear()
        served.engine.in_step.clear()
        warm.decode(1)
        assert await asyncio.to_thread(served.engine.in_step.wait, 10)
        sessions = [served.client.open([1] * n, [], GREEDY, STOPS) for n in range(2, 12)]
        while served.loop.backlog < len(sessions):
            await served.client.refresh()
        served.engine.gate.set()
        await asyncio.gather(warm.verdict(), *(session.verdict() for session in sessions))
        assert requests == [1, 10]
        assert replies in ([1, 1, 10], [1, 11])  # the step before may still be waiting to leave
