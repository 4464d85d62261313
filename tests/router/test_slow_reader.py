"""A caller that does not read loses its session in time, and is told; one that reads slowly does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from deployments.resuming import CallFailed
from engine.errors import SlowReader, Unavailable
from router.events import Delta, Event
from router.slow_reader import cut_off_slow_reader
from rpc.errors import ErrorInterceptor
from rpc.pb import generation_pb2 as pb
from rpc.pb import generation_pb2_grpc as pb_grpc
from tests.deployments.test_client import haproxy

LIMIT_S = 30.0


class Time:
    """A clock that jumps to where whoever sleeps wakes up, one sleeper at a time, when the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, woken))
        await woken

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for due, woken in list(self._sleepers):
            if due <= self.now and not woken.done():
                woken.set_result(None)
                self._sleepers.remove((due, woken))

    async def passes(self, seconds: float) -> None:
        await asyncio.sleep(0)  # whoever is about to sleep does
        self.advance(seconds)
        for _ in range(10):  # whoever was woken runs, and whatever that ends
            await asyncio.sleep(0)


class Source:
    """Numbered deltas without end. Its end takes a few turns of the loop, as closing a session does."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.made, self._fails_after = 0, fails_after
        self.ended_by: BaseException | None = None
        self.is_ending, self.ended = False, asyncio.Event()

    async def events(self, size: int = 1) -> AsyncGenerator[Event, None]:
        try:
            while self.made != self._fails_after:
                self.made += 1
                yield Delta("x" * size, (self.made,))
            raise Unavailable("gone")
        except BaseException as error:
            self.is_ending = True
            for _ in range(3):
                await asyncio.sleep(0)
            self.ended_by = error
            self.ended.set()
            raise


def cut(source: Source, time: Time) -> AsyncGenerator[Event, None]:
    return cut_off_slow_reader(source.events(), LIMIT_S, time.clock, time.sleep)


async def test_who_reads_within_the_limit_reads_on_for_ever() -> None:
    time, source = Time(), Source()
    async with aclosing(cut(source, time)) as events:
        for number in range(1, 20):
            assert (await anext(events)) == Delta("x", (number,))
            await time.passes(LIMIT_S - 1.0)
    assert isinstance(source.ended_by, GeneratorExit)


async def test_who_does_not_is_cut_off_on_time_and_told() -> None:
    time, source = Time(), Source()
    async with aclosing(cut(source, time)) as events:
        await anext(events)
        await time.passes(LIMIT_S / 2)
        await anext(events)
        await time.passes(LIMIT_S - 0.5)
        assert source.ended_by is None
        await time.passes(0.5)
        assert isinstance(source.ended_by, SlowReader), "the session has ended though nobody reads"
        with pytest.raises(SlowReader, match="read nothing for 30 s"):
            await anext(events)
    assert source.made == 2, "nothing is made in advance"


async def test_a_reader_that_comes_back_while_it_is_cut_off() -> None:
    time, source = Time(), Source()
    events = cut(source, time)
    await anext(events)
    await asyncio.sleep(0)
    time.advance(LIMIT_S)
    while not source.is_ending:
        await asyncio.sleep(0)
    assert source.ended_by is None
    with pytest.raises(SlowReader):
        await anext(events)
    assert isinstance(source.ended_by, SlowReader)


async def test_a_caller_that_goes_away_after_it_was_cut_off() -> None:
    time, source = Time(), Source()
    events = cut(source, time)
    await anext(events)
    await time.passes(LIMIT_S)
    await events.aclose()
    assert isinstance(source.ended_by, SlowReader)


async def test_time_in_which_nothing_is_there_to_read_does_not_count() -> None:
    time, going_on = Time(), asyncio.Event()

    async def slow() -> AsyncGenerator[Event, None]:
        yield Delta("a", (1,))
        await going_on.wait()
        yield Delta("b", (2,))

    async with aclosing(cut_off_slow_reader(slow(), LIMIT_S, time.clock, time.sleep)) as events:
        await anext(events)
        second = asyncio.ensure_future(anext(events))
        await time.passes(10 * LIMIT_S)
        going_on.set()
        assert await second == Delta("b", (2,))
        await time.passes(LIMIT_S - 1.0)
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_other_failures_pass_through() -> None:
    time, source = Time(), Source(fails_after=1)
    events = cut(source, time)
    await anext(events)
    with pytest.raises(Unavailable, match="gone"):
        await anext(events)


async def test_a_client_that_stops_reading_over_real_grpc() -> None:
    """The transport takes so much and no more; the session ends while the call is open; the client is told at last."""
    source = Source()

    class Servicer(pb_grpc.GenerationServicer):
        async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
            clock = asyncio.get_running_loop().time
            async with aclosing(cut_off_slow_reader(source.events(100_000), 0.2, clock)) as events:
                async for event in events:
                    assert isinstance(event, Delta)
                    yield pb.GenerateResponse(delta=pb.Delta(text=event.text))

    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    pb_grpc.add_GenerationServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = pb_grpc.GenerationStub(channel).Generate(pb.GenerateRequest())
            await call.read()
            await asyncio.wait_for(source.ended.wait(), 30.0)
            made, num_read = source.made, 1
            with suppress(grpc.aio.AioRpcError):  # or EOF, as the last message and the status come
                while await call.read() is not grpc.aio.EOF:
                    num_read += 1
            assert (await call.code(), num_read, source.made) == (grpc.StatusCode.RESOURCE_EXHAUSTED, made, made)
            assert "read nothing for 0.2 s" in await call.details()
    finally:
        await server.stop(None)


async def test_haproxy_ends_the_call_of_a_client_that_never_reads_on(tmp_path: Path) -> None:
    """And with it what the server keeps for the call; one that only has nothing to read outlasts the same timeout."""
    source, left = Source(), asyncio.Event()

    class Servicer(pb_grpc.GenerationServicer):
        async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
            yield pb.GenerateResponse()
            if request.prompt == "quiet":
                await left.wait()
                return
            context.add_done_callback(lambda _: left.set())
            clock = asyncio.get_running_loop().time
            async with aclosing(cut_off_slow_reader(source.events(100_000), 0.1, clock)) as events:
                async for event in events:
                    assert isinstance(event, Delta)
                    yield pb.GenerateResponse(delta=pb.Delta(text=event.text))

    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    pb_grpc.add_GenerationServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        proxy = stack.enter_context(haproxy(port, tmp_path, timeout_client="1s"))
        calls = []
        for prompt in ("quiet", "stuck"):
            options = [("grpc.use_local_subchannel_pool", 1)]  # each on a connection of its own, like two callers
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{proxy}", options))
            calls.append(pb_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(prompt=prompt)))
            await calls[-1].read()
        await asyncio.wait_for(left.wait(), 30.0)
        assert isinstance(source.ended_by, SlowReader), "the session had ended before"
        failure = CallFailed(await calls[1].details(), await calls[1].code())
        assert failure.server_is_gone, "so that our own client resumes"
        assert await calls[0].code() is grpc.StatusCode.OK
