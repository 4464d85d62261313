"""A caller like any other, beside the fuzzer on the same engines: every token it gets is checked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.emulated_model import NUM_WORDS
from engine.sampling import SamplingParams
from router.events import Complete
from router.policy import SpeculationControl
from router.requests import GenerateRequest, TokenIds
from tests.fuzz.oracle import TARGET, continuation
from tests.fuzz.stage import Stage

NUM_TOKENS = 24


@dataclass
class Served:
    """What it got so far."""

    requests: int = 0
    accepted_tokens: int = 0


@asynccontextmanager
async def neighbour(stage: Stage, seed: int) -> AsyncIterator[Served]:
    """Sends one request after the other meanwhile, the last one after everything else is over."""
    rng, served, over = random.Random(f"neighbour {seed}"), Served(), asyncio.Event()

    async def run() -> None:
        while True:
            is_last = over.is_set()
            await _one_request(stage, rng, served)
            if is_last:
                return

    running = asyncio.create_task(run())
    try:
        yield served
        assert not running.done() or running.exception() is None, running.exception()
    finally:
        over.set()
        await running
    assert served.accepted_tokens > 0  # the draft was of use all along


async def _one_request(stage: Stage, rng: random.Random, served: Served) -> None:
    prompt = tuple(rng.randrange(NUM_WORDS) for _ in range(rng.randrange(1, 80)))
    sampling = rng.choice([SamplingParams(), SamplingParams(temperature=0.8, seed=rng.getrandbits(32))])
    request = GenerateRequest(
        TokenIds(prompt),
        sampling,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        speculation=SpeculationControl(drafter="draft_model", num_speculative_tokens=3, run_ahead=rng.random() < 0.5),
    )
    events = [event async for event in stage.router.generate(request)]
    complete = events[-1]
    assert isinstance(complete, Complete)
    tokens = [token for delta in events[:-1] for token in delta.token_ids]
    assert tokens == continuation(TARGET, stage.tokenizer.vocab_size, prompt, NUM_TOKENS, sampling)
    assert complete.failovers == 0
    served.requests += 1
    served.accepted_tokens += complete.speculation.accepted_tokens
