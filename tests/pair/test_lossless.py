"""Case A1 on the default pair in bf16 reproducible mode: not one token differs, whoever drafts, whoever is beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.drafting import build_draft_engine
from engine.planner import RowShapes
from engine.proposal import Proposal, State
from engine.sampling import SamplingParams, StopParams
from engine.settings import DraftSettings, EngineSettings
from engine.target import TargetEngine, build_target_engine
from router.ngram import NgramConfig, NgramDrafter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 96
Texts = dict[int, list[int]]
Drafter = Callable[[int, list[int]], list[int]]  # session, all its tokens → draft tokens


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetEngine:
    return build_target_engine(EngineSettings(target_folder, num_blocks=2048, shapes=RowShapes()))


@pytest.fixture(scope="module")
def plain(target: TargetEngine, prompts: list[list[int]]) -> Texts:
    """Plain decoding, all prompts at once."""
    texts: Texts = {}
    for session, prompt in enumerate(prompts):
        target.open(session, prompt, [], SamplingParams(), StopParams(MAX_TOKENS))
        target.decode(session, MAX_TOKENS)
        texts[session] = []
    while target.has_work():
        for session, verdict in target.step():
            texts[session] += verdict.tokens
    for session in texts:
        target.close(session)
    return texts


def speculate(target: TargetEngine, prompts: list[list[int]], sessions: list[int], draft: Drafter) -> Texts:
    """The same with proposals, all `sessions` at once."""
    texts: Texts = {session: [] for session in sessions}
    for session in sessions:
        target.open(session, prompts[session], [], SamplingParams(), StopParams(MAX_TOKENS))
    while target.has_work():
        for session, verdict in target.step():
            texts[session] += verdict.tokens
            if verdict.finish_reason is None:
                tokens = prompts[session] + texts[session]
                target.propose(session, Proposal.chain(State.of(tokens), draft(session, tokens)))
        target.check_integrity()
    for session in sessions:
        target.close(session)
    return texts


def ngram_drafter() -> Drafter:
    drafters: dict[int, NgramDrafter] = {}
    seen: dict[int, int] = {}

    def draft(session: int, tokens: list[int]) -> list[int]:
        drafter = drafters.setdefault(session, NgramDrafter(NgramConfig()))
        drafter.extend(tokens[seen.get(session, 0) :])
        seen[session] = len(tokens)
        match = drafter.lookup(7)
        return list(match.tokens) if match else []

    return draft


def test_ngram_proposals_change_no_token(target: TargetEngine, prompts: list[list[int]], plain: Texts) -> None:
    before = target.info().forwards
    assert speculate(target, prompts, list(plain), ngram_drafter()) == plain
    assert target.info().forwards > before


def test_neither_does_being_alone(target: TargetEngine, prompts: list[list[int]], plain: Texts) -> None:
    for session in list(plain)[::8]:
        assert speculate(target, prompts, [session], ngram_drafter())[session] == plain[session]


def test_nor_does_the_draft_model(
    target: TargetEngine, target_folder: Path, draft_folder: Path, prompts: list[list[int]], plain: Texts
) -> None:
    engine = build_draft_engine(DraftSettings(EngineSettings(draft_folder, num_blocks=2048), target_folder))
    told: dict[int, int] = {}

    def draft(session: int, tokens: list[int]) -> list[int]:
        if session not in told:
            engine.open(session, prompts[session], SamplingParams())
            told[session] = len(prompts[session])
        engine.advance(session, State.of(tokens), tokens[told[session] :], 4)
        told[session] = len(tokens)
        while engine.has_work():
            for _, proposal in engine.step():
                return list(proposal.tokens)
        raise AssertionError("the draft owes a proposal")

    assert speculate(target, prompts, list(plain), draft) == plain
    for session in told:
        engine.close(session)
    engine.check_integrity()
    assert engine.info().free_blocks == engine.info().num_blocks - 1
