"""The fuzzer's end of a stream: sends any bytes, reads every answer, and keeps the books."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random

import grpc
import grpc.aio

from rpc.outbox import MAX_MESSAGE_BYTES
from rpc.pb import drafting_pb2, session_pb2, verification_pb2
from tests.fuzz.books import Books, DraftingBooks, VerificationBooks, check_refusal
from tests.fuzz.drafting_script import DraftingScript
from tests.fuzz.mutations import frame_of, parsed
from tests.fuzz.scripts import Script
from tests.fuzz.stage import Loop, Stage, turn
from tests.fuzz.verification_script import VerificationScript

TIMEOUT_S = 60.0
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))
_WROTE_TOO_LATE = "Internal error from Core"  # of grpc's own client, when a write crosses with the end of the stream
_MARKS_FROM = 2**60  # session ids that no script uses


class Ending(enum.Enum):
    """How a stream is left."""

    HALF_CLOSED = "half-closed"
    CANCELLED = "cancelled"
    CUT_OFF = "cut off"


@dataclass(frozen=True)
class Service:
    """One of the two engines' services, and what a fuzzer needs to know of it."""

    name: str
    script: type[Script]
    books: type[Books]
    request: type[verification_pb2.VerificationRequest] | type[drafting_pb2.DraftRequest]
    index: int

    def address(self, stage: Stage) -> str:
        return stage.servers[self.index].address

    def loop(self, stage: Stage) -> Loop:
        return stage.loops[self.index]

    def mark(self, number: int) -> bytes:
        """A frame that closes a session nobody has: it is answered at once, behind all that was answered before."""
        close = session_pb2.CloseSession(session=_MARKS_FROM + number)
        return frame_of([self.request(close=close).SerializeToString()])


VERIFICATION = Service(
    "verification", VerificationScript, VerificationBooks, verification_pb2.VerificationRequest, index=0
)
DRAFTING = Service("drafting", DraftingScript, DraftingBooks, drafting_pb2.DraftRequest, index=1)
SERVICES = {service.name: service for service in (VERIFICATION, DRAFTING)}


@dataclass(frozen=True)
class Plan:
    """One stream as it will be: its frames, and how it is left."""

    service: Service
    seed: int
    frames: tuple[bytes, ...]
    ending: Ending


def plan_stream(service: Service, seed: int, vocab_size: int, num_requests: int) -> Plan:
    """A function of its arguments alone. About one stream in four ends with a frame that is no message."""
    script, rng = service.script(seed, vocab_size), Random(f"{service.name} frames {seed}")
    frames: list[bytes] = []
    left = num_requests
    while left > 0:
        size = min(left, rng.choice((1, 2, 4, 8, 16, 32)))
        frames.append(frame_of([script.request() for _ in range(size)]))
        left -= size
    if rng.random() < 0.25:
        frames.append(frame_of([script.request(), script.last()]))
    return Plan(service, seed, tuple(frames), rng.choice(list(Ending)))


async def play(stage: Stage, channel: grpc.aio.Channel, plan: Plan) -> Counter[str]:
    """Plays a stream to its end and checks all that comes of it. Returns the answers, by kind."""
    books = plan.service.books(stage.tokenizer.vocab_size)
    with replayable(plan):
        async with asyncio.timeout(TIMEOUT_S):
            stream = _RawStream(channel, plan.service, books)
            for number, frame in enumerate(plan.frames):
                books.sent(frame)
                if not await stream.send(frame) or not await stream.send(plan.service.mark(number)):
                    break
                await stream.answered(_MARKS_FROM + number)
                await turn(plan.service.loop(stage))
            await stream.leave(plan.ending)
    books.answers["requests"] = books.requests
    return books.answers


class _RawStream:
    """A call whose messages are bytes."""

    def __init__(self, channel: grpc.aio.Channel, service: Service, books: Books) -> None:
        self._channel, self._books = channel, books
        self._call = channel.stream_stream(f"/outrider.v1.{service.name.title()}/Stream")()
        self._marks: set[int] = set()
        self._came = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def send(self, frame: bytes) -> bool:
        """False when the stream has ended."""
        try:
            await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    async def answered(self, mark: int) -> None:
        """Returns once a mark is answered, or the stream is over."""
        while mark not in self._marks and not self._reader.done():
            self._came.clear()
            await self._came.wait()
        if self._reader.done():
            self._reader.result()

    async def leave(self, ending: Ending) -> None:
        if ending is Ending.HALF_CLOSED:
            with suppress(asyncio.InvalidStateError):
                await self._call.done_writing()
        elif ending is Ending.CANCELLED:
            self._call.cancel()
        else:
            await self._channel.close()
        await self._reader
        code, details = await self._call.code(), await self._call.details() or ""
        if code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED) and details != _WROTE_TOO_LATE:
            check_refusal(code, details)
            self._books.answers[f"stream {code.name}"] += 1

    async def _read(self) -> None:
        try:
            with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async for data in self._call:
                    self._take(data)
        finally:
            self._came.set()

    def _take(self, data: bytes) -> None:
        self._books.received(data)
        frame = parsed(self._books.reply_type, data)
        assert frame is not None
        self._marks |= {reply.closed.session for reply in frame.replies if reply.closed.session >= _MARKS_FROM}
        self._came.set()


@contextmanager
def replayable(plan: Plan) -> Iterator[None]:
    """Says with a failure how to bring it about again."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{plan.service.name} stream of seed {plan.seed}, left {plan.ending.value}; its frames:")
        for frame in plan.frames:
            error.add_note(frame.hex() if len(frame) < 1 << 14 else f"{frame[: 1 << 12].hex()}… ({len(frame)} bytes)")
        raise


async def play_all(stage: Stage, plans: Sequence[Plan], at_once: int) -> Counter[str]:
    """Plays streams, `at_once` of them beside each other on channels of their own."""
    waiting, answers = iter(plans), Counter[str]()

    async def player() -> None:
        for plan in waiting:
            async with grpc.aio.insecure_channel(plan.service.address(stage), _OPTIONS) as channel:
                answers.update(await play(stage, channel, plan))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(player())
    return answers
