"""An emulated network over real sockets: later, in order, many frames under way at once, and ends come through."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from engine.loop import target_loop
from rpc.clients import TargetClient
from rpc.delay import DelayInterceptor, DelayLine, Line
from rpc.pb import verification_pb2, verification_pb2_grpc
from rpc.servers import serve_engine
from rpc.servicers import VerificationServicer
from tests.rpc.fakes import FakeTarget, next_token
from tests.rpc.serving import GREEDY, STOPS


class HeldLine:
    """Keeps what is under way until the test lets it pass."""

    def __init__(self) -> None:
        self._under_way: deque[Callable[[], None]] = deque()
        self._more = asyncio.Event()

    def call_later(self, deliver: Callable[[], None]) -> None:
        self._under_way.append(deliver)
        self._more.set()

    async def holds(self, count: int) -> None:
        """Returns when `count` are under way."""
        async with asyncio.timeout(10):
            while len(self._under_way) < count:
                self._more.clear()
                await self._more.wait()

    def let_pass(self, count: int = 1) -> None:
        for _ in range(count):
            self._under_way.popleft()()

    async def let_all_pass(self) -> None:
        """From now on."""
        while True:
            await self.holds(1)
            self.let_pass()


class ShortLine:
    """Passes everything with the next turn of the event loop."""

    def call_later(self, deliver: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(deliver)


@asynccontextmanager
async def served_over(line: Line) -> AsyncIterator[tuple[FakeTarget, TargetClient]]:
    engine = FakeTarget()
    loop = target_loop(engine)
    loop.start()
    server = await serve_engine(VerificationServicer(loop), interceptors=[DelayInterceptor(line)])
    client = await TargetClient.connect(server.address)
    try:
        yield engine, client
    finally:
        await client.close()
        await server.stop()
        await loop.close()


async def test_a_frame_and_its_answer_each_wait_their_time() -> None:
    line = HeldLine()
    async with served_over(line) as (engine, client):
        session = client.open([1, 1], [], GREEDY, STOPS)
        await line.holds(1)
        assert engine.lengths == {}
        line.let_pass()
        verdict = asyncio.ensure_future(session.verdict())
        await line.holds(1)
        assert not verdict.done()
        line.let_pass()
        assert (await verdict).tokens == (next_token(2),)


async def test_many_frames_are_under_way_at_once_and_keep_their_order() -> None:
    line = HeldLine()
    async with served_over(line) as (engine, client):
        session = client.open([1, 1], [], GREEDY, STOPS)
        await line.holds(1)
        for count in (2, 3):
            session.decode(count)
            await line.holds(count)
        assert engine.lengths == {}
        passing = asyncio.ensure_future(line.let_all_pass())
        tokens: list[int] = []
        while len(tokens) < 4:  # the first round, and at least what the last request allows
            tokens += (await session.verdict()).tokens
        assert tokens == [next_token(length) for length in range(2, 6)]
        passing.cancel()


async def test_generation_is_the_same_over_the_line() -> None:
    async with served_over(ShortLine()) as (engine, client):
        session = client.open([1] * 5, [], GREEDY, STOPS)
        tokens = list((await session.verdict()).tokens)
        session.decode(20)
        while len(tokens) < 21:
            tokens += (await session.verdict()).tokens
        await session.close()
        assert tokens == [next_token(length) for length in range(5, 26)]
        assert engine.lengths == {}


async def test_what_the_router_did_wrong_comes_back_over_the_line() -> None:
    async with served_over(ShortLine()) as (_, client), grpc.aio.insecure_channel(client.address) as channel:
        call = verification_pb2_grpc.VerificationStub(channel).Stream()
        await call.write(verification_pb2.VerificationRequests(requests=[verification_pb2.VerificationRequest()]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_line_passes_nothing_early_and_everything_in_order() -> None:
    line = DelayLine(0.002, asyncio.get_running_loop())
    asked: list[float] = []
    passed: list[tuple[int, float]] = []
    done = asyncio.Event()
    for number in range(20):
        asked.append(time.perf_counter())
        line.call_later(lambda number=number: passed.append((number, time.perf_counter())))
    line.call_later(done.set)
    await done.wait()
    line.close()
    assert [number for number, _ in passed] == list(range(20))
    assert all(when - asked[number] >= 0.002 for number, when in passed)
