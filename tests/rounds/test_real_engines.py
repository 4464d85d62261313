"""Router, target and draft with real engines over real gRPC, in one process: rounds from end to end without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.drafting import build_draft_engine
from engine.loop import DraftLoop, TargetLoop, draft_loop, target_loop
from engine.planner import RowShapes
from engine.sampling import SamplingParams
from engine.settings import DraftSettings, EngineSettings
from engine.target import build_target_engine
from router.events import Complete
from router.peers import PeerSet
from router.policy import SpeculationControl
from router.requests import GenerateRequest, TokenIds
from router.service import Router, RouterConfig
from router.shared import SessionConfig
from router.speed_gate import PolicyConfig
from router.tokenizer import Tokenizer
from rpc.clients import DraftClient, TargetClient
from rpc.servers import serve_engine
from rpc.servicers import DraftingServicer, VerificationServicer
from tests.deployments.conftest import byte_tokenizer
from tests.rpc.serving import shut_down

TARGET_WINDOW, DRAFT_WINDOW = 256, 64
OFF = SpeculationControl(enabled=False)
DRAFT = SpeculationControl(drafter="draft_model")
# Tiny models are slower to reach than to run, so a policy that watches the clock would rightly switch off.
ALWAYS = SessionConfig(policy=PolicyConfig(off_below=0.0, acceptance_floor=0.0))


def make_folder(path: Path, seed: int, window: int) -> Path:
    tokenizer = byte_tokenizer([("t", "h"), ("th", "e")], ["<end>"])
    torch.manual_seed(seed)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=window, eos_token_id=258,
            bos_token_id=None, tie_word_embeddings=False, initializer_range=0.3,
        )
    ).save_pretrained(path)  # fmt: skip
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@dataclass
class Running:
    """Everything of one system, and one way to ask it."""

    router: Router
    target: TargetLoop
    draft: DraftLoop

    async def ask(self, prompt: list[int], control: SpeculationControl, **rest: object) -> tuple[list[int], Complete]:
        request = GenerateRequest(TokenIds(tuple(prompt)), speculation=control, **rest)  # type: ignore[arg-type]
        events = [event async for event in self.router.generate(request)]
        assert isinstance(events[-1], Complete)
        return [token for delta in events[:-1] for token in delta.token_ids], events[-1]

    async def check_at_rest(self) -> None:
        for loop in (self.target, self.draft):
            await loop.call(lambda engine: engine.check_integrity())
            info = await loop.call(lambda engine: engine.info())
            assert (info.running_sessions, info.free_blocks) == (0, info.num_blocks - 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("models")
    target = make_folder(place / "target", 7, TARGET_WINDOW)
    # Same seed, same weights: a draft that is right as long as its window lasts.
    return target, make_folder(place / "draft", 7, DRAFT_WINDOW)


@pytest.fixture
async def running(folders: tuple[Path, Path]) -> AsyncIterator[Running]:
    tokenizer = Tokenizer(folders[0])
    common = EngineSettings(
        folders[0], num_blocks=256, dtype="float32", vocab_size=tokenizer.vocab_size, max_sessions=256
    )
    target = target_loop(build_target_engine(replace(common, shapes=RowShapes(16, 8))))
    draft = draft_loop(build_draft_engine(DraftSettings(replace(common, model_path=folders[1]), folders[0])))
    servers = []
    for loop, servicer in ((target, VerificationServicer(target)), (draft, DraftingServicer(draft))):
        loop.start()
        servers.append(await serve_engine(servicer))
    peers = PeerSet()
    clients = await TargetClient.connect(servers[0].address), await DraftClient.connect(servers[1].address)
    peers.targets.replace({"target": clients[0]})
    peers.drafts.replace({"draft": clients[1]})
    yield Running(Router(tokenizer, peers, RouterConfig(sessions=ALWAYS)), target, draft)
    await shut_down(clients, servers, (target, draft))


@pytest.mark.parametrize("length", [1, 60, 64, 65, 250, 255])
async def test_windows_of_draft_and_target_are_respected_separately(running: Running, length: int) -> None:
    """Public case A13: draft window 64, target window 256."""
    prompt = [(7 * i) % 256 for i in range(length)]
    plain, plain_end = await running.ask(prompt, OFF, ignore_eos=True)
    tokens, end = await running.ask(prompt, DRAFT, ignore_eos=True)
    assert tokens == plain
    assert len(tokens) == min(256, TARGET_WINDOW - length)
    assert end.finish_reason == plain_end.finish_reason == "length"
    assert end.speculation.switched_off_reason == ("context" if len(tokens) > 1 else "")
    await running.check_at_rest()


async def test_every_drafter_and_cap_gives_the_plain_text(running: Running) -> None:
    prompt = [5, 6, 7, 5, 6, 7, 5]
    plain, _ = await running.ask(prompt, OFF, max_tokens=40, ignore_eos=True)
    for drafter in ("draft_model", "ngram", "auto"):
        for cap in (1, 3, 7):
            control = SpeculationControl(drafter=drafter, max_draft_tokens=cap)
            assert (await running.ask(prompt, control, max_tokens=40, ignore_eos=True))[0] == plain
    await running.check_at_rest()


async def test_a_seeded_request_does_not_see_its_neighbours(running: Running) -> None:
    """Public case A5: alone, beside unseeded ones, beside other seeds."""
    sampling = SamplingParams(temperature=0.8, seed=11, top_p=0.95)
    alone, _ = await running.ask([9, 8, 7], DRAFT, max_tokens=32, ignore_eos=True, sampling=sampling)
    others = [
        running.ask([9, 8, 7], DRAFT, max_tokens=32, ignore_eos=True, sampling=SamplingParams(0.8, seed=seed))
        for seed in (None, None, 12, 13)
    ]
    (beside, _), *rest = await asyncio.gather(
        running.ask([9, 8, 7], DRAFT, max_tokens=32, ignore_eos=True, sampling=sampling), *others
    )
    assert beside == alone
    assert all(tokens != alone for tokens, _ in rest)
    await running.check_at_rest()


async def test_blocks_return_after_any_mix_of_ends(running: Running) -> None:
    """Cancelled at once, in the prompt, amid decoding; stopped by text; refused; finished."""

    async def abandoned(after: int) -> None:
        request = GenerateRequest(TokenIds(tuple(range(40))), max_tokens=100, ignore_eos=True)
        stream = running.router.generate(request)
        for _ in range(after):
            await anext(stream)
        await stream.aclose()

    async def stopped(index: int) -> None:
        await running.ask([index, 1, 2], DRAFT, max_tokens=50, stop=("e", "the", "a"), ignore_eos=True)

    work = [abandoned(i % 6) for i in range(60)] + [stopped(i) for i in range(40)]
    work += [running.ask([1, 2, 3], SpeculationControl(), max_tokens=30) for _ in range(20)]
    await asyncio.gather(*work)
    await running.check_at_rest()
