"""The target engine against plain decoding by transformers: same tokens whatever is proposed, no block lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.errors import EngineFault, InvalidArgument, Overloaded, UnknownSession
from engine.loading import load_model
from engine.planner import RowShapes
from engine.proposal import Branch, EarlyProposals, Proposal, State
from engine.runner import Executor, Runner
from engine.sampling import SamplingParams, StopParams
from engine.settings import EngineSettings
from engine.target import TargetEngine, build_target_engine
from tests.engine.driving import generate, next_verdict
from tests.engine.models import EOS, VOCAB, plain_greedy

PROMPTS = [[5], [1, 9, 4], list(range(3, 40)), [7, 8] * 20]


def make_engine(folder: Path, **changes: object) -> TargetEngine:
    settings: dict[str, object] = {"num_blocks": 64, "block_size": 8, "dtype": "float32"} | changes
    return build_target_engine(EngineSettings(folder, **settings))  # type: ignore[arg-type]


def oracle(truth: list[int], k: int, wrong_every: int, seed: int = 0):
    """Proposes the truth, with every `wrong_every`-th token wrong (0: none)."""
    rng = random.Random(seed)

    def propose(tokens: list[int]) -> list[int]:
        chain = truth[len(tokens) : len(tokens) + k]
        return [(t + 1) % VOCAB if wrong_every and rng.randrange(wrong_every) == 0 else t for t in chain]

    return propose


@pytest.mark.parametrize("shapes", [None, RowShapes(prompt_rows=16, generated_rows=6)])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize(("k", "wrong_every"), [(0, 0), (1, 2), (5, 0), (5, 3), (3, 1)])
def test_greedy_equals_plain_decoding(target_folder, shapes, prompt, k, wrong_every):
    truth = plain_greedy(target_folder, prompt, 40)
    engine = make_engine(target_folder, shapes=shapes)
    tokens, reason = generate(engine, prompt, oracle(truth, k, wrong_every))
    assert tokens == truth
    assert reason == ("stop" if truth[-1] == EOS else "length")


def test_full_acceptance_takes_one_round_per_k_plus_one_tokens(target_folder):
    truth = plain_greedy(target_folder, [5, 6], 31, eos=None)
    engine = make_engine(target_folder)
    engine.open(1, [5, 6], [], SamplingParams(), StopParams(max_tokens=31, ignore_eos=True))
    tokens = list(next_verdict(engine, 1).tokens)
    rounds = 0
    while len(tokens) < 31:
        engine.propose(1, Proposal.chain(State.of([5, 6, *tokens]), truth[len(tokens) : len(tokens) + 4]))
        verdict = next_verdict(engine, 1)
        assert verdict.num_accepted == min(4, 31 - len(tokens) - 1)
        tokens += verdict.tokens
        rounds += 1
    assert (tokens, rounds) == (truth, 6)


def test_sessions_in_one_batch_do_not_disturb_each_other(target_folder):
    engine = make_engine(target_folder, num_blocks=128)
    truths = {i: plain_greedy(target_folder, prompt, 24, eos=None) for i, prompt in enumerate(PROMPTS)}
    texts: dict[int, list[int]] = {i: [] for i in truths}
    for i, prompt in enumerate(PROMPTS):
        engine.open(i, prompt, [], SamplingParams(), StopParams(max_tokens=24, ignore_eos=True))
    for _ in range(200):
        for i, outcome in engine.step():
            texts[i] += outcome.tokens
            if outcome.finish_reason is None:
                k = (i + len(texts[i])) % 4
                chain = oracle(truths[i], k, 3, seed=i)(texts[i])
                engine.propose(i, Proposal.chain(State.of(PROMPTS[i] + texts[i]), chain))
        engine.check_integrity()
    assert texts == truths


def test_a_tree_accepts_the_branch_the_target_would_have_taken(target_folder):
    prompt = [1, 9, 4]
    truth = plain_greedy(target_folder, prompt, 8, eos=None)
    engine = make_engine(target_folder)
    engine.open(1, prompt, [], SamplingParams(), StopParams(max_tokens=8, ignore_eos=True))
    tokens = list(next_verdict(engine, 1).tokens)
    wrong = (truth[1] + 1) % VOCAB
    # The wrong child comes first; the right path is nodes 1, 3, 4 and so lies out of its natural slots.
    tree = Proposal(State.of(prompt + tokens), (wrong, truth[1], truth[2], truth[2], truth[3]), (-1, -1, 0, 1, 3))
    engine.propose(1, tree)
    verdict = next_verdict(engine, 1)
    assert verdict.num_accepted == 3
    tokens += verdict.tokens
    while len(tokens) < 8:  # the KV that was left out of place must not be used
        engine.propose(1, Proposal(State.of(prompt + tokens)))
        tokens += next_verdict(engine, 1).tokens
    assert tokens == truth


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_agrees_with_gather_on_chains_and_trees(target_folder):
    """Eager on CPU, compiled on CUDA; the same tokens and verdicts as the oracle backend."""
    prompt = list(range(3, 23))
    truth = plain_greedy(target_folder, prompt, 9, eos=None)
    engine = make_engine(target_folder, attention="flex")
    engine.open(7, [9, 9, 9], [], SamplingParams(), StopParams(max_tokens=40, ignore_eos=True))
    engine.decode(7, 40)
    engine.open(1, prompt, [], SamplingParams(), StopParams(max_tokens=9, ignore_eos=True))
    tokens = list(next_verdict(engine, 1).tokens)
    wrong = (truth[1] + 1) % VOCAB
    engine.propose(1, Proposal(State.of(prompt + tokens), (wrong, truth[1], truth[2]), (-1, -1, 1)))
    verdict = next_verdict(engine, 1)
    assert verdict.num_accepted == 2
    tokens += verdict.tokens
    engine.propose(1, Proposal.chain(State.of(prompt + tokens), truth[len(tokens) : len(tokens) + 3]))
    verdict = next_verdict(engine, 1)
    assert verdict.num_accepted == 3
    assert tokens + list(verdict.tokens) == truth[: len(tokens) + 4]


def test_decode_runs_on_without_proposals_and_can_be_interrupted(target_folder):
    truth = plain_greedy(target_folder, [5, 6], 12, eos=None)
    engine = make_engine(target_folder)
    engine.open(1, [5, 6], [], SamplingParams(), StopParams(max_tokens=12, ignore_eos=True))
    tokens = list(next_verdict(engine, 1).tokens)
    assert not engine.has_work()
    engine.decode(1, 5)
    for _ in range(3):
        tokens += next_verdict(engine, 1).tokens
    engine.decode(1, 0)
    assert not engine.has_work()
    engine.decode(1, 100)
    while engine.has_work():
        tokens += next_verdict(engine, 1).tokens
    assert tokens == truth


def test_a_resumed_session_continues_the_same_text(target_folder):
    truth = plain_greedy(target_folder, [5, 6], 20, eos=None)
    engine = make_engine(target_folder, shapes=RowShapes(prompt_rows=8, generated_rows=4))
    engine.open(1, [5, 6], truth[:11], SamplingParams(), StopParams(max_tokens=20, ignore_eos=True))
    engine.decode(1, 100)
    tokens = list(truth[:11])
    while engine.has_work():
        tokens += next_verdict(engine, 1).tokens
    assert tokens == truth


def early_for(tokens, trunk, *branches):
    """Early proposals behind `trunk`, which continues `tokens`; a branch is (num_accepted, token, draft tokens)."""
    made = tuple(Branch(accepted, token, tuple(drafted)) for accepted, token, drafted in branches)
    return EarlyProposals(State.of(tokens), State.of([*tokens, *trunk]), made, "draft_model")


def test_an_early_proposal_is_judged_in_the_very_next_step(target_folder):
    prompt = [1, 9, 4]
    truth = plain_greedy(target_folder, prompt, 12, eos=None)
    engine = make_engine(target_folder)
    engine.open(1, prompt, [], SamplingParams(), StopParams(max_tokens=12, ignore_eos=True))
    wrong = (truth[0] + 1) % VOCAB
    engine.propose_early(1, early_for(prompt, [], (0, wrong, [3]), (0, truth[0], truth[1:3])))
    assert next_verdict(engine, 1).tokens == tuple(truth[:1])
    engine.propose_early(  # while that one is next: two of its tokens are right, then comes the bonus
        1, early_for([*prompt, *truth[:1]], truth[1:3], (1, truth[3], [5]), (2, truth[3], [truth[4], wrong]))
    )
    assert next_verdict(engine, 1).tokens == tuple(truth[1:4])
    verdict = next_verdict(engine, 1)
    assert (verdict.num_proposed, verdict.num_accepted) == (2, 1 + (wrong == truth[5]))
    assert not engine.has_work()
    assert engine.stale_proposals == 0


def test_an_early_proposal_that_comes_after_its_round_is_judged_at_once(target_folder):
    prompt = [1, 9, 4]
    truth = plain_greedy(target_folder, prompt, 8, eos=None)
    engine = make_engine(target_folder)
    engine.open(1, prompt, [], SamplingParams(), StopParams(max_tokens=8, ignore_eos=True))
    next_verdict(engine, 1)
    assert not engine.has_work()
    engine.propose_early(1, early_for(prompt, [], (0, truth[0], truth[1:3])))
    assert next_verdict(engine, 1).tokens == tuple(truth[1:4])
    engine.propose_early(1, early_for(prompt, [], (0, truth[0], truth[1:3])))
    assert engine.stale_proposals == 1
    assert not engine.has_work()


def test_early_proposals_behind_another_trunk_cost_a_plain_round_that_says_so(target_folder):
    prompt = [1, 9, 4]
    truth = plain_greedy(target_folder, prompt, 8, eos=None)
    engine = make_engine(target_folder)
    engine.open(1, prompt, [], SamplingParams(), StopParams(max_tokens=8, ignore_eos=True))
    next_verdict(engine, 1)
    base = [*prompt, truth[0]]
    engine.propose(1, Proposal.chain(State.of(base), [truth[1]]))
    engine.propose_early(1, early_for(base, [truth[1], 3], (1, truth[2], truth[3:5])))
    assert next_verdict(engine, 1).tokens == tuple(truth[1:3])
    verdict = next_verdict(engine, 1)
    assert verdict.dropped
    assert verdict.tokens == (truth[3],)
    assert not engine.has_work()


def test_a_new_proposal_or_plain_decoding_takes_the_place_of_early_ones(target_folder):
    prompt = [1, 9, 4]
    truth = plain_greedy(target_folder, prompt, 8, eos=None)
    engine = make_engine(target_folder)
    engine.open(1, prompt, [], SamplingParams(), StopParams(max_tokens=8, ignore_eos=True))
    engine.propose_early(1, early_for(prompt, [], (0, truth[0], truth[1:3])))
    engine.decode(1, 1)
    next_verdict(engine, 1)
    next_verdict(engine, 1)
    assert not engine.has_work()


def test_a_stretch_that_is_prolonged_goes_on_and_one_that_is_interrupted_ends(target_folder):
    engine = make_engine(target_folder)
    engine.open(1, [1, 9, 4], [], SamplingParams(), StopParams(max_tokens=20, ignore_eos=True))
    next_verdict(engine, 1)
    engine.decode(1, 2)
    next_verdict(engine, 1)
    engine.decode(1, 2)
    for _ in range(3):
        next_verdict(engine, 1)
    assert not engine.has_work()
    engine.decode(1, 2)
    engine.decode(1, 0)
    assert not engine.has_work()


def test_stale_proposals_are_dropped_and_counted(target_folder):
    engine = make_engine(target_folder)
    engine.open(1, [1, 9, 4], [], SamplingParams(), StopParams(max_tokens=12, ignore_eos=True))
    next_verdict(engine, 1)
    engine.propose(1, Proposal.chain(State.of([1, 9, 4]), [3]))
    engine.propose(1, Proposal.chain(State.of([1, 9, 4, 60, 60]), [3]))
    assert engine.stale_proposals == 2
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [((VOCAB,), (-1,)), ((3, 4), (-1, 1)), ((3,), ()), (tuple([3] * 300), tuple(range(-1, 299)))],
)
def test_a_malformed_proposal_costs_nothing_but_itself(target_folder, tokens, parents):
    truth = plain_greedy(target_folder, [5, 6], 2, eos=None)
    engine = make_engine(target_folder)
    engine.open(1, [5, 6], [], SamplingParams(), StopParams(max_tokens=9, ignore_eos=True))
    first = next_verdict(engine, 1)
    engine.propose(1, Proposal(State.of([5, 6, *first.tokens]), tokens, parents))
    verdict = next_verdict(engine, 1)
    assert verdict.tokens == (truth[1],)
    assert verdict.dropped
    assert verdict.num_proposed == 0


def test_prefix_cache_gives_the_same_text_and_says_what_it_held(target_folder):
    prompt = list(range(3, 40))
    truth = plain_greedy(target_folder, prompt, 10, eos=None)
    engine = make_engine(target_folder)
    generate(engine, prompt, lambda _: [], max_tokens=10, ignore_eos=True)
    engine.open(2, prompt, [], SamplingParams(), StopParams(max_tokens=10, ignore_eos=True))
    next_verdict(engine, 2)
    assert engine.cached_tokens(2) == 32  # 4 full blocks of 8 before the last token
    engine.close(2)
    assert generate(engine, prompt, lambda _: [], max_tokens=10, ignore_eos=True)[0] == truth


def test_preemption_recomputes_and_changes_no_token(target_folder):
    """Blocks for about one and a half sessions; both must finish with the text they have alone."""
    engine = make_engine(target_folder, num_blocks=9, block_size=8)
    prompts = {1: list(range(3, 23)), 2: list(range(30, 52))}
    truths = {i: plain_greedy(target_folder, p, 30, eos=None) for i, p in prompts.items()}
    texts: dict[int, list[int]] = {1: [], 2: []}
    for i, prompt in prompts.items():
        engine.open(i, prompt, [], SamplingParams(), StopParams(max_tokens=30, ignore_eos=True))
        engine.decode(i, 100)
    for _ in range(300):
        for i, outcome in engine.step():
            texts[i] += outcome.tokens
        engine.check_integrity()
    assert texts == truths


def test_sessions_that_want_nothing_for_long_give_up_their_blocks(target_folder):
    """A slow reader's session must not keep others out; a moment between two rounds costs it nothing."""
    now = 0.0
    settings = EngineSettings(target_folder, num_blocks=9, block_size=8, dtype="float32")
    engine = TargetEngine(Runner(settings, Executor(settings, load_model(settings)), clock=lambda: now))
    for small in (1, 2, 3):
        engine.open(small, [small + 2] * 12, [], SamplingParams(), StopParams(max_tokens=2))
        next_verdict(engine, small)
    prompt = list(range(3, 53))  # 7 blocks; the three others hold 6 of 8
    engine.open(5, prompt, [], SamplingParams(), StopParams(max_tokens=1, ignore_eos=True))
    assert engine.has_work()
    assert engine.step() == []
    now = 2.0
    ((session, verdict),) = engine.step()
    assert (session, list(verdict.tokens)) == (5, plain_greedy(target_folder, prompt, 1, eos=None))
    engine.check_integrity()
    engine.decode(1, 1)
    assert next_verdict(engine, 1).tokens == tuple(plain_greedy(target_folder, [3] * 12, 2, eos=None)[1:])


