"""Owns the one thread that drives an engine, and the way between that thread and asyncio.

Engines are not thread-safe, so everything that touches one runs here: commands come in through an inbox and are
applied in order between steps; outputs, failures and acknowledgements go back in one callback per step. The thread
sleeps on its inbox when the engine has nothing to do, so a posted command starts its forward at once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from engine.bubble import BubbleMeter
from engine.errors import OutriderError, Unavailable, presentable
from engine.info import EngineInfo
from engine.ports import DraftEngine, DraftOutput, Engine, Subscriber, TargetEngine, TargetOutput
from engine.proposal import Verdict

_log = logging.getLogger(__name__)

_BLOCKS_POLL_S = 0.01

EngineT = TypeVar("EngineT", bound=Engine)
OutputT = TypeVar("OutputT")
ResultT = TypeVar("ResultT")

Command = Callable[[EngineT, int], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Event(Generic[OutputT]):
    """What befell a session: an output, or its end by an error, or (neither) its end on request."""

    session: int
    output: OutputT | None = None
    error: OutriderError | None = None


class EngineLoop(Generic[EngineT, OutputT]):
    """Runs one engine on one thread. All public methods belong to the asyncio loop that called `start`.

    Args:
        engine: touched by this thread alone once started.
        step: runs one engine step; returns (session, output or the error that ended it) pairs.
        decoding: whether a session with this latest output waits for another forward (what bubble counts).
        clock: seconds, monotonic.
        stall_limit_s: a turn longer than this makes the loop unhealthy.
    """

    def __init__(
        self,
        engine: EngineT,
        step: Callable[[], Sequence[tuple[int, OutputT | OutriderError]]],
        decoding: Callable[[OutputT], bool],
        *,
        clock: Clock = time.monotonic,
        stall_limit_s: float = 60.0,
    ) -> None:
        self._engine, self._step, self._is_decoding = engine, step, decoding
        self._clock, self._stall_limit_s = clock, stall_limit_s
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle, self._heartbeat = False, clock()
        self._failure: OutriderError | None = None
        self._info = engine.info()
        # of the asyncio side
        self._subscribers: dict[int, Subscriber[OutputT]] = {}
        self._last_session = self._num_posted = 0
        self._ended, self._down = asyncio.Event(), asyncio.Event()
        # of the engine thread, as are all methods below `_run`
        self._stopping = False
        self._open: set[int] = set()
        self._events: list[_Event[OutputT]] = []
        self._bubble = BubbleMeter(clock, self._info.forward_s)

    def start(self) -> None:
        """Starts the thread; outputs go to the running asyncio loop."""
        self._asyncio = asyncio.get_running_loop()
        self._heartbeat = self._clock()
        self._thread.start()

    def open(self, command: Command[EngineT], subscriber: Subscriber[OutputT]) -> int:
        """Opens a session by `command` and returns its engine-wide id; `subscriber` learns all that follows."""
        self._last_session += 1
        session = self._last_session
        self._subscribers[session] = subscriber
        if self._ended.is_set():
            refused: _Event[OutputT] = _Event(session, error=self._failure)
            self._asyncio.call_soon(self._deliver, [refused])
        else:
            self._put(partial(self._apply_open, session, command))
        return session

    def post(self, session: int, command: Command[EngineT]) -> None:
        """Applies `command` before the next step; a session that is gone by then ignores it."""
        self._put(partial(self._apply, session, command))

    def close_session(self, session: int, error: OutriderError | None = None) -> None:
        """Closes a session; its subscriber hears of it (as a failure if `error` says why) once blocks are free."""
        self._put(partial(self._apply_close, session, error))

    async def call(self, function: Callable[[EngineT], ResultT]) -> ResultT:
        """Runs `function` on the engine thread between two steps and returns what it returns."""
        if self._ended.is_set():
            raise Unavailable("the engine has been shut down")
        result: Future[ResultT] = Future()
        self._put(partial(self._apply_call, function, result))
        return await asyncio.wrap_future(result)

    async def close(self, timeout_s: float = 30.0) -> None:
        """Fails what is open, frees it and joins the thread. Idempotent. Raises Unavailable if the thread is stuck."""
        if self._thread.ident is None:
            return
        self._put(self._apply_stop)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            raise Unavailable(f"the engine thread did not end within {timeout_s} s") from None
        self._thread.join()

    async def failure(self) -> OutriderError:
        """Waits until the engine fails, and says how. Returns never while it works, nor when it is closed."""
        await self._down.wait()
        assert self._failure is not None
        return self._failure

    @property
    def info(self) -> EngineInfo:
        """The engine's info as of its last turn, with the bubble that this loop measured."""
        return self._info

    @property
    def backlog(self) -> int:
        """Commands posted but not yet applied."""
        return self._inbox.qsize()

    @property
    def num_posted(self) -> int:
        """Commands posted since the start: the number of the latest. They are applied in that order."""
        return self._num_posted

    def unhealthy(self) -> str | None:
        """Why the serving path is broken (engine failed, thread gone or stuck in a turn), or None if it is not."""
        if self._failure is not None:
            return str(self._failure)
        if not self._thread.is_alive():
            return "the engine thread is not running"
        silent_s = self._clock() - self._heartbeat
        if not self._idle and silent_s > self._stall_limit_s:
            return f"the engine has been in one step for {silent_s:.0f} s, allowed are {self._stall_limit_s:.0f} s"
        return None

    def _put(self, command: Callable[[], None]) -> None:
        self._num_posted += 1
        self._inbox.put(command)

    def _deliver(self, events: list[_Event[OutputT]]) -> None:
        for event in events:
            if (subscriber := self._subscribers.get(event.session)) is None:
                continue
            try:
                if event.output is not None:
                    subscriber.on_output(event.output)
                    continue
                del self._subscribers[event.session]
                if event.error is not None:
                    subscriber.on_failed(event.error)
                else:
                    subscriber.on_closed()
            except Exception as error:  # one subscriber's fault must not cost the others their events
                self.close_session(event.session, presentable(error, "delivery of an engine output"))

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                if self._asyncio.is_closed():
                    return  # nobody is left to tell
                self._fail_all(Unavailable(str(presentable(error, "engine step"))))
                self._asyncio.call_soon_threadsafe(self._down.set)
        self._end()

    def _turn(self) -> None:
        """Apply what was posted, step once, tell the subscribers."""
        self._apply_posted()
        if self._events:
            self._publish()
        if not self._stopping and self._has_work():
            forwards = self._engine.info().forwards
            outputs = self._step()
            if self._engine.info().forwards == forwards and not outputs:
                self._await_blocks()
            self._bubble.count(self._engine.info().forward_s)
            for session, output in outputs:
                self._take(session, output)
            self._publish()

    def _has_work(self) -> bool:
        return self._failure is None and self._engine.has_work()

    def _apply_posted(self) -> None:
        if not self._has_work():
            self._next_command()()
        while not self._inbox.empty():  # this thread is the only reader
            self._inbox.get()()

    def _next_command(self) -> Callable[[], None]:
        self._idle = True
        command = self._inbox.get()
        self._heartbeat = self._clock()
        self._idle = False
        self._bubble.count(self._engine.info().forward_s)
        return command

    def _await_blocks(self) -> None:
        """Everything that wants a forward waits for blocks of sessions that want none at the moment."""
        with suppress(queue.Empty):
            self._inbox.get(timeout=_BLOCKS_POLL_S)()

    def _apply_open(self, session: int, command: Command[EngineT]) -> None:
        if self._failure is not None:
            self._events.append(_Event(session, error=Unavailable(f"the engine is down: {self._failure}")))
            return
        self._open.add(session)
        self._apply(session, command)

    def _apply(self, session: int, command: Command[EngineT]) -> None:
        if session not in self._open:
            return  # it failed or was closed while the command was under way; its subscriber knows
        try:
            command(self._engine, session)
        except Exception as error:
            self._apply_close(session, presentable(error, "engine command"))

    def _apply_close(self, session: int, error: OutriderError | None) -> None:
        self._bubble.mark(session, decoding=False)
        if session in self._open:
            self._engine.close(session)
            self._open.discard(session)
        self._events.append(_Event(session, error=error))

    def _apply_call(self, function: Callable[[EngineT], ResultT], result: Future[ResultT]) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(function(self._engine))
        except Exception as error:
            result.set_exception(error)

    def _apply_stop(self) -> None:
        self._stopping = True

    def _take(self, session: int, output: OutputT | OutriderError) -> None:
        if isinstance(output, OutriderError):
            self._apply_close(session, output)
            return
        self._bubble.mark(session, self._is_decoding(output))
        self._events.append(_Event(session, output=output))

    def _publish(self) -> None:
        self._heartbeat = self._clock()
        self._info = replace(self._engine.info(), bubble_s=self._bubble.seconds)
        self._flush()

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._asyncio.call_soon_threadsafe(self._deliver, events)

    def _fail_all(self, error: OutriderError) -> None:
        """The engine's state cannot be trusted any more: everything open fails, nothing new is accepted."""
        self._failure = error
        _log.log(logging.INFO if self._stopping else logging.CRITICAL, "the engine is down: %s", error)
        self._events += [_Event(session, error=error) for session in self._open]
        self._open.clear()
        self._bubble.clear()
        self._flush()

    def _end(self) -> None:
        for session in self._open:
            try:
                self._engine.close(session)
            except Exception as error:  # the others must still be closed
                presentable(error, "closing a session at shutdown")
        self._fail_all(self._failure or Unavailable("it is shutting down"))
        try:
            while not self._inbox.empty():
                self._inbox.get()()
            self._publish()
        finally:
            self._asyncio.call_soon_threadsafe(self._ended.set)


def target_loop(engine: TargetEngine, *, clock: Clock = time.monotonic, stall_limit_s: float = 60.0) -> TargetLoop:
    """A loop for a target; its bubble counts from a session's first verdict to its finish."""

    def step() -> list[tuple[int, TargetOutput | OutriderError]]:
        return [
            (session, TargetOutput(made, engine.cached_tokens(session)) if isinstance(made, Verdict) else made)
            for session, made in engine.step()
        ]

    def decoding(output: TargetOutput) -> bool:
        return output.verdict.finish_reason is None

    return EngineLoop(engine, step, decoding, clock=clock, stall_limit_s=stall_limit_s)


def draft_loop(engine: DraftEngine, *, clock: Clock = time.monotonic, stall_limit_s: float = 60.0) -> DraftLoop:
    """A loop for a draft, which has no bubble: it is idle when it is ahead."""
    return EngineLoop(engine, engine.step, lambda _: False, clock=clock, stall_limit_s=stall_limit_s)


TargetLoop = EngineLoop[TargetEngine, TargetOutput]
DraftLoop = EngineLoop[DraftEngine, DraftOutput]
