"""Running ahead from end to end: the target goes on by itself, and no token changes, whenever whose answer arrives."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bench.emulated_model import NUM_WORDS
from engine.sampling import SamplingParams
from router.events import RoundRecord
from router.policy import SpeculationControl
from router.shared import SessionConfig
from router.speed_gate import PolicyConfig
from rpc import tracing
from tests.rounds.emulated import EMULATION, delays, emulated_system

AHEAD = SessionConfig(policy=PolicyConfig(off_below=0.0, acceptance_floor=0.0))
OFF = SpeculationControl(enabled=False)
NUM_TOKENS = 120
NUM_TRIES = 4  # a machine may be so busy that all that a draft makes for a dozen sessions comes late


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(NUM_WORDS) for _ in range(rng.randrange(1, 60))] for _ in range(count)]


async def test_the_target_has_most_proposals_before_it_needs_them(tmp_path: Path) -> None:
    (prompt,) = prompts(1)
    async with emulated_system(tmp_path, AHEAD) as system:
        tokens, end = await system.ask(prompt, NUM_TOKENS)
        assert tokens == EMULATION.reference(prompt, NUM_TOKENS)
        assert end.speculation.rounds_ahead > 10
        assert end.speculation.early_hit_rate > 0.4
        assert end.speculation.wasted_draft_tokens > 0
        await system.check_at_rest()


class Recorder:
    def __init__(self) -> None:
        self.rounds: list[RoundRecord] = []

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def request_finished(self, record: object) -> None:
        pass


async def test_what_observers_and_traces_see_of_rounds_adds_up_to_the_statistics(tmp_path: Path) -> None:
    (prompt,), recorder, exporter = prompts(1), Recorder(), InMemorySpanExporter()
    tracing.setup_tracing("test", SimpleSpanProcessor(exporter))
    try:
        async with emulated_system(tmp_path, AHEAD, observer=recorder) as system:
            tokens, end = await system.ask(prompt, 60, smooth_stream=True)
    finally:
        tracing.shutdown_tracing()
    assert tokens == EMULATION.reference(prompt, 60)
    totals, rounds = end.speculation, recorder.rounds
    assert sum(record.is_hit is not None for record in rounds) == totals.rounds_ahead
    assert sum(record.is_hit is True for record in rounds) == totals.early_hits > 0
    assert sum(record.num_wasted for record in rounds) == totals.wasted_draft_tokens > 0
    spans = exporter.get_finished_spans()
    early = [span.name for span in spans if span.attributes.get("outrider.early")]
    num_early = sum(record.is_early for record in rounds)
    assert early.count("outrider.round") == early.count("outrider.verify") == num_early
    assert any(span.name == "outrider.draft_ahead" for span in spans)
    assert len({span.context.trace_id for span in spans}) == 1


async def test_many_sessions_run_ahead_at_once(tmp_path: Path) -> None:
    asked = prompts(12, seed=1)
    async with emulated_system(tmp_path, AHEAD) as system:
        for _ in range(NUM_TRIES):
            ends = await asyncio.gather(*(system.ask(prompt, NUM_TOKENS) for prompt in asked))
            for prompt, (tokens, _) in zip(asked, ends, strict=True):
                assert tokens == EMULATION.reference(prompt, NUM_TOKENS)
            await system.check_at_rest()
            num_hits = sum(end.speculation.early_hits for _, end in ends)
            if num_hits > 12:
                break
        assert num_hits > 12


@pytest.mark.parametrize("seed", range(4))
async def test_no_token_changes_whenever_whose_answer_arrives(tmp_path: Path, seed: int) -> None:
    """Public cases A1 and A5 with answers of draft and target delayed at random, out of order with each other."""
    asked = prompts(8, seed=seed + 10)
    drafters = [SpeculationControl(drafter=name) for name in ("draft_model", "auto")]
    async with emulated_system(tmp_path, AHEAD, jitter=delays(seed, 0.02)) as system:
        greedy = [system.ask(prompt, NUM_TOKENS, speculation=drafters[n % 2]) for n, prompt in enumerate(asked)]
        seeded = SamplingParams(temperature=0.8, seed=seed)
        plain = await system.ask(asked[0], NUM_TOKENS, sampling=seeded, speculation=OFF)
        *ends, ahead, unseeded = await asyncio.gather(
            *greedy,
            system.ask(asked[0], NUM_TOKENS, sampling=seeded),
            system.ask(asked[0], NUM_TOKENS, sampling=SamplingParams(temperature=0.8)),
        )
        for prompt, (tokens, _) in zip(asked, ends, strict=True):
            assert tokens == EMULATION.reference(prompt, NUM_TOKENS)
        assert ahead[0] == plain[0]
        assert len(unseeded[0]) == NUM_TOKENS
        assert sum(end.speculation.early_hits for _, end in [*ends, ahead, unseeded]) > 0
        await system.check_at_rest()
