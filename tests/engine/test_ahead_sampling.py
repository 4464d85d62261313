"""The output distribution equals the target's where most proposals were made ahead of the verdict they follow.

As in test_judge_sampling: joint counts of the first tokens by chi-square against the exact joint distribution. Once
the sampling alone, on toy Markov chains and over many runs; once whole engines, on emulated devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.ahead import Choice, Lookahead, draft_probs_of, outcomes
from engine.choices import Chooser, Rows
from engine.distributions import target_probs
from engine.drafting import DraftEngine, build_draft_engine
from engine.emulated import EmulatedDevice, ForwardTime, extended, identity_of
from engine.judge import walk_sampled
from engine.proposal import Proposal, RunAhead, State, Verdict
from engine.sampling import SamplingParams, StopParams
from engine.settings import DraftSettings, EngineSettings
from engine.stubs import Agreement, EmulatedDraft, EmulatedTarget, Stub
from engine.target import TargetEngine, build_target_engine
from tests.engine.models import make_folder
from tests.engine.test_judge_sampling import (
    FIRST,
    LENGTH,
    LOGITS,
    NOISE,
    ROWS,
    SAMPLING,
    VOCAB,
    expected_joint,
    p_value,
)

# Sampling alone.

DRAFT_LOGITS = LOGITS + 0.5 * NOISE
WIDTH, DEPTH = 5, 2


@dataclass
class Run:
    """One output in the making. `trunk` is what was made ahead for its present state, if anything was."""

    tokens: list[int] = field(default_factory=list)
    trunk: list[Choice] | None = None
    lookahead: Lookahead | None = None

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else FIRST

    @property
    def state(self) -> State:
        return State.of([FIRST, *self.tokens])


class ToyPair:
    """A draft and a target that see only the last token. The draft's forwards are for all runs at once."""

    def __init__(self, seed: int, acceptance: float = 0.7) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._chooser = Chooser(None, VOCAB, torch.Generator().manual_seed(seed + 1))
        self._rows = list(target_probs(LOGITS[:, :VOCAB], SAMPLING))
        self._acceptance = acceptance
        self.num_early = self.num_followed = 0

    def outputs(self, num_runs: int) -> Counter[tuple[int, ...]]:
        runs = alive = [Run() for _ in range(num_runs)]
        while alive:
            self._draft([run for run in alive if run.trunk is None])
            self._run_ahead([run for run in alive if len(run.tokens) + 1 < LENGTH])
            for run in alive:
                self._judge(run)
            alive = [run for run in alive if len(run.tokens) < LENGTH]
        return Counter(tuple(run.tokens[:LENGTH]) for run in runs)

    def _choose(self, tokens: Sequence[int]) -> list[Choice]:
        (choices,) = self._chooser.choose(DRAFT_LOGITS[list(tokens)], [Rows(SAMPLING, range(len(tokens)), 8)])
        return choices

    def _draft(self, runs: list[Run]) -> None:
        for run in runs:
            run.trunk = []
        for _ in range(DEPTH if runs else 0):
            chosen = self._choose([run.trunk[-1].token if run.trunk else run.last for run in runs])
            for run, choice in zip(runs, chosen, strict=True):
                assert run.trunk is not None
                run.trunk.append(choice)

    def _run_ahead(self, runs: list[Run]) -> None:
        growing: list[Lookahead] = []
        for run in runs:
            assert run.trunk is not None
            chosen = outcomes(run.trunk, self._acceptance)[:WIDTH]
            run.lookahead = Lookahead(run.state, run.trunk, len(run.trunk) - 1, chosen, RunAhead(DEPTH, 1.0), 0.0)
            growing.append(run.lookahead)
        while growing:
            wanted = [lookahead.tree().tokens[lookahead.num_done :] for lookahead in growing]
            choices = iter(self._choose([token for tokens in wanted for token in tokens]))
            for lookahead, tokens in zip(growing, wanted, strict=True):
                lookahead.computed([next(choices) for _ in tokens], 0.0)
            growing = [lookahead for lookahead in growing if not lookahead.is_complete]

    def _judge(self, run: Run) -> None:
        assert run.trunk is not None
        chain = [choice.token for choice in run.trunk]
        proposal = Proposal.chain(run.state, chain, draft_probs=draft_probs_of(run.trunk))
        context = (run.last, *chain)
        judgement = walk_sampled(proposal, lambda node, _: self._rows[context[node + 1]], self._generator)
        lookahead, run.lookahead, run.trunk = run.lookahead, None, None
        run.tokens += judgement.tokens
        if lookahead is None or len(run.tokens) >= LENGTH:
            return
        self.num_followed += 1
        early = lookahead.send("draft_model")
        assert early is not None
        branch = early.find(len(judgement.accepted), judgement.tokens[-1])
        true = lookahead.come_true(judgement.tokens)
        assert (branch is None) == (true is None)
        if branch is not None and true is not None:
            assert early.proposal(branch, run.state).draft_probs == draft_probs_of(true.drafted)
            run.trunk = true.drafted
            self.num_early += 1


