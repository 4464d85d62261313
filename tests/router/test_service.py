from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.errors import DeadlineExceeded, EngineFault, InvalidArgument, Overloaded, Unavailable
from engine.sampling import SamplingParams
from router.costs import CostDefaults
from router.events import Complete, Delta, RequestRecord, RoundRecord
from router.peers import PeerSet
from router.policy import SpeculationControl
from router.requests import Chat, ChatMessage, GenerateRequest, Input, RawPrompt, TokenIds
from router.service import Router, RouterConfig
from router.shared import SessionConfig
from router.target_link import TargetLinkConfig
from router.tokenizer import Tokenizer
from rpc import tracing
from tests.router.fakes import FakeDraft, FakeTarget, VirtualClock, agreeing, engine_info, wandering

HELLO = GenerateRequest(RawPrompt("hello fox"))


class Recorder:
    def __init__(self) -> None:
        self.rounds = 0
        self.proposed: list[int] = []
        self.requests: list[RequestRecord] = []

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds += 1
        self.proposed.append(record.num_proposed)

    def request_finished(self, record: RequestRecord) -> None:
        self.requests.append(record)


class Served:
    """A router on a fake target and draft."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        window: int = 512,
        failover_wait_s: float = 0.0,
        workloads: dict[str, tuple[float, ...]] | None = None,
        costs: CostDefaults | None = None,
        **config: Any,
    ) -> None:
        self.clock, self.recorder, self.peers = VirtualClock(), Recorder(), PeerSet()
        model, vocab_size = wandering(200), tokenizer.vocab_size
        self.target = FakeTarget(engine_info("big", vocab_size, window, (300,)), model, self.clock)
        self.draft = FakeDraft(engine_info("small", vocab_size, 64), agreeing(model, 60, vocab_size), self.clock)
        self.peers.targets.replace({"a": self.target})
        self.peers.drafts.replace({"b": self.draft})
        link = TargetLinkConfig(failover_wait_s)
        sessions = SessionConfig(costs=costs or CostDefaults(), workloads=workloads or {}, target_link=link)
        settings = RouterConfig(version="1.2", sessions=sessions, **config)
        self.router = Router(tokenizer, self.peers, settings, self.recorder, self.clock)


async def generate(served: Served, request: GenerateRequest) -> tuple[str, list[int], Complete]:
    text, ids, complete = "", [], None
    async for event in served.router.generate(request):
        if isinstance(event, Delta):
            text, ids = text + event.text, [*ids, *event.token_ids]
        else:
            complete = event
    assert complete is not None
    return text, ids, complete


async def test_prompt_chat_and_ids_are_the_same_request(tokenizer: Tokenizer) -> None:
    messages = (ChatMessage("user", "hello fox"),)
    rendered = tokenizer.render_chat([{"role": "user", "content": "hello fox"}])
    outputs = [
        (await generate(Served(tokenizer), GenerateRequest(given)))[:2]
        for given in (Chat(messages), RawPrompt(rendered), TokenIds(tuple(tokenizer.encode(rendered))))
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][0]


async def test_usage_and_defaults(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer)
    text, ids, complete = await generate(served, HELLO)
    assert complete.usage.prompt_tokens == tokenizer.count("hello fox")
    assert complete.usage.completion_tokens == len(ids) == 256
    assert text == tokenizer.decode(ids)
    (request,) = served.recorder.requests
    assert request.elapsed_s > 0
    assert replace(request, elapsed_s=0) == RequestRecord("length", complete, num_delivered=256)
    assert served.recorder.rounds == complete.speculation.rounds


async def test_a_request_speculates_as_is_expected_of_its_class(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, workloads={"hopeless": (0.0,), "certain": (1.0,)})
    asked = replace(HELLO, speculation=SpeculationControl(drafter="draft_model"), max_tokens=8)
    by_class = {}
    for workload in ("hopeless", "certain"):
        _, _, complete = await generate(served, replace(asked, workload=workload))
        by_class[workload] = complete.speculation
    assert by_class["hopeless"].draft_tokens == 0
    assert by_class["certain"].mean_num_speculative_tokens > 3


async def test_the_first_proposal_is_as_long_as_pays_with_the_costs_that_were_given(tokenizer: Tokenizer) -> None:
    asked = replace(HELLO, speculation=SpeculationControl(drafter="draft_model"), max_tokens=16)
    first = []
    for draft_token_s in (1e-5, 1.0):
        served = Served(tokenizer, costs=CostDefaults(draft_token_s=draft_token_s))
        await generate(served, asked)
        first.append(next(filter(None, served.recorder.proposed)))
    cheap, dear = first
    assert dear == 1 < cheap


@pytest.mark.parametrize("stop", [(), ("the",), ("e", "q")])
async def test_a_smooth_stream_brings_the_same_token_by_token(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    asked = replace(HELLO, stop=stop)
    text, ids, complete = await generate(Served(tokenizer), asked)
    served = Served(tokenizer)
    events = [event async for event in served.router.generate(replace(asked, smooth_stream=True))]
    *deltas, end = events
    assert all(isinstance(delta, Delta) and len(delta.token_ids) == 1 for delta in deltas)
    assert ("".join(delta.text for delta in deltas), [delta.token_ids[0] for delta in deltas]) == (text, ids)
    assert end == complete
    assert served.recorder.requests[0].num_delivered == len(ids)
    assert served.target.open_sessions == served.draft.open_sessions == 0


async def test_a_smooth_stream_that_its_reader_closes_leaves_nothing_open(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer)
    events = served.router.generate(replace(HELLO, smooth_stream=True))
    for _ in range(5):
        await anext(events)
    await events.aclose()
    assert served.target.open_sessions == served.draft.open_sessions == 0
    (request,) = served.recorder.requests
    assert replace(request, elapsed_s=0) == RequestRecord("cancelled", None, num_delivered=5)


@pytest.mark.parametrize("asked", [None, 1000])
async def test_output_ends_at_the_window(tokenizer: Tokenizer, asked: int | None) -> None:
    prompt = TokenIds(tuple([5] * 60))
    _, ids, complete = await generate(Served(tokenizer, window=64), GenerateRequest(prompt, max_tokens=asked))
    assert (len(ids), complete.finish_reason) == (4, "length")


def hot(**sampling: float) -> GenerateRequest:
    return replace(HELLO, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(RawPrompt("")), "prompt"),
        (GenerateRequest(Chat(())), "chat.messages"),
        (GenerateRequest(TokenIds(())), "tokenized.input_ids"),
        (GenerateRequest(TokenIds((5, 10**6))), "tokenized.input_ids"),
        (GenerateRequest(TokenIds((-1,))), "tokenized.input_ids"),
        (GenerateRequest(TokenIds((5,) * 600)), "tokenized.input_ids"),
        (GenerateRequest(RawPrompt("a b " * 1000)), "prompt"),
        (GenerateRequest(RawPrompt("x" * 10_000_000)), "prompt"),
        (GenerateRequest(Chat((ChatMessage("user", "é" * 10_000_000),))), "chat.messages"),
        (GenerateRequest(RawPrompt("\ud800")), "prompt"),
        (GenerateRequest(Chat((ChatMessage("tool", "x"),))), "chat.messages"),
        (replace(HELLO, max_tokens=0), "sampling_params.max_tokens"),
        (replace(HELLO, max_tokens=3, min_tokens=4), "sampling_params.min_tokens"),
        (replace(HELLO, stop=("ok", "")), "sampling_params.stop"),
        (replace(HELLO, stop=("x",) * 65), "sampling_params.stop"),
        (replace(HELLO, stop=("x" * 2000,)), "sampling_params.stop"),
        (replace(HELLO, stop_token_ids=(10**6,)), "sampling_params.stop_token_ids"),
        (hot(temperature=-1.0), "sampling_params.temperature"),
        (hot(temperature=float("nan")), "sampling_params.temperature"),
        (hot(top_p=2.0), "sampling_params.top_p"),
        (hot(min_p=-0.1), "sampling_params.min_p"),
        (replace(HELLO, speculation=SpeculationControl(drafter="medusa")), "speculation.drafter"),
        (replace(HELLO, speculation=SpeculationControl(max_draft_tokens=-1)), "speculation.max_draft_tokens"),
        (replace(HELLO, workload="poem"), "speculation.workload"),
    ],
)
async def test_bad_input_is_refused_by_name_before_anything_is_opened(
    tokenizer: Tokenizer, request_: GenerateRequest, field: str
) -> None:
    if request_.input == Chat((ChatMessage("tool", "x"),)) and "no tools here" not in _template(tokenizer):
        pytest.skip("this model's template refuses nobody")
    served = Served(tokenizer)
    with pytest.raises(InvalidArgument) as caught:
        await generate(served, request_)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300
    assert served.recorder.requests == [RequestRecord("InvalidArgument", None)]
    assert served.target.open_sessions == served.draft.num_opened == 0
    assert served.router.running_requests == 0


def _template(tokenizer: Tokenizer) -> str:
    return (tokenizer.folder / "chat_template.jinja").read_text()


async def test_the_message_says_how_long_the_prompt_is_and_may_be(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        InvalidArgument, match=r"tokenized\.input_ids: found '600 tokens', allowed is at most 511 tokens"
    ):
        await generate(Served(tokenizer), GenerateRequest(TokenIds((5,) * 600)))


async def test_overload_is_refused_with_a_hint_and_waiting_is_bounded(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, max_concurrent=1, max_queued=1)
    running = served.router.generate(HELLO)
    await anext(running)
    waiting = asyncio.ensure_future(generate(served, HELLO))
    while served.router.queued_requests == 0:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await generate(served, HELLO)
    assert caught.value.retry_after_s >= 0.5
    served.clock.spend(3.0)
    await running.aclose()
    _, _, complete = await waiting
    assert complete.timing.queue_ms >= 3000
    assert complete.timing.ttft_ms > complete.timing.queue_ms
    assert (served.router.running_requests, served.router.queued_requests) == (0, 0)
    assert [record.outcome for record in served.recorder.requests] == ["Overloaded", "cancelled", "length"]


async def test_a_deadline_passes_while_waiting_too(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, max_concurrent=1)
    running = served.router.generate(HELLO)
    await anext(running)
    with pytest.raises(DeadlineExceeded, match="no place"):
        await generate(served, replace(HELLO, deadline_s=0.01))
    assert (served.router.running_requests, served.router.queued_requests) == (1, 0)
    await running.aclose()


async def test_giving_up_while_waiting_leaves_the_queue(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, max_concurrent=1, max_queued=1)
    running = served.router.generate(HELLO)
    await anext(running)
    waiting = asyncio.ensure_future(generate(served, HELLO))
    while served.router.queued_requests == 0:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (served.router.running_requests, served.router.queued_requests) == (1, 0)
    await running.aclose()


async def test_many_cancelled_requests_leave_nothing_behind(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, max_concurrent=8, max_queued=500)
    tasks = [asyncio.ensure_future(generate(served, HELLO)) for _ in range(200)]
    for index, task in enumerate(tasks):
        if index % 4 == 0:
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait(tasks)
    for _ in range(50):
        await asyncio.sleep(0)
    assert served.target.open_sessions == served.draft.open_sessions == 0
    assert (served.router.running_requests, served.router.queued_requests) == (0, 0)
    await generate(served, HELLO)


async def test_deadline_counts_from_arrival(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer)
    with pytest.raises(DeadlineExceeded):
        await generate(served, replace(HELLO, deadline_s=0.5))
    assert served.target.open_sessions == served.draft.open_sessions == 0
    (record,) = served.recorder.requests
    assert (record.outcome, record.complete) == ("DeadlineExceeded", None)
    assert 0 < record.num_delivered < 256


async def test_a_resumed_call_delivers_only_the_rest(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer)
    _, ids, _ = await generate(served, HELLO)
    await generate(served, replace(HELLO, resume_from=tuple(ids[:200])))
    assert [record.num_delivered for record in served.recorder.requests] == [256, 56]


async def test_no_target_yet(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer)
    served.peers.targets.replace({})
    with pytest.raises(Unavailable):
        await generate(served, HELLO)
    with pytest.raises(Unavailable):
        served.router.get_model_info()


async def test_a_request_waits_for_the_first_target_and_readiness_does_not(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, failover_wait_s=60.0)
    expected = await generate(served, HELLO)
    served.peers.targets.replace({})
    waiting = asyncio.ensure_future(generate(served, HELLO))
    while not served.router.running_requests:
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        served.router.get_model_info()
    with pytest.raises(DeadlineExceeded, match="before a target was ready"):
        await generate(served, replace(HELLO, deadline_s=0.01))
    served.peers.targets.replace({"a": served.target})
    assert (await waiting)[:2] == expected[:2]


async def test_model_info_follows_the_peers(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer)
    info = served.router.get_model_info()
    assert (info.model, info.draft_model, info.max_context_length, info.draft_max_context_length) == (
        "big",
        "small",
        512,
        64,
    )
    assert info.drafters == ("draft_model", "ngram")
    assert (info.version, info.eos_token_ids) == ("1.2", (300,))
    served.peers.drafts.replace({})
    assert served.router.get_model_info().drafters == ("ngram",)


@pytest.mark.parametrize("given", [RawPrompt("the fox 👋"), Chat((ChatMessage("user", "the fox"),))])
async def test_tokenize(tokenizer: Tokenizer, given: Input) -> None:
    assert isinstance(given, RawPrompt | Chat)
    ids, tokens = await Served(tokenizer).router.tokenize(given)
    chat = [{"role": "user", "content": "the fox"}]
    assert ids == (tokenizer.encode(given.text) if isinstance(given, RawPrompt) else tokenizer.encode_chat(chat))
    assert tokens == [tokenizer.token(token_id) for token_id in ids]


async def test_tokenize_refuses_what_is_too_large(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="text: found '10000000 bytes'"):
        await Served(tokenizer).router.tokenize(RawPrompt("x" * 10_000_000))


async def test_one_trace_per_request(tokenizer: Tokenizer) -> None:
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("router", SimpleSpanProcessor(exporter))
    try:
        caller = f"00-{7:032x}-{9:016x}-01"
        _, _, complete = await generate(Served(tokenizer), replace(HELLO, traceparent=caller, max_tokens=32))
    finally:
        tracing.shutdown_tracing()
    spans = exporter.get_finished_spans()
    request = next(span for span in spans if span.name == "outrider.request")
    rounds = [span for span in spans if span.name == "outrider.round"]
    assert {span.context.trace_id for span in spans} == {7}
    assert request.parent is not None
    assert request.parent.span_id == 9
    assert all(span.parent is not None and span.parent.span_id == request.context.span_id for span in rounds)
    assert request.attributes is not None
    assert request.attributes["outrider.outcome"] == "length"
    assert sum(span.attributes["outrider.num_tokens"] for span in rounds) == complete.speculation.decoded_tokens
    assert sum(span.attributes.get("outrider.num_proposed", 0) for span in rounds) == complete.speculation.draft_tokens
    assert {span.attributes["outrider.drafter"] for span in rounds} >= {"draft_model"}
    assert {span.attributes.get("outrider.early", False) for span in rounds} == {False}


async def test_every_switch_is_an_event_with_its_reason(tokenizer: Tokenizer) -> None:
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("router", SimpleSpanProcessor(exporter))
    try:
        served = Served(tokenizer)
        served.draft.behaviour = lambda number, proposal: proposal if number < 4 else EngineFault("the draft is gone")
        asked = replace(HELLO, speculation=SpeculationControl(drafter="draft_model"), max_tokens=64)
        _, _, complete = await generate(served, asked)
        await generate(served, hot(temperature=1.0))
    finally:
        tracing.shutdown_tracing()
    spans = exporter.get_finished_spans()
    requests = [span for span in spans if span.name == "outrider.request"]
    lost, warm = ([dict(event.attributes) for event in span.events] for span in requests)
    assert complete.speculation.switched_off_reason == "draft_unavailable"
    assert lost[0].pop("outrider.num_generated") > 4
    assert lost[0] == {
        "outrider.reason": "draft_unavailable",
        "outrider.reason_before": "",
        "outrider.drafter": "",
        "outrider.num_speculative_tokens": 0,
    }
    assert [event["outrider.reason_before"] for event in lost[1:]] == [event["outrider.reason"] for event in lost[:-1]]
    assert all(event["outrider.reason"] != event["outrider.reason_before"] for event in lost)
    assert lost[-1]["outrider.reason"] == "draft_unavailable"
    assert [(event["outrider.reason"], event["outrider.num_generated"]) for event in warm] == [("temperature", 1)]
    assert {event.name for span in requests for event in span.events} == {"outrider.speculation"}
