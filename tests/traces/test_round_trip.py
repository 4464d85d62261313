"""From a caller's traceparent over real gRPC and OTLP to a file, and back: one trace, which adds up to the reply."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.errors import Unavailable
from router.policy import SpeculationControl
from router.requests import GenerateRequest, RawPrompt
from rpc import tracing
from tests.rounds.emulated import emulated_system
from tests.rounds.test_failover import NUM_TOKENS, Fleet, request
from tests.rounds.test_running_ahead import AHEAD, prompts
from tests.traces.conftest import Cli, assert_adds_up, assert_one_trace, everything_said, read_back, spans_of
from tests.traces.receiver import TRACE, TRACEPARENT, Receiver

OFF = SpeculationControl(enabled=False)


async def test_rounds_that_run_ahead_add_up_to_the_reply(receiver: Receiver, outrider: Cli, tmp_path: Path) -> None:
    (prompt,) = prompts(1)
    async with emulated_system(tmp_path / "model", AHEAD) as system:
        _, end = await system.ask(prompt, 60, request_id="a reply", traceparent=TRACEPARENT)
    found = read_back(outrider, receiver, "a reply")
    assert_one_trace(receiver.path)
    assert_adds_up(found, end)
    assert end.speculation.early_hits > 0
    assert found["breakdown_ms"]["forward"] > found["breakdown_ms"]["router"] > 0.0
    asked = [each for each in found["rounds"] if each["num_proposed"] and not each["is_early"]]
    assert all(each["draft_wait_ms"] > 0.0 for each in asked)
    assert any(each["draft_ms"] > 0.0 for each in asked)  # not all: some the draft had made ahead
    assert sum(each["is_early"] for each in found["rounds"]) >= end.speculation.early_hits
    kinds = {(each["who"], each["kind"], each["is_early"]) for each in found["work"]}
    assert kinds >= {("target", "prefill", False), ("target", "verify", True), ("draft", "draft_ahead", False)}


async def test_plain_decoding_is_a_stretch_and_its_tokens_are_counted(
    receiver: Receiver, outrider: Cli, tmp_path: Path
) -> None:
    async with emulated_system(tmp_path / "model", AHEAD) as system:
        _, end = await system.ask(prompts(1)[0], 40, request_id="plain", traceparent=TRACEPARENT, speculation=OFF)
    found = read_back(outrider, receiver, TRACEPARENT)
    assert_adds_up(found, end)
    assert any(each["is_stretch"] for each in found["rounds"])
    where = found["breakdown_ms"]
    assert where["plain"] > 0.0
    assert where["forward"] == where["draft_wait"] == 0.0
    assert [each["what"] for each in found["happenings"]] == ["speculation off: request"]


async def test_of_a_request_that_is_not_sampled_nobody_makes_a_span(receiver: Receiver, tmp_path: Path) -> None:
    async with emulated_system(tmp_path / "model", AHEAD) as system:
        _, end = await system.ask(prompts(1)[0], 40, traceparent=f"{TRACEPARENT[:-2]}00")
    tracing.shutdown_tracing()
    assert end.speculation.draft_tokens > 0
    assert not receiver.path.exists()


@pytest.mark.parametrize("way", ["chain", "plain", "ngram"])
async def test_a_failover_stays_in_the_trace(receiver: Receiver, outrider: Cli, fleet: Fleet, way: str) -> None:
    await fleet.add("b")
    asked = request(way, request_id="survivor", traceparent=TRACEPARENT)
    ids, end = await fleet.run_and_lose(fleet.router(), asked, 23)
    assert (len(ids), end.failovers) == (NUM_TOKENS, 1)
    found = read_back(outrider, receiver, "survivor")
    assert_one_trace(receiver.path)
    assert_adds_up(found, end)
    (lost,) = [each for each in found["happenings"] if each["name"] == "outrider.target_lost"]
    assert lost["what"].endswith(" lost: Unavailable")
    assert sum(each["kind"] == "prefill" for each in found["work"]) == 2  # the session was opened on both
    assert found["breakdown_ms"]["failover"] > 0.0


async def test_a_request_that_found_no_target_any_more_is_told_too(
    receiver: Receiver, outrider: Cli, fleet: Fleet
) -> None:
    with pytest.raises(Unavailable):
        await fleet.run_and_lose(fleet.router(wait_s=0.0), request("chain", request_id="stranded"), 5)
    found = read_back(outrider, receiver, "stranded")
    assert (found["outcome"], found["completion_tokens"], found["failovers"]) == ("Unavailable", None, 1)
    assert sum(found["breakdown_ms"].values()) == pytest.approx(found["duration_ms"], abs=0.01)
    picture = receiver.path.with_suffix(".svg")
    status, printed, said = outrider("trace", "stranded", "--file", str(receiver.path), "--plot", str(picture))
    assert (status, said) == (0, f"drew {picture}\n")
    assert "stranded  Unavailable" in printed
    assert picture.stat().st_size > 0


async def test_no_text_is_in_a_trace(receiver: Receiver, tmp_path: Path) -> None:
    prompt = "quizzical marmalade"
    async with emulated_system(tmp_path / "model", AHEAD) as system:
        asked = GenerateRequest(RawPrompt(prompt), max_tokens=40, ignore_eos=True, stop=("zyxwvut",))
        events = [event async for event in system.router.generate(asked)]
    output = "".join(event.text for event in events[:-1])
    tracing.shutdown_tracing()
    spans = spans_of(receiver.path)
    assert {span.name for span in spans} >= {"outrider.request", "outrider.round", "outrider.verify"}
    said = everything_said(spans)
    assert len(output) > 40
    for text in (*prompt.split(), "zyxwvut", *(output[start : start + 8] for start in range(len(output) - 8))):
        assert text not in said


async def test_requests_at_once_are_told_apart(receiver: Receiver, outrider: Cli, tmp_path: Path) -> None:
    asked = prompts(4, seed=3)
    async with emulated_system(tmp_path / "model", AHEAD) as system:
        ends = await asyncio.gather(
            *(system.ask(p, 12, request_id=f"r{i}", traceparent=TRACEPARENT) for i, p in enumerate(asked))
        )
    for index, (_, end) in enumerate(ends):
        assert_adds_up(read_back(outrider, receiver, f"r{index}"), end)
    status, _, said = outrider("trace", TRACE, "--file", str(receiver.path))
    assert status == 1
    assert said.startswith(f"error: {TRACE} names 4 requests, oldest first; give one of {TRACE}-")
    name = said.split(", ")[-1].strip()
    assert read_back(outrider, receiver, name)["request_id"].startswith("r")
