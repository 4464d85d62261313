from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from engine.errors import DeadlineExceeded, EngineFault, Unavailable
from engine.sampling import SamplingParams, StopParams
from router.detokenizer import Detokenizer
from router.events import Complete, Delta, RoundRecord
from router.peers import PeerSet
from router.policy import SpeculationControl
from router.requests import SessionRequest
from router.session import Session
from router.shared import SessionConfig, Shared
from router.stopping import Output, StopStrings, TextStream
from router.stopwatch import Stopwatch
from router.target_link import TargetLinkConfig
from router.tokenizer import Tokenizer
from tests.router.fakes import (
    FakeDraft,
    FakeTarget,
    NextToken,
    VirtualClock,
    agreeing,
    engine_info,
    scripted,
    wandering,
)

VOCAB = 250


class Recorder:
    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def request_finished(self, record: object) -> None:
        raise AssertionError("a session does not end requests")


@dataclass
class Bench:
    """A target and a draft in virtual time, and requests on them."""

    tokenizer: Tokenizer
    model: NextToken
    percent: int = 60
    window: int = 8192
    draft_window: int = 8192
    eos: tuple[int, ...] = ()
    with_draft: bool = True
    clock: VirtualClock = field(default_factory=VirtualClock)
    recorder: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        vocab_size = self.tokenizer.vocab_size
        self.target = FakeTarget(engine_info("target", vocab_size, self.window, self.eos), self.model, self.clock)
        says = agreeing(self.model, self.percent, vocab_size)
        self.draft = FakeDraft(engine_info("draft", vocab_size, self.draft_window), says, self.clock)
        peers = PeerSet()
        peers.targets.replace({"target": self.target})
        if self.with_draft:
            peers.drafts.replace({"draft": self.draft})
            peers.drafts.look = lambda: peers.drafts.replace({"draft": self.draft})  # restarted already
        config = SessionConfig(target_link=TargetLinkConfig(failover_wait_s=0.0))
        self.shared = Shared(peers, self.clock, config, observer=self.recorder)

    def session(
        self,
        prompt: list[int],
        control: SpeculationControl,
        stops: StopParams = StopParams(max_tokens=64),  # noqa: B008 (frozen)
        stop: StopStrings = StopStrings(),  # noqa: B008
        temperature: float = 0.0,
        deadline_s: float = 0.0,
    ) -> Session:
        request = SessionRequest(tuple(prompt), SamplingParams(temperature), stops, control, deadline_s=deadline_s)
        output = Output(TextStream(Detokenizer(self.tokenizer), stop))
        return Session(request, output, Stopwatch(self.clock), self.shared)

    def nothing_is_open(self) -> bool:
        peers = self.shared.peers
        counts = (self.target.open_sessions, self.draft.open_sessions)
        return counts == (0, 0) and peers.targets.open_sessions == peers.drafts.open_sessions == 0


