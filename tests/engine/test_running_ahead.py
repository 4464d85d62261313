"""Running ahead: branches are what a fresh draft would say, and one that comes true goes on as if it had been asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.ahead import Choice, Lookahead, Outcome, how_many, outcomes
from engine.drafting import DraftEngine
from engine.proposal import EarlyProposals, Proposal, RunAhead, State
from engine.sampling import SamplingParams
from tests.engine.models import VOCAB, plain_greedy
from tests.engine.test_drafting import make_engine

PROMPT, GREEDY = [5, 6, 7], SamplingParams()
FAR = RunAhead(num_speculative_tokens=3, budget_s=60.0, round_s=120.0, acceptance=0.7)


def run(engine: DraftEngine, session: int = 1) -> list[Proposal | EarlyProposals]:
    """What the session says until it has nothing more to do."""
    said = []
    for _ in range(100):
        if not engine.has_work():
            return said
        said += [output for key, output in engine.step() if key == session]
        engine.check_integrity()
    raise AssertionError("still at work after 100 steps")


def check_branches(folder: Path, tokens: list[int], trunk: list[int], early: EarlyProposals) -> None:
    assert early.after == State.of(tokens)
    assert early.trunk == State.of(tokens + trunk)
    outcomes = [(branch.num_accepted, branch.token) for branch in early.branches]
    assert len(set(outcomes)) == len(outcomes)
    for branch in early.branches:
        assert branch.num_accepted == len(trunk) or branch.token != trunk[branch.num_accepted]
        prefix = [*tokens, *trunk[: branch.num_accepted], branch.token]
        assert list(branch.tokens) == plain_greedy(folder, prefix, len(branch.tokens), eos=None)


def test_every_branch_is_what_a_fresh_draft_would_say(draft_folder: Path) -> None:
    engine = make_engine(draft_folder)
    engine.open(1, [5, 6, 7], SamplingParams())
    engine.advance(1, State.of([5, 6, 7]), [], 4, run_ahead=FAR)
    proposal, early = run(engine)
    assert isinstance(proposal, Proposal)
    assert isinstance(early, EarlyProposals)
    check_branches(draft_folder, [5, 6, 7], list(proposal.tokens), early)
    assert {branch.num_accepted for branch in early.branches} == set(range(5))
    assert {len(branch.tokens) for branch in early.branches} == {3}


def test_what_comes_true_goes_on_round_after_round(draft_folder: Path) -> None:
    """Hits at random branches, misses in between: proposals and branches equal a fresh draft's every time."""
    rng = random.Random(3)
    engine = make_engine(draft_folder, num_blocks=96)
    tokens = [5, 6, 7]
    engine.open(1, tokens, SamplingParams())
    tail: list[int] = []
    trunk: list[int] = []
    num_hits = 0
    for turn in range(24):
        wanted = 0 if trunk else 4
        engine.advance(1, State.of(tokens), tail, wanted, run_ahead=replace(FAR, num_proposed=len(trunk)))
        said = run(engine)
        if wanted:
            proposal = said.pop(0)
            assert isinstance(proposal, Proposal)
            trunk = list(proposal.tokens)
            assert trunk == plain_greedy(draft_folder, tokens, 4, eos=None)
        (early,) = said
        assert isinstance(early, EarlyProposals)
        check_branches(draft_folder, tokens, trunk, early)
        if turn % 5 == 4:  # an outcome that no branch is for, so the draft has to be asked
            tail = [*trunk[:2], next(t for t in range(3, VOCAB) if t != trunk[2] and early.find(2, t) is None)]
            trunk = []
        else:
            branch = rng.choice(early.branches)
            tail = [*trunk[: branch.num_accepted], branch.token]
            trunk = list(branch.tokens)
            num_hits += 1
        tokens = tokens + tail
    assert num_hits > 15


def opened_with_early(
    engine: DraftEngine, plan: RunAhead, session: int = 1, sampling: SamplingParams = GREEDY
) -> tuple[list[int], EarlyProposals]:
    """A session on its first proposal, and that with its early proposals, when there is nothing more to do."""
    engine.open(session, PROMPT, sampling)
    engine.advance(session, State.of(PROMPT), [], 4, run_ahead=plan)
    proposal, early = run(engine, session)
    assert isinstance(proposal, Proposal)
    assert isinstance(early, EarlyProposals)
    return list(proposal.tokens), early


@pytest.mark.parametrize("which", [0, -1])
def test_what_was_drafted_behind_what_was_sent_is_there_when_the_next_round_begins(
    draft_folder: Path, which: int
) -> None:
    engine = make_engine(draft_folder)
    trunk, early = opened_with_early(engine, FAR)
    branch = early.branches[which]
    tail = [*trunk[: branch.num_accepted], branch.token]
    tokens, no_time = [5, 6, 7, *tail], replace(FAR, budget_s=0.0, round_s=0.0, num_proposed=3)
    engine.advance(1, State.of(tokens), tail, 0, run_ahead=no_time)
    before = engine.info().forwards
    (early,) = run(engine)
    assert isinstance(early, EarlyProposals)
    assert engine.info().forwards <= before + 1
    check_branches(draft_folder, tokens, list(branch.tokens), early)
    assert early.branches[0].num_accepted == 3
    assert len(early.branches[0].tokens) >= 2