def test_joint_counts_fit_the_target_behind_early_proposals() -> None:
    pair = ToyPair(seed=11)
    counts = pair.outputs(20_000)
    assert pair.num_early > 0.6 * pair.num_followed
    assert p_value(counts, expected_joint(ROWS)) > 0.01


# Whole engines.

NUM_WORDS, PROMPT, NUM_TOKENS, BATCH = 24, [5, 6, 7], 3, 100
TARGET = EmulatedTarget(64, NUM_WORDS, top_probability=0.5)
DRAFT = EmulatedDraft(TARGET, Agreement(((0, 0.6),), recall=0.9))
UNSEEDED = SamplingParams(temperature=0.8)
AHEAD = RunAhead(num_speculative_tokens=1, budget_s=60.0, acceptance=0.6)


@dataclass
class Pair:
    """Both engines; sessions run side by side, and nothing waits for anything else."""

    target: TargetEngine
    draft: DraftEngine
    num_early: int = 0
    num_followed: int = 0

    def outputs(self, keys: range) -> list[tuple[int, ...]]:
        tokens: dict[int, list[int]] = {key: [] for key in keys}
        for key in keys:
            stops = StopParams(max_tokens=NUM_TOKENS + 2, ignore_eos=True)
            self.draft.open(key, PROMPT, UNSEEDED)
            self.target.open(key, PROMPT, [], UNSEEDED, stops)
            self.draft.advance(key, State.of(PROMPT), [], 1, run_ahead=AHEAD)
        while self.target.has_work() or self.draft.has_work():
            while self.draft.has_work():
                self._deliver()
            for key, verdict in self.target.step():
                assert isinstance(verdict, Verdict)
                tokens[key] += verdict.tokens
                self._go_on(key, verdict, tokens[key])
        return [tuple(each[:NUM_TOKENS]) for each in tokens.values()]

    def _deliver(self) -> None:
        for key, made in self.draft.step():
            if isinstance(made, Proposal):
                self.target.propose(key, made)
            else:
                self.target.propose_early(key, made)

    def _go_on(self, key: int, verdict: Verdict, tokens: list[int]) -> None:
        if len(tokens) >= NUM_TOKENS:
            self.target.close(key)
            self.draft.close(key)
            return
        is_early = self.target._sessions[key].held is not None
        self.num_early += is_early
        self.num_followed += 1
        base, asks = State.of(PROMPT + tokens), not is_early and key % 2 == 0
        if not is_early and not asks:
            self.target.propose(key, Proposal(base))  # a plain round, behind which the draft runs ahead
        self.draft.advance(key, base, verdict.tokens, int(asks), run_ahead=AHEAD)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = make_folder(tmp_path_factory.mktemp("models") / "sizes")
    settings = EngineSettings(
        folder, num_blocks=512, block_size=8, max_sessions=BATCH, max_num_batched_tokens=4096, vocab_size=64
    )

    def device(stub: Stub) -> EmulatedDevice:
        return EmulatedDevice(settings, stub, ForwardTime(0.0))

    target = build_target_engine(settings, device=device(TARGET))
    return Pair(target, build_draft_engine(DraftSettings(settings), device(DRAFT)))


def exact_joint() -> dict[tuple[int, ...], float]:
    """By the definition of the emulated target alone."""
    weights = np.exp(np.append(TARGET.rank_logits, [-30.0] * (NUM_WORDS - len(TARGET.rank_logits))) / 0.8)
    probs = weights / weights.sum()
    joint, prefixes = {(): 1.0}, {(): identity_of(PROMPT)}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for path, prob in joint.items():
            for token, follows in zip(ranking(prefixes[path]), probs, strict=True):
                longer[(*path, token)] = prob * follows
                prefixes[(*path, token)] = extended(prefixes[path], token)
        joint = longer
    return joint


def ranking(prefix: int) -> list[int]:
    """All words, those that may follow first."""
    likely = TARGET.ranked(np.array([prefix], dtype=np.uint64))[0].tolist()
    return [*likely, *(word for word in range(NUM_WORDS) if word not in likely)]


def test_joint_counts_of_engines_that_run_ahead_fit_the_target(pair: Pair) -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(1, 4_000, BATCH):
        counts.update(pair.outputs(range(first, first + BATCH)))
    assert counts.total() == 4_000
    assert pair.num_early > 0.6 * pair.num_followed
    assert pair.target.stale_proposals == 0
    assert p_value(counts, exact_joint()) > 0.01