@pytest.mark.parametrize("shapes", [None, RowShapes(prompt_rows=16, generated_rows=6)])
def test_sessions_that_need_many_times_the_pool_all_finish(target_folder, shapes):
    """With blocks for three of twenty, each is recomputed a few times at most: they do not rob each other for ever."""
    engine = make_engine(target_folder, num_blocks=20, shapes=shapes)
    prompts = {session: [session + 3, 9, *range(4, 20)] for session in range(20)}
    truths = {session: plain_greedy(target_folder, prompt, 24, eos=None) for session, prompt in prompts.items()}
    texts: dict[int, list[int]] = {session: [] for session in prompts}
    for session, prompt in prompts.items():
        engine.open(session, prompt, [], SamplingParams(), StopParams(max_tokens=24, ignore_eos=True))
    rounds: list[list[int]] = [[]] * 6  # a router's answer comes some forwards after the verdict
    for _ in range(1500):
        for session in rounds.pop(0):
            so_far = texts[session]
            wrong = [(token + 1) % VOCAB for token in truths[session][len(so_far) : len(so_far) + 2]]
            engine.propose(session, Proposal.chain(State.of(prompts[session] + so_far), wrong))
        rounds.append([])
        for session, verdict in engine.step():
            texts[session] += verdict.tokens
            if verdict.finish_reason is None:
                rounds[-1].append(session)
        engine.check_integrity()
    assert texts == truths
    assert engine.info().forwards < 600