def test_it_does_not_go_on_where_word_of_the_round_may_come_any_moment(draft_folder: Path) -> None:
    forwards = []
    for plan in (FAR, replace(FAR, round_s=0.0)):
        engine = make_engine(draft_folder)
        _, early = opened_with_early(engine, plan)
        assert {len(branch.tokens) for branch in early.branches} == {3}
        forwards.append(engine.info().forwards)
    assert forwards[0] == forwards[1] + 3


def test_a_branch_that_never_reached_the_target_is_not_taken_for_what_is_verified(draft_folder: Path) -> None:
    engine = make_engine(draft_folder)
    trunk, early = opened_with_early(engine, FAR)
    branch = early.branches[1]
    tail = [*trunk[: branch.num_accepted], branch.token]
    engine.advance(1, State.of([5, 6, 7, *tail]), tail, 0, run_ahead=FAR)  # a plain round is under way
    (early,) = run(engine)
    assert isinstance(early, EarlyProposals)
    check_branches(draft_folder, [5, 6, 7, *tail], [], early)
    assert early.branches[0].token == branch.tokens[0]


def test_a_branch_that_was_not_sent_in_time_is_the_answer_when_it_is_asked_for(draft_folder: Path) -> None:
    engine = make_engine(draft_folder)
    engine.open(1, [5, 6], SamplingParams())
    engine.advance(1, State.of([5, 6]), [], 3, run_ahead=FAR)
    said: list[Proposal | EarlyProposals] = []
    while not said:
        said += [output for _, output in engine.step()]
    engine.step()  # all branches but those behind the whole trunk have one token now
    (trunk,) = said
    assert isinstance(trunk, Proposal)
    lookahead = engine._sessions[1].lookahead
    assert lookahead is not None
    branch = next(each for each in lookahead._branches if each.drafted)
    tail = [*trunk.tokens[: branch.num_accepted], branch.token]
    before = engine.info().forwards
    engine.advance(1, State.of([5, 6, *tail]), tail, 2)
    (proposal,) = run(engine)
    assert isinstance(proposal, Proposal)
    assert list(proposal.tokens) == plain_greedy(draft_folder, [5, 6, *tail], 2, eos=None)
    assert engine.info().forwards == before + 1  # the first of the two was there
    engine.advance(1, State.of([5, 6, *tail]), tail, 1)  # asked again, it answers again
    (again,) = run(engine)
    assert isinstance(again, Proposal)
    assert again.tokens == proposal.tokens[:1]


def test_neighbours_share_forwards_and_what_is_owed_comes_first(draft_folder: Path) -> None:
    engine = make_engine(draft_folder, num_blocks=128)
    for key in (1, 2):
        engine.open(key, [key + 3, 9], SamplingParams())
        engine.advance(key, State.of([key + 3, 9]), [], 3, run_ahead=FAR)
    first = [output for _ in range(3) for output in engine.step()]
    assert {key for key, _ in first} == {1, 2}
    engine.open(3, [8, 8], SamplingParams())
    engine.advance(3, State.of([8, 8]), [], 2)
    before = engine.info().forwards
    outputs: list[int] = []
    while 3 not in outputs:
        outputs += [key for key, _ in engine.step()]
    assert engine.info().forwards == before + 2  # not one more than it takes alone
    while engine.has_work():
        engine.step()
    engine.check_integrity()


def test_when_blocks_are_short_nothing_is_drafted_ahead_and_nobody_waits(draft_folder: Path) -> None:
    engine = make_engine(draft_folder, num_blocks=9)
    engine.open(1, [5] * 20, SamplingParams())
    engine.advance(1, State.of([5] * 20), [], 3, run_ahead=FAR)
    engine.step()
    engine.step()
    engine.open(2, [6] * 30, SamplingParams())
    engine.advance(2, State.of([6] * 30), [], 3, run_ahead=FAR)
    said = run(engine, 2)
    assert isinstance(said[0], Proposal)
    assert list(said[0].tokens) == plain_greedy(draft_folder, [6] * 30, 3, eos=None)
    for key in (1, 2):
        engine.close(key)
    engine.check_integrity()
    assert engine.info().free_blocks == engine.info().num_blocks - 1


def test_out_of_time_it_sends_what_there_is(draft_folder: Path) -> None:
    engine = make_engine(draft_folder)
    engine.open(1, [5, 6], SamplingParams())
    hurried = RunAhead(num_speculative_tokens=8, budget_s=0.0, acceptance=0.7)
    engine.advance(1, State.of([5, 6]), [], 3, run_ahead=hurried)
    said = run(engine)
    assert isinstance(said[0], Proposal)
    assert len(said) <= 2
    for early in said[1:]:
        assert isinstance(early, EarlyProposals)
        assert all(len(branch.tokens) == 1 for branch in early.branches)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.9), SamplingParams(temperature=0.9, seed=4)])