async def collect(session: Session) -> tuple[str, list[int], Complete]:
    text, ids, complete = "", [], None
    async for event in session.events():
        assert complete is None, "nothing follows Complete"
        if isinstance(event, Delta):
            assert event.text or event.token_ids
            text, ids = text + event.text, [*ids, *event.token_ids]
        else:
            complete = event
    assert complete is not None
    assert complete.usage.completion_tokens == len(ids)
    return text, ids, complete


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per letter."""
    return [tokenizer.encode(letter)[0] for letter in text]


OFF = SpeculationControl(enabled=False)
CONTROLS = [
    SpeculationControl(drafter=drafter, max_draft_tokens=k)
    for drafter in ("auto", "ngram", "draft_model")
    for k in (None, 1, 2, 5)
]


@pytest.mark.parametrize("percent", [0, 60, 100])
@pytest.mark.parametrize("prompt", [[7], [5, 6, 7, 8, 5, 6, 7]])
async def test_greedy_output_does_not_depend_on_speculation(
    tokenizer: Tokenizer, percent: int, prompt: list[int]
) -> None:
    expected = await collect(Bench(tokenizer, wandering(11)).session(prompt, OFF))
    for control in CONTROLS:
        bench = Bench(tokenizer, wandering(11), percent)
        text, ids, complete = await collect(bench.session(prompt, control))
        assert (text, ids) == expected[:2]
        assert complete.finish_reason == "length"
        assert bench.nothing_is_open()
        if control.max_draft_tokens is not None:
            assert all(len(proposal.tokens) <= control.max_draft_tokens for proposal in bench.target.proposals)


async def test_statistics_agree_with_what_was_proposed(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, wandering(11))
    _, ids, complete = await collect(bench.session([7, 8, 9], SpeculationControl()))
    totals, rounds = complete.speculation, bench.recorder.rounds
    assert totals.rounds == len(rounds)
    assert totals.decoded_tokens == len(ids) - 1 == sum(record.num_tokens for record in rounds)
    assert totals.draft_tokens == sum(record.num_proposed for record in rounds) == sum(totals.drafted_per_position)
    assert totals.accepted_tokens == sum(record.num_accepted for record in rounds) == sum(totals.accepted_per_position)
    assert {record.drafter for record in rounds} - {""} == set(totals.drafters)
    assert totals.mean_acceptance_length == pytest.approx(totals.decoded_tokens / totals.rounds)
    assert totals.mean_acceptance_length > 1.3


async def test_speculation_is_faster_than_plain_and_off_costs_nothing(tokenizer: Tokenizer) -> None:
    times = {}
    for name, control in (("auto", SpeculationControl(drafter="draft_model")), ("off", OFF)):
        bench = Bench(tokenizer, wandering(VOCAB))
        await collect(bench.session([1, 2], control, StopParams(max_tokens=200)))
        times[name] = bench.clock.now
    assert times["off"] == pytest.approx(200 * 0.038 + 0.002)
    assert times["auto"] < times["off"] / 1.3


@pytest.mark.parametrize("answer", [None, EngineFault("the draft yields NaN")])
@pytest.mark.parametrize("drafter", ["auto", "draft_model"])
async def test_the_first_token_waits_for_no_draft(
    tokenizer: Tokenizer, drafter: str, answer: EngineFault | None
) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    bench.draft.behaviour = lambda _, proposal: answer
    events = bench.session([1, 2], SpeculationControl(drafter=drafter)).events()
    assert isinstance(await anext(events), Delta)
    assert bench.draft.num_opened == 1
    assert bench.clock.now == pytest.approx(0.038)
    await events.aclose()


async def test_a_router_without_drafters_decodes_without_round_trips(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    bench.shared = replace(bench.shared, config=SessionConfig(drafters=()))
    await collect(bench.session([1, 2], SpeculationControl(), StopParams(max_tokens=100)))
    assert bench.target.proposals == []
    assert bench.clock.now == pytest.approx(100 * 0.038 + 0.002)


async def test_a_useless_draft_is_switched_off_and_costs_little(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, wandering(VOCAB), percent=0)
    control = SpeculationControl(drafter="draft_model")
    _, _, complete = await collect(bench.session([1, 2], control, StopParams(max_tokens=600)))
    assert complete.speculation.switched_off_reason == "acceptance"
    assert bench.clock.now < 600 * 0.038 / 0.98


async def test_while_speculation_is_off_the_target_hardly_rests(tokenizer: Tokenizer) -> None:
    """In a batch a target that rests has to wait for the forward of the others, so stretches flow into each other."""
    bench = Bench(tokenizer, wandering(VOCAB), percent=0)
    await collect(bench.session([1, 2], SpeculationControl(), StopParams(max_tokens=600)))
    num_plain = sum(1 for record in bench.recorder.rounds if not record.num_proposed)
    assert bench.target.num_rests < num_plain / 20


async def test_hot_requests_are_never_speculated_on(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    _, ids, complete = await collect(bench.session([1, 2], SpeculationControl(), temperature=0.9))
    assert len(ids) == 64
    assert complete.speculation.switched_off_reason == "temperature"
    assert bench.draft.num_opened == 0
    assert bench.target.proposals == []


@pytest.mark.parametrize("max_tokens", [1, 2, 6, 7])
@pytest.mark.parametrize("percent", [0, 100])
async def test_exact_cap(tokenizer: Tokenizer, max_tokens: int, percent: int) -> None:
    for control in CONTROLS:
        bench = Bench(tokenizer, wandering(3), percent)
        _, ids, complete = await collect(bench.session([1, 2, 1, 2], control, StopParams(max_tokens=max_tokens)))
        assert len(ids) == max_tokens
        assert complete.finish_reason == "length"


@pytest.mark.parametrize("control", [OFF, *CONTROLS])
async def test_stop_before_the_cap_and_stop_beyond_it(tokenizer: Tokenizer, control: SpeculationControl) -> None:
    words = letters(tokenizer, "abcdefgh")
    for stop, expected in (("c", ("ab", 3, "stop", "c")), ("f", ("abcde", 5, "length", None))):
        bench = Bench(tokenizer, scripted([9], words, words[0]), percent=100)
        session = bench.session([9], control, StopParams(max_tokens=5), StopStrings((stop,)))
        text, ids, complete = await collect(session)
        assert (text, len(ids), complete.finish_reason, complete.matched_stop) == expected
        assert ids == words[: len(ids)]
        assert bench.nothing_is_open()


@pytest.mark.parametrize("control", [OFF, *CONTROLS])
async def test_eos_inside_a_block(tokenizer: Tokenizer, control: SpeculationControl) -> None:
    output = [*letters(tokenizer, "ab"), 2, *letters(tokenizer, "cdef")]
    for ignore, length in ((False, 3), (True, 6)):
        bench = Bench(tokenizer, scripted([9], output, 5), percent=100, eos=(2,))
        stops = StopParams(max_tokens=6, ignore_eos=ignore)
        text, ids, complete = await collect(bench.session([9], control, stops))
        assert ids == output[:length]
        assert text == tokenizer.decode(ids)
        assert complete.finish_reason == ("length" if ignore else "stop")
        assert complete.matched_stop is None


@pytest.mark.parametrize("k", range(8))
@pytest.mark.parametrize("written", ["👋🏽 hello", "안녕하세요", "a 👨‍👩‍👧‍👦 family", "at the end \ufffd"])
async def test_stream_equals_the_whole_text_for_every_draft_length(tokenizer: Tokenizer, k: int, written: str) -> None:
    output = tokenizer.encode(written)
    bench = Bench(tokenizer, scripted([9], output, 2), percent=100, eos=(2,))
    session = bench.session([9], SpeculationControl(max_draft_tokens=k, drafter="draft_model"))
    text, ids, _ = await collect(session)
    assert ids == [*output, 2]
    assert text == written


@pytest.mark.parametrize("num_prompt", [60, 64, 65, 250, 255])
async def test_context_edges(tokenizer: Tokenizer, num_prompt: int) -> None:
    prompt = [3 + i % 5 for i in range(num_prompt)]
    stops = StopParams(max_tokens=min(100, 256 - num_prompt))
    expected = await collect(Bench(tokenizer, wandering(VOCAB)).session(prompt, OFF, stops))
    for drafter in ("auto", "draft_model"):
        bench = Bench(tokenizer, wandering(VOCAB), window=256, draft_window=64)
        text, ids, complete = await collect(bench.session(prompt, SpeculationControl(drafter=drafter), stops))
        assert (text, ids) == expected[:2]
        assert complete.finish_reason == "length"
        assert bench.draft.longest <= 64
        assert bench.draft.num_opened == (1 if num_prompt < 64 else 0)
        assert bench.nothing_is_open()
        if drafter == "draft_model" and stops.max_tokens > 5:
            assert complete.speculation.switched_off_reason == "context"


async def test_target_failure_reaches_the_caller_and_frees_the_draft(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    bench.target.fault = lambda number: EngineFault("the target yields NaN") if number == 5 else None
    with pytest.raises(EngineFault, match="NaN"):
        await collect(bench.session([1, 2], SpeculationControl()))
    assert bench.nothing_is_open()


async def test_no_target(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    bench.shared.peers.targets.replace({})
    with pytest.raises(Unavailable, match="no target"):
        await collect(bench.session([1, 2], SpeculationControl()))


async def test_deadline_frees_both_sides(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    with pytest.raises(DeadlineExceeded):
        await collect(bench.session([1, 2], SpeculationControl(), StopParams(max_tokens=2000), deadline_s=1.0))
    assert 0.9 < bench.clock.now < 1.2
    assert bench.nothing_is_open()


@pytest.mark.parametrize("steps", [*range(12), 20, 35, 60, 100, 150])
async def test_cancelled_anywhere_nothing_stays_open(tokenizer: Tokenizer, steps: int) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    task = asyncio.ensure_future(collect(bench.session([1, 2], SpeculationControl(), StopParams(max_tokens=5000))))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.nothing_is_open()


@pytest.mark.parametrize("num_events", [0, 1, 2, 7])
async def test_closed_by_its_reader_nothing_stays_open(tokenizer: Tokenizer, num_events: int) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    events = bench.session([1, 2], SpeculationControl()).events()
    for _ in range(num_events):
        await anext(events)
    await events.aclose()
    assert bench.nothing_is_open()


async def test_cancelled_while_closing_it_still_closes(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    events = bench.session([1, 2], SpeculationControl()).events()
    await anext(events)
    closing = asyncio.ensure_future(events.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.nothing_is_open()


async def test_timing_is_told_in_virtual_time(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, wandering(VOCAB))
    _, _, complete = await collect(bench.session([1, 2], OFF, StopParams(max_tokens=11)))
    timing = complete.timing
    assert timing.ttft_ms == pytest.approx(38)
    assert timing.decode_tokens_per_s == pytest.approx(10 / 0.382)
    assert timing.itl_ms_p50 == pytest.approx(38)
    assert timing.itl_ms_p95 == pytest.approx(40)
    assert timing.router_ms_p50 == pytest.approx(0.0, abs=1e-6)
