"""One trace of a target of two ranks: router, draft and leader here, the follower in a process of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from cluster.followers import _Follower
from engine.drafting import build_draft_engine
from engine.loop import TargetLoop, draft_loop, target_loop
from engine.parallel import Place, Rendezvous, join
from engine.settings import DraftSettings, EngineSettings
from engine.target import build_target_engine
from router.peers import PeerSet
from router.policy import SpeculationControl
from router.requests import GenerateRequest, TokenIds
from router.service import Router, RouterConfig
from router.tokenizer import Tokenizer
from rpc.clients import DraftClient, TargetClient
from rpc.servers import serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer
from tests.deployments.conftest import byte_tokenizer
from tests.engine.models import make_folder, plain_greedy
from tests.rounds.test_failover import run
from tests.rounds.test_real_engines import ALWAYS
from tests.rpc.serving import shut_down
from tests.traces.conftest import Cli, assert_adds_up, assert_one_trace, read_back, spans_of
from tests.traces.receiver import TRACEPARENT, Receiver

PROMPT, NUM_TOKENS = [5, 6, 7, 5, 6, 7, 5], 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, all of whose sizes can be cut in two."""
    tokenizer = byte_tokenizer([("t", "h"), ("h", "e")], ["<a>", "<b>"])
    path = make_folder(tmp_path_factory.mktemp("models") / "even", vocab=tokenizer.get_vocab_size())
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def follow(settings: EngineSettings, place: Place, collector: str) -> None:
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector
    _Follower().run(settings, place)


@contextmanager
def follower(settings: EngineSettings, place: Place, collector: str) -> Iterator[None]:
    """A follower, which ends by itself when its leader leaves it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["engine.follower", "transformers.models.llama.modeling_llama"])
    process = context.Process(target=follow, args=(settings, place, collector), daemon=True)
    process.start()
    try:
        yield
        process.join(30.0)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


@asynccontextmanager
async def system_of_two_ranks(folder: Path, collector: str) -> AsyncIterator[tuple[Router, TargetLoop]]:
    tokenizer = Tokenizer(folder)
    settings = EngineSettings(folder, num_blocks=128, dtype="float32", vocab_size=tokenizer.vocab_size)
    rendezvous = Rendezvous("127.0.0.1", 2)
    with follower(settings, rendezvous.place(1), collector):
        group = join(rendezvous.place(0), "cpu", rendezvous)
        target = target_loop(build_target_engine(settings, group))
        draft = draft_loop(build_draft_engine(DraftSettings(settings)))
        servers = []
        for servicer in (VerificationServicer(target), DraftingServicer(draft)):
            servicer.loop.start()
            servers.append(await serve_engine(servicer))
        clients = await TargetClient.connect(servers[0].address), await DraftClient.connect(servers[1].address)
        peers = PeerSet()
        peers.targets.replace({"target": clients[0]})
        peers.drafts.replace({"draft": clients[1]})
        yield Router(tokenizer, peers, RouterConfig(sessions=ALWAYS)), target
        await shut_down(clients, servers, (target, draft))
        group.close()


async def test_every_forward_of_a_follower_is_in_the_trace(receiver: Receiver, outrider: Cli, folder: Path) -> None:
    asked = GenerateRequest(
        TokenIds(tuple(PROMPT)), max_tokens=NUM_TOKENS, ignore_eos=True, request_id="spread",
        traceparent=TRACEPARENT, speculation=SpeculationControl(drafter="draft_model"),
    )  # fmt: skip
    async with system_of_two_ranks(folder, receiver.address) as (router, target):
        ids, end = await run(router, asked)
        forwards = target.info.forwards
    assert ids == plain_greedy(folder, PROMPT, NUM_TOKENS, eos=None)
    found = read_back(outrider, receiver, "spread")
    assert_one_trace(receiver.path)
    assert_adds_up(found, end)
    assert found["services"] == ["outrider-router", "outrider-target-follower"]
    spans = spans_of(receiver.path)
    (request,) = (span for span in spans if span.name == "outrider.request")
    followed = [span for span in spans if span.name == "outrider.follow"]
    assert len(followed) == forwards == sum(each["who"] == "follower" for each in found["work"])
    assert {(span.parent_id, span.service) for span in followed} == {(request.span_id, "outrider-target-follower")}
    assert {each["rank"] for each in found["work"]} == {0, 1}
    for span in followed:
        assert span.number("rows") >= 1
        assert span.number("forward_ms") == pytest.approx(span.duration_ms, abs=0.01)
        assert request.start_ns < span.start_ns < span.end_ns  # the last may be over after the reply