def test_sampled_branches_carry_what_they_were_drawn_from(draft_folder: Path, sampling: SamplingParams) -> None:
    engine = make_engine(draft_folder)
    engine.open(1, [5, 6], sampling)
    engine.advance(1, State.of([5, 6]), [], 3, run_ahead=FAR)
    _, early = run(engine)
    assert isinstance(early, EarlyProposals)
    for branch in early.branches:
        proposal = early.proposal(branch, State.of([5]))
        assert proposal.flaw(VOCAB, 8) is None
        assert (proposal.draft_probs is None) == (sampling.seed is not None)


def test_a_seeded_branch_is_what_the_same_seed_says_when_it_is_asked(draft_folder: Path) -> None:
    sampling = SamplingParams(temperature=0.9, seed=4)
    engine = make_engine(draft_folder)
    engine.open(1, [5, 6], sampling)
    engine.advance(1, State.of([5, 6]), [], 3, run_ahead=FAR)
    trunk, early = run(engine)
    assert isinstance(trunk, Proposal)
    assert isinstance(early, EarlyProposals)
    for number, branch in enumerate(early.branches, start=2):
        prefix = [5, 6, *trunk.tokens[: branch.num_accepted], branch.token]
        engine.open(number, prefix, sampling)
        engine.advance(number, State.of(prefix), [], 3)
        (asked,) = run(engine, number)
        assert isinstance(asked, Proposal)
        assert asked.tokens == branch.tokens


@pytest.mark.parametrize("seeds", [[None] * 8, range(8)], ids=["drawn", "seeded"])
def test_where_all_that_is_wanted_is_there_no_forward_is_made_for_it(
    draft_folder: Path, seeds: Sequence[int | None]
) -> None:
    """A forward of no rows brought down the draft, for all of its sessions."""
    engine = make_engine(draft_folder)
    short = replace(FAR, num_speculative_tokens=1, budget_s=0.0, round_s=0.0, num_proposed=3)
    num_ready = 0
    for session, seed in enumerate(seeds, start=1):
        trunk, early = opened_with_early(engine, FAR, session, SamplingParams(temperature=0.3, seed=seed))
        branch = early.branches[0]
        tail = [*trunk[: branch.num_accepted], branch.token]
        engine.advance(session, State.of([*PROMPT, *tail]), tail, 0, run_ahead=short)
        forwards = engine.info().forwards
        (early,) = run(engine, session)
        assert isinstance(early, EarlyProposals)
        assert {len(branch.tokens) for branch in early.branches} == {1}
        num_ready += engine.info().forwards == forwards
        engine.close(session)
    assert num_ready > 0


def choice(token: int, *candidates: tuple[int, float]) -> Choice:
    return Choice(token, dict(candidates)[token], candidates)


def test_outcomes_are_ranked_by_the_chance_of_their_whole_path() -> None:
    trunk = [choice(1, (1, 0.8), (2, 0.15)), choice(3, (3, 0.5), (4, 0.3), (5, 0.1))]
    found = outcomes(trunk, acceptance=None)
    assert [(o.num_accepted, o.token) for o in found[:4]] == [(1, 4), (2, None), (0, 2), (2, None)]
    assert found[0].weight == pytest.approx(0.8 * 0.3)
    assert sum(o.weight for o in found) < 1.0


def test_where_the_choice_depends_on_the_proposal_acceptance_is_what_was_measured() -> None:
    (first, *_) = outcomes([choice(1, (1, 0.1), (2, 0.6), (3, 0.2))], acceptance=0.75)
    assert (first.num_accepted, first.token) == (1, None)
    assert first.weight == pytest.approx(0.75 * 0.6)


def test_wide_where_rows_are_free_and_narrow_where_they_cost_depth() -> None:
    found = [Outcome(weight, 0, token) for token, weight in enumerate([0.4, 0.2, 0.1, 0.1, 0.05, 0.02])]
    plan = RunAhead(num_speculative_tokens=6, budget_s=1.0, acceptance=0.8)
    assert how_many(found, plan, lambda _: 1e9) == 6
    assert how_many(found, plan, lambda forwards: 12 / forwards) < 6
    assert how_many(found, plan, lambda _: 0.0) == 1


def test_a_lookahead_that_is_refused_a_forward_asks_for_the_same_again() -> None:
    lookahead = Lookahead(
        State.of([1]), [choice(1, (1, 0.9), (2, 0.1))], 0, [Outcome(0.1, 0, 2)], RunAhead(2, 0.5), 0.0
    )
    assert lookahead.tree() == lookahead.tree()
    assert lookahead.tree().tokens == (1, 2)
    assert lookahead.send("draft_model") is None
