"""The engine thread: order, batching, failures, what it measures. No sockets."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.errors import InternalError, OutriderError, Unavailable
from engine.loop import target_loop
from engine.ports import TargetOutput
from engine.sampling import SamplingParams, StopParams
from tests.rpc.fakes import FakeTarget


class Recorder:
    """A subscriber that keeps what it is told, in order, and the event-loop turn in which it was told."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[object] = asyncio.Queue()

    def on_output(self, output: TargetOutput) -> None:
        self.events.put_nowait(output)

    def on_failed(self, error: OutriderError) -> None:
        self.events.put_nowait(error)

    def on_closed(self) -> None:
        self.events.put_nowait("closed")


def opening(length: int, max_tokens: int = 64):
    def command(engine: FakeTarget, session: int) -> None:
        engine.open(session, [1] * length, [], SamplingParams(), StopParams(max_tokens=max_tokens))

    return command


async def test_bubble_counts_idleness_of_decoding_sessions_and_nothing_else() -> None:
    now = [0.0]

    class TimedTarget(FakeTarget):
        def step(self):
            outcomes = super().step()
            now[0] += 2.0
            self.forward_s += 1.5
            return outcomes

    engine = TimedTarget()
    loop = target_loop(engine, clock=lambda: now[0])
    loop.start()
    recorder = Recorder()
    now[0] += 100.0  # nobody is here
    session = loop.open(opening(2, max_tokens=3), recorder)
    await recorder.events.get()  # the prompt's forward: not decoding yet
    assert loop.info.bubble_s == 0.0
    now[0] += 10.0  # the router makes its target wait
    loop.post(session, lambda engine, number: engine.decode(number, 2))
    await recorder.events.get()
    last = await recorder.events.get()
    assert isinstance(last, TargetOutput)
    assert last.verdict.finish_reason == "length"
    assert loop.info.bubble_s == 10.0 + 2 * 0.5
    assert loop.info.forward_s == 3 * 1.5
    now[0] += 50.0  # finished, not yet closed
    loop.close_session(session)
    assert await recorder.events.get() == "closed"
    assert loop.info.bubble_s == 11.0
    await loop.close()


async def test_commands_apply_in_order_between_steps() -> None:
    engine = FakeTarget()
    loop = target_loop(engine)
    loop.start()
    engine.gate.clear()
    first, second = Recorder(), Recorder()
    loop.open(opening(1), first)
    assert await asyncio.to_thread(engine.in_step.wait, 10)
    session = loop.open(opening(2), second)
    loop.post(session, lambda engine, number: engine.decode(number, 5))
    loop.post(session, lambda engine, number: engine.decode(number, 0))
    loop.close_session(session)
    assert loop.backlog == 4
    assert engine.lengths == {1: 1}
    engine.gate.set()
    assert await second.events.get() == "closed"
    assert second.events.empty()
    assert await loop.call(lambda engine: sorted(engine.lengths)) == [1]
    await loop.close()


async def test_outputs_of_one_step_arrive_in_one_callback(monkeypatch) -> None:
    engine = FakeTarget()
    loop = target_loop(engine)
    batches: list[int] = []
    deliver = loop._deliver
    monkeypatch.setattr(loop, "_deliver", lambda events: (batches.append(len(events)), deliver(events)))
    loop.start()
    engine.gate.clear()
    recorders = [Recorder() for _ in range(9)]
    loop.open(opening(1), recorders[0])
    assert await asyncio.to_thread(engine.in_step.wait, 10)
    for recorder in recorders[1:]:
        loop.open(opening(1), recorder)
    engine.gate.set()
    await asyncio.gather(*(recorder.events.get() for recorder in recorders))
    assert batches == [1, 8]
    await loop.close()


async def test_a_subscriber_that_raises_costs_only_its_session(caplog) -> None:
    class Broken(Recorder):
        def on_output(self, output: TargetOutput) -> None:
            raise ValueError("cannot encode")

    engine = FakeTarget()
    loop = target_loop(engine)
    loop.start()
    broken, sound = Broken(), Recorder()
    loop.open(opening(1), broken)
    loop.open(opening(2), sound)
    assert isinstance(await sound.events.get(), TargetOutput)
    assert isinstance(await broken.events.get(), InternalError)
    assert "cannot encode" in caplog.text
    assert loop.unhealthy() is None
    await loop.close()


async def test_call_returns_and_raises_what_the_function_does() -> None:
    loop = target_loop(FakeTarget())
    loop.start()
    assert await loop.call(lambda engine: threading.current_thread().name) == "engine"
    with pytest.raises(ZeroDivisionError):
        await loop.call(lambda engine: 1 // 0)
    await loop.close()
    with pytest.raises(Unavailable):
        await loop.call(lambda engine: None)


async def test_close_fails_what_is_open_and_refuses_what_comes_after() -> None:
    engine = FakeTarget()
    loop = target_loop(engine)
    loop.start()
    before, after = Recorder(), Recorder()
    loop.open(opening(1), before)
    await before.events.get()
    await loop.close()
    await loop.close()
    assert isinstance(await before.events.get(), Unavailable)
    loop.open(opening(1), after)
    assert isinstance(await after.events.get(), Unavailable)
    assert engine.lengths == {}
    assert loop.unhealthy() is not None


async def test_close_of_a_stuck_engine_says_so() -> None:
    engine = FakeTarget()
    loop = target_loop(engine)
    loop.start()
    engine.gate.clear()
    loop.open(opening(1), Recorder())
    assert await asyncio.to_thread(engine.in_step.wait, 10)
    with pytest.raises(Unavailable, match="did not end within"):
        await loop.close(timeout_s=0.01)
    engine.gate.set()
    await loop.close()


async def test_a_loop_that_was_never_started_closes() -> None:
    loop = target_loop(FakeTarget())
    await loop.close()
    assert loop.unhealthy() == "the engine thread is not running"
