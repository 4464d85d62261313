"""One trace through real processes, one of which is killed: router here, a draft and two targets each on their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.emulated_model import make_folder
from router.peers import PeerSet
from router.policy import SpeculationControl
from router.requests import GenerateRequest, TokenIds
from router.service import Router, RouterConfig
from router.tokenizer import Tokenizer
from rpc.clients import DraftClient, TargetClient
from tests.rounds.emulated import EMULATION
from tests.rounds.test_failover import run
from tests.rounds.test_running_ahead import AHEAD, prompts
from tests.traces.conftest import Cli, assert_adds_up, assert_one_trace, read_back
from tests.traces.receiver import TRACEPARENT, Receiver

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 60


@contextmanager
def engine_process(kind: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A running engine; it sends its last spans and ends with the block, unless it was killed before."""
    command = [sys.executable, "-m", "tests.traces.engine_process", kind, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            process.communicate(timeout=60)
        finally:
            process.kill()


async def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


@pytest.mark.slow
async def test_a_trace_goes_on_when_the_process_of_its_target_is_killed(
    receiver: Receiver, outrider: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # what was not sent yet dies with a process
    folder, peers, (prompt,) = make_folder(tmp_path / "model"), PeerSet(), prompts(1)
    with ExitStack() as stack:
        started = [stack.enter_context(engine_process(kind, folder)) for kind in ("target", "target", "draft")]
        *targets, draft = [await address_of(process) for process in started]
        clients = {address: await TargetClient.connect(address) for address in targets}
        draft_client = await DraftClient.connect(draft)
        peers.targets.replace(dict(clients))
        peers.drafts.replace({"draft": draft_client})

        async def kill() -> None:
            sessions = [(await clients[address].refresh()).running_sessions for address in targets]
            started[sessions.index(1)].kill()

        asked = GenerateRequest(
            TokenIds(tuple(prompt)), max_tokens=NUM_TOKENS, ignore_eos=True, request_id="survivor",
            traceparent=TRACEPARENT, speculation=SpeculationControl(drafter="draft_model"),
        )  # fmt: skip
        ids, end = await run(Router(Tokenizer(folder), peers, RouterConfig(sessions=AHEAD)), asked, 20, kill)
        for client in (*clients.values(), draft_client):
            await client.close()
    assert (ids, end.failovers) == (EMULATION.reference(prompt, NUM_TOKENS), 1)
    found = read_back(outrider, receiver, "survivor")
    assert_one_trace(receiver.path)
    assert_adds_up(found, end)
    assert found["services"] == ["outrider-draft", "outrider-router", "outrider-target"]
    assert [each["name"] for each in found["happenings"]].count("outrider.target_lost") == 1
    assert found["breakdown_ms"]["failover"] > 0.0
