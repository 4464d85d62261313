"""Verification and Drafting under garbage, on real engines over real gRPC, beside a neighbour that must not notice."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.fuzz.cases import cases
from tests.fuzz.neighbour import neighbour
from tests.fuzz.stage import MAX_GROWTH_BYTES, resident_bytes, running_stage
from tests.fuzz.wire import SERVICES, plan_stream, play_all

SHARE = {"verification": 0.52, "drafting": 0.43}
SENSE = {"verification": "accepted", "drafting": "proposal"}
"""What comes often where not all that is said is garbage."""
PER_STREAM = 120
AT_ONCE = 4
BATCH = 20  # streams, between two looks at the books
NUM_DROPPED = 100


@pytest.mark.parametrize("name", SERVICES)
async def test_no_crash_no_leak_no_wrong_token(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    num_streams, service = -(-cases.share(SHARE[name]) // PER_STREAM), SERVICES[name]
    async with running_stage(tmp_path) as stage:
        before, answers = resident_bytes(), Counter[str]()
        async with neighbour(stage, cases.seed):
            for first in range(0, num_streams, BATCH):
                seeds = range(cases.seed + first, cases.seed + min(first + BATCH, num_streams))
                plans = [plan_stream(service, seed, stage.tokenizer.vocab_size, PER_STREAM) for seed in seeds]
                answers += await play_all(stage, plans, AT_ONCE)
                await stage.check_integrity()
        assert resident_bytes() - before < MAX_GROWTH_BYTES
    assert answers["requests"] >= cases.share(SHARE[name])
    assert answers[SENSE[name]] > num_streams
    assert not caplog.records


@pytest.mark.parametrize("name", SERVICES)
async def test_streams_that_are_dropped_unread_leave_nothing(name: str, tmp_path: Path) -> None:
    service = SERVICES[name]
    async with running_stage(tmp_path) as stage, neighbour(stage, cases.seed):
        path = f"/outrider.v1.{name.title()}/Stream"
        async with grpc.aio.insecure_channel(service.address(stage)) as channel:
            for seed in range(cases.seed, cases.seed + NUM_DROPPED):
                plan = plan_stream(service, seed, stage.tokenizer.vocab_size, num_requests=12)
                call = channel.stream_stream(path)()
                await call.write(plan.frames[0])
                call.cancel()
        await stage.check_integrity()