def test_blocks_return_after_any_mix_of_ends(target_folder):
    engine = make_engine(target_folder, shapes=RowShapes(16, 4))
    start = engine.info().free_blocks
    rng = random.Random(3)
    for session in range(40):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))]
        engine.open(session, prompt, [], SamplingParams(), StopParams(max_tokens=rng.randrange(1, 20)))
        for _ in range(rng.randrange(6)):
            for key, outcome in engine.step():
                if outcome.finish_reason is None:
                    engine.propose(key, Proposal.chain(outcome.base.extend(outcome.tokens), [3, 4]))
            engine.check_integrity()
        if rng.random() < 0.7:
            engine.close(rng.randrange(session + 1))
    for session in range(40):
        engine.close(session)
    engine.check_integrity()
    assert (engine.info().free_blocks, engine.info().running_sessions) == (start, 0)


@pytest.mark.parametrize("max_tokens", [1, 2, 6, 7])
def test_never_more_than_max_tokens(target_folder, max_tokens):
    truth = plain_greedy(target_folder, [5, 6], 12, eos=None)
    tokens, reason = generate(
        make_engine(target_folder), [5, 6], oracle(truth, 5, 0), max_tokens=max_tokens, ignore_eos=True
    )
    assert (tokens, reason) == (truth[:max_tokens], "length")


