"""Inputs that once made something fail, played again.

A file's name begins with the service; its lines are frames of one stream (or, for the public API, requests of Generate)
in hex, and what follows a # says what they did.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from tests.fuzz.neighbour import neighbour
from tests.fuzz.stage import running_stage
from tests.fuzz.test_generation import call, public_server
from tests.fuzz.wire import SERVICES, Ending, Plan, play_all

CORPUS = Path(__file__).parent / "corpus"


def files(*services: str) -> list[Path]:
    found = [path for service in services for path in sorted(CORPUS.glob(f"{service}-*.txt"))]
    assert found
    return found


def lines_of(path: Path) -> Iterator[bytes]:
    for line in path.read_text(encoding="ascii").splitlines():
        if content := line.partition("#")[0].strip():
            yield bytes.fromhex(content)


@pytest.mark.parametrize("path", files(*SERVICES), ids=lambda path: path.stem)
async def test_a_stream_that_did_harm_does_none(path: Path, tmp_path: Path) -> None:
    service = SERVICES[path.stem.partition("-")[0]]
    plan = Plan(service, 0, tuple(lines_of(path)), Ending.HALF_CLOSED)
    async with running_stage(tmp_path) as stage, neighbour(stage, seed=0):
        answers = await play_all(stage, [plan], at_once=1)
        await stage.check_integrity()
    assert answers["requests"] > 0


@pytest.mark.parametrize("path", files("generation"), ids=lambda path: path.stem)
async def test_a_call_that_failed_otherwise_than_meant_says_what_is_wrong(path: Path, tmp_path: Path) -> None:
    async with (
        running_stage(tmp_path) as stage,
        public_server(stage) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for data in lines_of(path):
            assert await call(stage, channel, "Generate", data) == "INVALID_ARGUMENT"
