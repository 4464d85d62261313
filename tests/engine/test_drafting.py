"""The draft engine: what it proposes, and that rollback leaves it as if the rejected tokens had never been."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.drafting import DraftEngine, build_draft_engine
from engine.errors import EngineFault, InvalidArgument, UnknownSession
from engine.proposal import Proposal, State
from engine.sampling import SamplingParams
from engine.settings import DraftSettings, EngineSettings
from tests.engine.models import VOCAB, plain_greedy


def make_engine(folder: Path, **changes: object) -> DraftEngine:
    settings: dict[str, object] = {"num_blocks": 64, "block_size": 8, "dtype": "float32"} | changes
    return build_draft_engine(DraftSettings(EngineSettings(folder, **settings), top_probs=16))  # type: ignore[arg-type]


def run(engine: DraftEngine, session: int) -> Proposal:
    for _ in range(50):
        outputs = dict(engine.step())
        engine.check_integrity()
        if session in outputs:
            return outputs[session]
    raise AssertionError("no proposal in 50 steps")


def test_it_proposes_its_own_greedy_continuation(draft_folder):
    engine = make_engine(draft_folder)
    engine.open(1, [5, 6], SamplingParams())
    engine.advance(1, State.of([5, 6]), [], 5)
    proposal = run(engine, 1)
    assert list(proposal.tokens) == plain_greedy(draft_folder, [5, 6], 5, eos=None)
    assert proposal.draft_probs is None
    assert proposal.is_chain
    assert not engine.has_work()


def test_after_any_rollback_it_proposes_as_if_new(draft_folder):
    """Commit 0 to K of its own tokens and then another one, many times; each proposal equals a fresh draft's."""
    rng = random.Random(5)
    engine = make_engine(draft_folder)
    tokens = [5, 6]
    engine.open(1, tokens, SamplingParams())
    tail: list[int] = []
    for _ in range(25):
        engine.advance(1, State.of(tokens), tail, 4)
        proposal = run(engine, 1)
        assert list(proposal.tokens) == plain_greedy(draft_folder, tokens, 4, eos=None)
        tail = [*proposal.tokens[: rng.randrange(5)], rng.randrange(3, VOCAB)]
        tokens = tokens + tail


def test_sessions_at_different_depths_share_forwards(draft_folder):
    engine = make_engine(draft_folder)
    prompts = {1: [5, 6], 2: list(range(3, 30)), 3: [9]}
    for key, prompt in prompts.items():
        engine.open(key, prompt, SamplingParams())
        engine.advance(key, State.of(prompt), [], 2 + key)
    before = engine.info().forwards
    proposals: dict[int, Proposal] = {}
    while engine.has_work():
        proposals |= dict(engine.step())
    assert engine.info().forwards - before == 5  # as many as the longest chain
    for key, prompt in prompts.items():
        assert list(proposals[key].tokens) == plain_greedy(draft_folder, prompt, 2 + key, eos=None)


def test_sampled_proposals_carry_the_distribution_they_were_drawn_from(draft_folder):
    engine = make_engine(draft_folder)
    engine.open(1, [5, 6], SamplingParams(temperature=1.0, top_k=8))
    engine.advance(1, State.of([5, 6]), [], 4)
    proposal = run(engine, 1)
    assert proposal.flaw(VOCAB, 8) is None
    assert proposal.draft_probs is not None
    assert all(len(sparse.ids) <= 8 for sparse in proposal.draft_probs)


def test_an_unsure_draft_stops_early(draft_folder):
    engine = make_engine(draft_folder)
    engine.open(1, [5, 6], SamplingParams())
    engine.advance(1, State.of([5, 6]), [], 8, confidence_threshold=1.0)
    assert len(run(engine, 1).tokens) == 1


def test_a_tail_that_does_not_fit_is_refused(draft_folder):
    engine = make_engine(draft_folder)
    engine.open(1, [5, 6], SamplingParams())
    with pytest.raises(InvalidArgument, match="tail"):
        engine.advance(1, State.of([5, 6, 7, 8]), [8], 4)
    with pytest.raises(InvalidArgument, match="hash"):
        engine.advance(1, State(3, 12345), [7], 4)
    with pytest.raises(UnknownSession):
        engine.advance(2, State.of([5]), [5], 4)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8), SamplingParams(0.8, seed=3)])
def test_nan_ends_its_own_session_and_no_other(draft_folder, sampling):
    engine = make_engine(draft_folder)
    for session, prompt in ((1, [5, 6]), (2, [7, 8])):
        engine.open(session, prompt, sampling)
        engine.advance(session, State.of(prompt), [], 3)
    executor = engine._runner.device
    sound = executor.forward

    def forward(step):  # the rows of session 1 come first
        logits = sound(step).clone()
        logits[0] = torch.nan
        executor.forward = sound
        return logits

    executor.forward = forward
    ((session, fault),) = engine.step()
    assert (session, type(fault)) == (1, EngineFault)
    assert len(run(engine, 2).tokens) == 3
    assert engine.info().running_sessions == 1


def test_closing_frees_all_blocks(draft_folder):
    engine = make_engine(draft_folder)
    start = engine.info().free_blocks
    for key in range(8):
        engine.open(key, [key + 3] * 20, SamplingParams())
        engine.advance(key, State.of([key + 3] * 20), [], 4)
    for _ in range(2):
        engine.step()
    for key in range(8):
        engine.close(key)
    engine.check_integrity()
    assert engine.info().free_blocks == start