def test_eos_inside_an_accepted_block_ends_there_and_can_be_ignored(target_folder):
    truth = plain_greedy(target_folder, [5, 6], 12, eos=None)
    end = truth[3]
    at = truth.index(end)
    stop = generate(
        make_engine(target_folder),
        [5, 6],
        oracle(truth, 5, 0),
        max_tokens=12,
        ignore_eos=True,
        stop_token_ids=(end,),
    )
    assert stop == (truth[: at + 1], "stop")


def test_min_tokens_bans_the_ending_id_until_then(target_folder):
    truth = plain_greedy(target_folder, [5, 6], 12, eos=None)
    tokens, _ = generate(
        make_engine(target_folder),
        [5, 6],
        oracle(truth, 5, 0),
        max_tokens=12,
        ignore_eos=True,
        stop_token_ids=(truth[1],),
        min_tokens=8,
    )
    assert truth[1] not in tokens[:8]
    assert len(tokens) >= 8


@pytest.mark.parametrize("k", [0, 2, 5])
def test_seeded_text_does_not_depend_on_proposals_or_neighbours(target_folder, k):
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=17)
    reference, _ = generate(make_engine(target_folder), [5, 6], lambda _: [], sampling=sampling, ignore_eos=True)
    engine = make_engine(target_folder, seed=99)
    for neighbour in (7, 8):
        engine.open(neighbour, [9, neighbour], [], SamplingParams(temperature=2.0), StopParams(max_tokens=100))
        engine.decode(neighbour, 100)
    mixed = oracle(reference, k, 2)
    assert generate(engine, [5, 6], mixed, sampling=sampling, ignore_eos=True)[0] == reference
    assert len(set(reference)) > 5  # it did sample


