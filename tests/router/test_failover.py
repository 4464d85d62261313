"""A target may be lost at any moment: the text is what it would have been, no token twice, none missing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.errors import DeadlineExceeded, OutriderError, Overloaded, Unavailable, UnknownSession
from engine.sampling import SamplingParams, StopParams
from router.detokenizer import Detokenizer
from router.events import Complete
from router.peers import PeerSet
from router.policy import SpeculationControl
from router.requests import SessionRequest
from router.session import Session
from router.shared import SessionConfig, Shared
from router.stopping import Output, StopStrings, TextStream
from router.stopwatch import Stopwatch
from router.target_link import TargetLinkConfig
from router.tokenizer import Tokenizer
from rpc import tracing
from tests.router.fakes import FakeDraft, FakeTarget, Fault, VirtualClock, agreeing, engine_info, wandering
from tests.router.test_session import OFF, collect

PROMPT = [5, 6, 7, 8, 5, 6, 7]
NUM_TOKENS = 40
MODEL = wandering(11)
CONTROLS = {
    "plain": OFF,
    "ngram": SpeculationControl(drafter="ngram"),
    "chain": SpeculationControl(drafter="draft_model"),
    "auto": SpeculationControl(),
}
GONE = Unavailable("the stream broke")
PATIENT = TargetLinkConfig(retry_s=0.0)


@dataclass
class Fleet:
    """Targets that a test can take down and bring up, and a draft."""

    tokenizer: Tokenizer
    names: tuple[str, ...] = ("a", "b")
    config: TargetLinkConfig = PATIENT
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        vocab_size = self.tokenizer.vocab_size
        self.targets = {
            name: FakeTarget(engine_info("target", vocab_size, 8192), MODEL, self.clock) for name in self.names
        }
        self.draft = FakeDraft(engine_info("draft", vocab_size, 8192), agreeing(MODEL, 70, vocab_size), self.clock)
        self.peers, self.looks, self._missed = PeerSet(), 0, asyncio.Event()
        self.peers.targets.replace(self.targets)
        self.peers.targets.look = self._look
        self.peers.drafts.replace({"draft": self.draft})
        self.shared = Shared(self.peers, self.clock, SessionConfig(target_link=self.config))

    def _look(self) -> None:
        self.looks += 1
        if self.looks == 2:
            self._missed.set()

    async def waited_for(self) -> None:
        """Returns once the only target was lost (one look) and a session waits for another (one more)."""
        await self._missed.wait()

    def rediscovered_at_once(self) -> None:
        """Whatever is lost is back before the session asks for it."""
        self.peers.targets.look = lambda: self.peers.targets.replace(self.targets)

    def failing(self, fault: Fault) -> FakeTarget:
        """The target that a session takes first fails so."""
        session = self.session(OFF)
        first = session._target._peers.targets.pick_near(session._target._key)
        assert first is not None
        self.targets[first[0]].fault = fault
        return self.targets[first[0]]

    def session(self, control: SpeculationControl, deadline_s: float = 0.0, stop: StopStrings | None = None) -> Session:
        stops = StopParams(max_tokens=NUM_TOKENS)
        request = SessionRequest(
            tuple(PROMPT), SamplingParams(), stops, control, deadline_s=deadline_s,
            span=tracing.start_span("outrider.request", "", {}),
        )  # fmt: skip
        output = Output(TextStream(Detokenizer(self.tokenizer), stop or StopStrings()))
        return Session(request, output, Stopwatch(self.clock), self.shared)

    async def settled(self) -> None:
        """Nothing is open, once what outlives a cancellation is done."""
        for _ in range(20):
            await asyncio.sleep(0)
        assert [target.open_sessions for target in self.targets.values()] == [0] * len(self.targets)
        assert self.draft.open_sessions == 0
        assert self.peers.targets.open_sessions == self.peers.drafts.open_sessions == 0


async def undisturbed(tokenizer: Tokenizer) -> tuple[str, list[int]]:
    text, ids, complete = await collect(Fleet(tokenizer).session(OFF))
    assert (len(ids), complete.failovers) == (NUM_TOKENS, 0)
    return text, ids


def lost_at(*numbers: int, error: OutriderError = GONE) -> Fault:
    return lambda number: error if number in numbers else None


@pytest.mark.parametrize("name", CONTROLS)
async def test_another_target_takes_over_wherever_the_first_is_lost(tokenizer: Tokenizer, name: str) -> None:
    expected = await undisturbed(tokenizer)
    for number in range(NUM_TOKENS):
        fleet = Fleet(tokenizer)
        first = fleet.failing(lost_at(number))
        text, ids, complete = await collect(fleet.session(CONTROLS[name]))
        assert (text, ids) == expected
        was_lost = first.num_verdicts > number
        assert complete.failovers == fleet.looks == int(was_lost)
        opened = [committed for target in fleet.targets.values() for committed in target.openings]
        assert len(opened) == 1 + was_lost
        assert all(ids[: len(committed)] == committed for committed in opened)
        await fleet.settled()
    assert not was_lost or name == "plain"  # speculation needs fewer verdicts, so the last ones never came


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("period", [2, 3, 7])
async def test_lost_over_and_over_with_tokens_in_between(tokenizer: Tokenizer, name: str, period: int) -> None:
    fleet = Fleet(tokenizer, names=("a",))
    fleet.rediscovered_at_once()
    target = fleet.failing(lambda number: GONE if number % period == period - 1 else None)
    text, ids, complete = await collect(fleet.session(CONTROLS[name]))
    assert (text, ids) == await undisturbed(tokenizer)
    assert complete.failovers == len(target.openings) - 1 >= 1
    assert fleet.draft.num_opened == (1 if name in ("chain", "auto") else 0)  # its side never noticed
    await fleet.settled()


@pytest.mark.parametrize("first_loss", [0, 6])
async def test_who_brings_down_one_target_after_another_is_given_up(tokenizer: Tokenizer, first_loss: int) -> None:
    fleet = Fleet(tokenizer, names=("a",))
    fleet.rediscovered_at_once()
    target = fleet.failing(lambda number: GONE if number >= first_loss else None)
    with pytest.raises(Unavailable, match="4 targets were lost in a row; the last: the stream broke"):
        await collect(fleet.session(SpeculationControl()))
    assert len(target.openings) == 4
    await fleet.settled()


@pytest.mark.parametrize("how", ["open", "propose", "decode"])
async def test_a_target_that_cannot_even_be_asked(tokenizer: Tokenizer, how: str) -> None:
    """Opening, proposing and decoding may fail at once, not only by what verdicts say."""
    fleet = Fleet(tokenizer)
    first = fleet.failing(lost_at())
    reopened: list[str] = []

    def refuse(*_: object, **__: object) -> None:
        reopened.append(how)
        raise GONE

    if how == "open":
        first.open = refuse  # type: ignore[assignment]
    else:
        open_ = first.open

        def open_refusing(*arguments: object, **named: object) -> object:
            session = open_(*arguments, **named)  # type: ignore[arg-type]
            setattr(session, how, refuse)
            return session

        first.open = open_refusing  # type: ignore[assignment]
    control = OFF if how == "decode" else CONTROLS["chain"]
    text, ids, complete = await collect(fleet.session(control))
    assert (text, ids) == await undisturbed(tokenizer)
    assert (complete.failovers, reopened) == (1, [how])
    await fleet.settled()


async def test_a_target_that_forgot_the_session_is_asked_again(tokenizer: Tokenizer) -> None:
    """It restarted at its old address: it is there, so nobody need look, and the session goes on with it."""
    fleet = Fleet(tokenizer, names=("a",))
    target = fleet.failing(lost_at(9, error=UnknownSession("session 3 is not open")))
    text, ids, complete = await collect(fleet.session(OFF))
    assert (text, ids) == await undisturbed(tokenizer)
    assert (complete.failovers, len(target.openings), fleet.looks) == (1, 2, 0)
    await fleet.settled()


async def test_with_none_left_it_waits_for_one_to_come(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, names=("a",))
    fleet.failing(lost_at(4))
    task = asyncio.ensure_future(collect(fleet.session(SpeculationControl())))
    await fleet.waited_for()
    successor = FakeTarget(fleet.targets["a"].info, MODEL, fleet.clock)
    fleet.targets["a2"] = successor
    fleet.peers.targets.replace({"a2": successor})
    text, ids, complete = await task
    assert (text, ids) == await undisturbed(tokenizer)
    assert complete.failovers == 1
    assert len(successor.openings) == 1
    assert successor.openings[0] == ids[: len(successor.openings[0])] != []
    await fleet.settled()


@pytest.mark.parametrize("wait_s", [0.0, 0.02])
async def test_with_none_left_and_none_coming_it_fails(tokenizer: Tokenizer, wait_s: float) -> None:
    fleet = Fleet(tokenizer, names=("a",), config=replace(PATIENT, failover_wait_s=wait_s))
    fleet.failing(lost_at(4))
    with pytest.raises(Unavailable, match="no target is ready"):
        await collect(fleet.session(SpeculationControl()))
    await fleet.settled()


async def test_the_deadline_passes_while_it_waits(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, names=("a",))
    fleet.targets["a"].verify_s = 0.0
    fleet.failing(lost_at(4))
    with pytest.raises(DeadlineExceeded, match="before a target was ready"):
        await collect(fleet.session(OFF, deadline_s=0.05))
    await fleet.settled()


async def test_cancelled_while_it_waits_both_sides_are_free(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, names=("a",))
    fleet.failing(lost_at(4))
    task = asyncio.ensure_future(collect(fleet.session(CONTROLS["chain"])))
    await fleet.waited_for()
    assert fleet.draft.open_sessions == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fleet.settled()


@pytest.mark.parametrize("steps", range(0, 48, 3))
async def test_cancelled_anywhere_in_a_failover_nothing_stays_open(tokenizer: Tokenizer, steps: int) -> None:
    fleet = Fleet(tokenizer)
    fleet.failing(lambda number: GONE if number % 3 == 2 else None)
    fleet.rediscovered_at_once()
    task = asyncio.ensure_future(collect(fleet.session(SpeculationControl())))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fleet.settled()


async def test_a_full_target_refuses_a_new_session_but_is_waited_for_by_one_that_lost_its_own(
    tokenizer: Tokenizer,
) -> None:
    full = Overloaded("all sessions are in use", retry_after_s=0.001)
    fleet = Fleet(tokenizer)
    first = fleet.failing(lost_at(5))
    other = next(target for target in fleet.targets.values() if target is not first)
    other.fault = lost_at(0, 1, 2, 3, 4, 5, error=full)
    text, ids, complete = await collect(fleet.session(OFF))
    assert (text, ids) == await undisturbed(tokenizer)
    assert (complete.failovers, len(other.openings)) == (1, 7)
    await fleet.settled()

    fleet = Fleet(tokenizer)
    fleet.failing(lost_at(0, error=full))
    with pytest.raises(Overloaded):
        await collect(fleet.session(OFF))
    await fleet.settled()


@pytest.mark.parametrize(("retry_after_s", "num_asked"), [(0.004, 4), (3600.0, 2)])
async def test_full_for_too_long(tokenizer: Tokenizer, retry_after_s: float, num_asked: int) -> None:
    """However late a target says to come again, nobody waits for longer than for another target."""
    fleet = Fleet(tokenizer, config=replace(PATIENT, failover_wait_s=0.01))
    first = fleet.failing(lost_at(5))
    other = next(target for target in fleet.targets.values() if target is not first)
    other.fault = lambda _: Overloaded("all sessions are in use", retry_after_s)
    with pytest.raises(Overloaded):
        await collect(fleet.session(OFF))
    assert len(other.openings) == num_asked
    await fleet.settled()


async def test_a_target_that_never_closes_holds_up_nobody(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, names=("a",), config=replace(PATIENT, close_s=0.001))
    target = fleet.targets["a"]
    acknowledged = asyncio.Event()
    open_ = target.open

    def open_hanging(*arguments: object, **named: object) -> object:
        session = open_(*arguments, **named)  # type: ignore[arg-type]
        close = session.close

        async def hang() -> None:
            await acknowledged.wait()
            await close()

        session.close = hang  # type: ignore[method-assign]
        return session

    target.open = open_hanging  # type: ignore[assignment]
    await collect(fleet.session(OFF))
    assert (target.open_sessions, fleet.peers.targets.open_sessions) == (1, 1)
    acknowledged.set()
    await fleet.settled()


async def test_it_is_on_the_span_of_the_request(tokenizer: Tokenizer) -> None:
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("router", SimpleSpanProcessor(exporter))
    try:
        fleet = Fleet(tokenizer)
        fleet.failing(lost_at(7))
        session = fleet.session(CONTROLS["chain"])
        _, _, complete = await collect(session)
        assert session._request.span is not None
        session._request.span.end()
    finally:
        tracing.shutdown_tracing()
    assert isinstance(complete, Complete)
    request = next(span for span in exporter.get_finished_spans() if span.name == "outrider.request")
    assert [event.name for event in request.events] == ["outrider.target_lost"] * complete.failovers
    assert complete.failovers == 1
    assert request.events[0].attributes is not None
    assert request.events[0].attributes["outrider.error"] == "Unavailable"
