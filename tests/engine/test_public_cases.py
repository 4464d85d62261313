"""Faults that users reported elsewhere (greedy divergence, padded vocabularies), ruled out on real engines."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.drafting import DraftEngine, build_draft_engine
from engine.planner import RowShapes
from engine.proposal import Proposal, State
from engine.sampling import SamplingParams, StopParams
from engine.settings import DraftSettings, EngineSettings
from engine.target import TargetEngine, build_target_engine
from router.ngram import NgramConfig, NgramDrafter
from tests.engine.models import VOCAB, make_folder, plain_greedy

NUM_PROMPTS = 200
MAX_TOKENS = 16
SHAPES = RowShapes(prompt_rows=16, generated_rows=8)


class Drafters:
    """Proposals for many sessions from a real draft engine or the n-gram index."""

    def __init__(self, draft: DraftEngine | None) -> None:
        self._draft = draft
        self._known: dict[int, int] = {}
        self._ngrams: dict[int, NgramDrafter] = {}

    def propose(self, session: int, tokens: list[int], sampling: SamplingParams) -> Proposal:
        base, known = State.of(tokens), self._known.get(session, 0)
        self._known[session] = len(tokens)
        if self._draft is None:
            ngram = self._ngrams.setdefault(session, NgramDrafter(NgramConfig()))
            ngram.extend(tokens[known:])
            match = ngram.lookup(4)
            return Proposal.chain(base, match.tokens if match else ())
        if not known:
            self._draft.open(session, tokens, sampling)
            known = len(tokens)
        self._draft.advance(session, base, tokens[known:], 1 + session % 5)
        while self._draft.has_work():
            for _, proposal in self._draft.step():
                return proposal
        raise AssertionError("the draft owes a proposal")


def run(
    engine: TargetEngine,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    drafters: Drafters | None,
    batch: int,
) -> list[list[int]]:
    """All prompts, `batch` at a time; plainly without drafters."""
    texts: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < batch:
            session = waiting.pop(0)
            engine.open(session, prompts[session], [], sampling[session], StopParams(MAX_TOKENS))
            running.add(session)
        for session, verdict in engine.step():
            texts[session] += verdict.tokens
            tokens = prompts[session] + texts[session]
            if verdict.finish_reason is not None:
                engine.close(session)
                running.discard(session)
            elif drafters is None:
                engine.propose(session, Proposal(State.of(tokens)))
            else:
                engine.propose(session, drafters.propose(session, tokens, sampling[session]))
    engine.check_integrity()
    assert engine.info().free_blocks == engine.info().num_blocks - 1
    return texts


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [
        [rng.randrange(3, VOCAB) for _ in range(1 if i % 5 == 0 else rng.randrange(2, 40))] for i in range(NUM_PROMPTS)
    ]


@pytest.fixture(scope="module")
def settings(target_folder: Path) -> EngineSettings:
    return EngineSettings(target_folder, num_blocks=256, block_size=8, dtype="float32", shapes=SHAPES)


@pytest.fixture(scope="module")
def plain(settings: EngineSettings, prompts: list[list[int]], target_folder: Path) -> list[list[int]]:
    texts = run(build_target_engine(settings), prompts, [SamplingParams()] * NUM_PROMPTS, None, batch=1)
    for index in range(0, NUM_PROMPTS, 20):
        assert texts[index] == plain_greedy(target_folder, prompts[index], MAX_TOKENS)
    return texts


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "a perfect draft_model"])
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_is_target_only_over_two_hundred_prompts(
    settings, prompts, plain, draft_folder, target_folder, drafter, batch
):
    folder = {"ngram": None, "draft_model": draft_folder, "a perfect draft_model": target_folder}[drafter]
    draft = folder and build_draft_engine(
        DraftSettings(EngineSettings(folder, num_blocks=2048, block_size=8, dtype="float32", max_sessions=NUM_PROMPTS))
    )
    texts = run(build_target_engine(settings), prompts, [SamplingParams()] * NUM_PROMPTS, Drafters(draft), batch)
    assert texts == plain


def test_greedy_and_seeded_are_target_only_beside_sampled_neighbours(settings, prompts, plain, draft_folder):
    kinds = [SamplingParams(), SamplingParams(temperature=1.0, seed=5, top_p=0.9), SamplingParams(temperature=1.0)]
    mixed = [kinds[index % 3] for index in range(NUM_PROMPTS)]
    alone = run(build_target_engine(settings), prompts, mixed, None, batch=1)
    draft = build_draft_engine(
        DraftSettings(
            EngineSettings(draft_folder, num_blocks=2048, block_size=8, dtype="float32", max_sessions=NUM_PROMPTS)
        )
    )
    beside = run(build_target_engine(settings), prompts, mixed, Drafters(draft), batch=8)
    assert beside[0::3] == plain[0::3]
    assert beside[1::3] == alone[1::3]
    assert beside[2::3] != alone[2::3]  # these do draw from the engine's own generator


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(0.8, top_k=8), SamplingParams(1.2, top_p=0.5)],
)
def test_a_draft_equal_to_the_target_is_always_accepted(settings, target_folder, sampling):
    """Sampled, too: what a draft sends is what it drew from, and noise is shared where a seed is given."""
    engine = build_target_engine(settings)
    draft = build_draft_engine(
        DraftSettings(EngineSettings(target_folder, num_blocks=64, dtype="float32"), top_probs=VOCAB)
    )
    drafters, tokens = Drafters(draft), [5, 6, 7]
    engine.open(1, tokens, [], sampling, StopParams(120, ignore_eos=True))
    proposed = accepted = 0
    while engine.has_work():
        for session, verdict in engine.step():
            tokens = tokens + list(verdict.tokens)
            proposed, accepted = proposed + verdict.num_proposed, accepted + verdict.num_accepted
            if verdict.finish_reason is None:
                engine.propose(session, drafters.propose(session, tokens, sampling))
    assert len(tokens) == 123
    assert proposed > 60
    assert accepted >= proposed - 1  # float32 on one side and float64 on the other may part once


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_padded_ids_are_never_drawn_nor_proposed(tmp_path, temperature):
    """Embeddings of target and draft padded differently beyond the tokenizer's 48 ids."""
    target = make_folder(tmp_path / "target", seed=3, vocab=64)
    draft_folder = make_folder(tmp_path / "draft", seed=4, vocab=56)
    known = 48
    engine = build_target_engine(EngineSettings(target, num_blocks=64, dtype="float32", vocab_size=known))
    draft = build_draft_engine(
        DraftSettings(EngineSettings(draft_folder, num_blocks=64, dtype="float32", vocab_size=known))
    )
    drafters = Drafters(draft)
    sampling = SamplingParams(temperature=temperature)
    tokens = [5, 6, 7]
    engine.open(1, tokens, [], sampling, StopParams(150, ignore_eos=True))
    while engine.has_work():
        for session, verdict in engine.step():
            tokens = tokens + list(verdict.tokens)
            assert not verdict.dropped
            if verdict.finish_reason is None:
                proposal = drafters.propose(session, tokens, sampling)
                assert max(proposal.tokens) < known
                engine.propose(session, proposal)
    assert len(tokens) == 153
    assert max(tokens) < known