def test_bad_sessions_are_refused_by_field(target_folder):
    engine = make_engine(target_folder, max_sessions=1)
    greedy, stops = SamplingParams(), StopParams(max_tokens=4)
    with pytest.raises(InvalidArgument, match="prompt_token_ids"):
        engine.open(1, [], [], greedy, stops)
    with pytest.raises(InvalidArgument, match="prompt_token_ids: found 64"):
        engine.open(1, [VOCAB], [], greedy, stops)
    with pytest.raises(InvalidArgument, match="253 \\+ 4 tokens"):
        engine.open(1, [3] * 253, [], greedy, stops)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        engine.open(1, [3], [], greedy, StopParams(max_tokens=0))
    engine.open(1, [3], [], greedy, stops)
    with pytest.raises(Overloaded):
        engine.open(2, [3], [], greedy, stops)
    with pytest.raises(UnknownSession):
        engine.decode(2, 1)


def test_nan_fails_its_session_only(target_folder):
    engine = make_engine(target_folder)
    engine.open(1, [5, 6], [], SamplingParams(), StopParams(max_tokens=4))
    engine._runner.device.model.head = lambda hidden: torch.full((len(hidden), VOCAB), float("nan"))
    ((session, outcome),) = engine.step()
    assert session == 1
    assert isinstance(outcome, EngineFault)
    assert engine.info().running_sessions == 0
    engine.check_integrity()
