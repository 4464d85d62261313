"""The output distribution equals the target's, whatever was proposed: joint counts of four tokens by chi-square.

The target is a toy Markov chain, so its exact joint distribution is a product of rows; the rows come from a plain
numpy reading of the filters' definitions, not from the code under test.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from engine.distributions import target_probs, truncate_to_sparse
from engine.judge import Judgement, judge, walk_sampled
from engine.proposal import Proposal, SparseProbs, State
from engine.sampling import SamplingParams

VOCAB, PADDED, LENGTH, FIRST = 12, 16, 4, 0
SAMPLING = SamplingParams(temperature=0.8, top_k=7, top_p=0.9)

Propose = Callable[[int, int, random.Random], Proposal]


def target_logits() -> torch.Tensor:
    """[VOCAB previous tokens, PADDED next tokens]; the padded ids would win if they were not masked."""
    logits = 1.5 * torch.randn(VOCAB, PADDED, generator=torch.Generator().manual_seed(7))
    logits[:, VOCAB:] = 20.0
    return logits


def expected_rows(logits: torch.Tensor, sampling: SamplingParams) -> np.ndarray:
    """The filters as their definitions say, one row at a time: [VOCAB, VOCAB]."""
    rows = []
    for row in logits[:, :VOCAB].double().numpy() / sampling.temperature:
        order = sorted(range(VOCAB), key=lambda token: (-row[token], token))[: sampling.top_k or VOCAB]
        probs = np.exp(row[order] - row.max())
        probs /= probs.sum()
        kept = int(np.searchsorted(probs.cumsum(), sampling.top_p - 1e-12)) + 1
        probs = probs[:kept] / probs[:kept].sum()
        rows.append(np.bincount(order[:kept], weights=probs, minlength=VOCAB))
    return np.array(rows)


def expected_joint(rows: np.ndarray) -> dict[tuple[int, ...], float]:
    joint = {(): 1.0}
    for _ in range(LENGTH):
        joint = {
            (*path, token): prob * rows[path[-1] if path else FIRST, token]
            for path, prob in joint.items()
            for token in np.flatnonzero(rows[path[-1] if path else FIRST]).tolist()
        }
    return joint


def sparse_rows(logits: torch.Tensor, sampling: SamplingParams, num_tokens: int) -> list[SparseProbs]:
    ids, probs = truncate_to_sparse(logits[:, :VOCAB], sampling, num_tokens)
    return [SparseProbs(tuple(i), tuple(p)) for i, p in zip(ids.tolist(), probs.tolist(), strict=True)]


def drawing_chain(rows: list[SparseProbs]) -> Propose:
    """A draft model: each token is drawn from the row of the one before."""

    cumulative = [list(itertools.accumulate(row.probs)) for row in rows]

    def propose(last: int, num_tokens: int, rng: random.Random) -> Proposal:
        tokens, draft_probs = [], []
        for _ in range(num_tokens):
            draft_probs.append(rows[last])
            last = rng.choices(rows[last].ids, cum_weights=cumulative[last])[0]
            tokens.append(last)
        return Proposal.chain(State(), tokens, draft_probs=tuple(draft_probs))

    return propose


def drawing_tree(rows: list[SparseProbs]) -> Propose:
    """Three siblings drawn from one row, and two children below each of the first two of them."""

    def propose(last: int, _: int, rng: random.Random) -> Proposal:
        parents = (-1, -1, -1, 0, 0, 1, 1)
        tokens: list[int] = []
        draft_probs = []
        for parent in parents:
            row = rows[tokens[parent] if parent >= 0 else last]
            draft_probs.append(row)
            tokens.append(rng.choices(row.ids, row.probs)[0])
        return Proposal(State(), tuple(tokens), parents, tuple(draft_probs))

    return propose


def fixed_chain(following: list[int]) -> Propose:
    """A deterministic drafter such as an n-gram table: a point mass at every position."""

    def propose(last: int, num_tokens: int, rng: random.Random) -> Proposal:
        tokens = []
        for _ in range(num_tokens):
            last = following[last]
            tokens.append(last)
        return Proposal.chain(State(), tokens)

    return propose


def fixed_tree(following: list[list[int]]) -> Propose:
    """Point-mass siblings: two candidates, and two more below each."""

    def propose(last: int, _: int, rng: random.Random) -> Proposal:
        first, second = following[last][:2]
        tokens = (first, second, *following[first][:2], *following[second][:2])
        return Proposal(State(), tokens, (-1, -1, 0, 0, 1, 1))

    return propose


LOGITS = target_logits()
ROWS = expected_rows(LOGITS, SAMPLING)
NOISE = torch.randn(VOCAB, PADDED, generator=torch.Generator().manual_seed(8))
RANKED = (-ROWS).argsort(axis=1, kind="stable").tolist()
HOT = SamplingParams(temperature=1.0)

DRAFTS: dict[str, Propose] = {
    "good": drawing_chain(sparse_rows(LOGITS + 0.5 * NOISE, SAMPLING, VOCAB)),
    "the target itself": drawing_chain(sparse_rows(LOGITS, SAMPLING, VOCAB)),
    "truncated to three tokens": drawing_chain(sparse_rows(LOGITS + 0.5 * NOISE, HOT, 3)),
    "adversarial": drawing_chain(sparse_rows(-0.5 * LOGITS, HOT, VOCAB)),
    "uniform, also over impossible tokens": drawing_chain(sparse_rows(0 * LOGITS, HOT, VOCAB)),
    "point mass on the likeliest": fixed_chain([row[0] for row in RANKED]),
    "point mass on the second, then impossible": fixed_chain(
        [row[1] if last % 2 else row[-1] for last, row in enumerate(RANKED)]
    ),
    "tree of drawn siblings": drawing_tree(sparse_rows(LOGITS + 0.8 * NOISE, HOT, VOCAB)),
    "tree of adversarial siblings": drawing_tree(sparse_rows(-0.5 * LOGITS, HOT, VOCAB)),
    "tree of fixed siblings": fixed_tree(RANKED),
}

RUNS = {"good": 100_000, "adversarial": 50_000}


def run(verify: Callable[[int, Proposal], Judgement], propose: Propose, rng: random.Random) -> tuple[int, ...]:
    """Four tokens by rounds of up to three draft tokens, as an engine would make them."""
    tokens: list[int] = []
    while len(tokens) < LENGTH:
        last = tokens[-1] if tokens else FIRST
        tokens.extend(verify(last, propose(last, rng.choice((1, 3, 3)), rng)).tokens)
    return tuple(tokens[:LENGTH])


def p_value(counts: Counter[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    """Chi-square of joint counts; cells that expect fewer than five are pooled. Impossible outputs give 0."""
    if not counts.keys() <= joint.keys():
        return 0.0
    total = counts.total()
    observed, expected, rare = [], [], [0.0, 0.0]
    for path, prob in joint.items():
        if prob * total >= 5.0:
            observed.append(counts[path])
            expected.append(prob * total)
        else:
            rare[0] += counts[path]
            rare[1] += prob * total
    if rare[1] > 0.0:
        observed.append(rare[0])
        expected.append(rare[1])
    return float(chisquare(observed, expected).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "runs"), [(name, RUNS.get(name, 5_000)) for name in DRAFTS])
def test_joint_counts_fit_the_target(draft: str, runs: int) -> None:
    generator, rng = torch.Generator().manual_seed(1), random.Random(101)
    table = list(target_probs(LOGITS[:, :VOCAB], SAMPLING))

    def verify(last: int, proposal: Proposal) -> Judgement:
        context = (last, *proposal.tokens)
        return walk_sampled(proposal, lambda node, _: table[context[node + 1]], generator)

    counts = Counter(run(verify, DRAFTS[draft], rng) for _ in range(runs))
    assert p_value(counts, expected_joint(ROWS)) > 0.01


@pytest.mark.parametrize("draft", ["good", "adversarial"])
def test_joint_counts_fit_the_target_from_logits_on(draft: str) -> None:
    generator, rng = torch.Generator().manual_seed(2), random.Random(102)

    def verify(last: int, proposal: Proposal) -> Judgement:
        rows = LOGITS[[last, *proposal.tokens]]
        return judge(rows, proposal, SAMPLING, position=5, vocab_size=VOCAB, generator=generator)

    counts = Counter(run(verify, DRAFTS[draft], rng) for _ in range(2_000))
    assert p_value(counts, expected_joint(ROWS)) > 0.01


def test_the_chi_square_sees_a_wrong_temperature() -> None:
    """Draws at temperature 0.85 do not pass for draws at 0.8: the test of the test."""
    generator, rng = torch.Generator().manual_seed(1), random.Random(101)
    table = list(target_probs(LOGITS[:, :VOCAB], SamplingParams(temperature=0.85, top_k=7, top_p=0.9)))

    def verify(last: int, proposal: Proposal) -> Judgement:
        context = (last, *proposal.tokens)
        return walk_sampled(proposal, lambda node, _: table[context[node + 1]], generator)

    counts = Counter(run(verify, DRAFTS["good"], rng) for _ in range(10_000))
    assert p_value(counts, expected_joint(ROWS)) < 1e-4


def test_agrees_with_transformers() -> None:
    """Chains of two from full draft distributions, against the peer's own sampled verification."""
    from transformers.generation.utils import _speculative_sampling

    draft_logits = (LOGITS + NOISE)[:, :VOCAB]
    draft, target_rows = draft_logits.softmax(-1), LOGITS[:, :VOCAB]
    sparse = [SparseProbs(tuple(range(VOCAB)), tuple(row)) for row in draft.tolist()]
    generator, rng = torch.Generator().manual_seed(3), random.Random(103)
    ours: Counter[tuple[int, ...]] = Counter()
    theirs: Counter[tuple[int, ...]] = Counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for _ in range(3_000):
            proposal = drawing_chain(sparse)(FIRST, 2, rng)
            context = [FIRST, *proposal.tokens]
            kwargs = {"position": 0, "vocab_size": VOCAB, "generator": generator}
            ours[judge(target_rows[context], proposal, HOT, **kwargs).tokens] += 1
            ids = torch.tensor([context])
            tokens, _ = _speculative_sampling(
                ids, draft_logits[context[:2]].unsqueeze(0), 2, target_rows[context].unsqueeze(0)
            )
            theirs[tuple(tokens[0].tolist())] += 1
    paths = [path for path in ours.keys() | theirs.keys() if ours[path] + theirs[path] >= 10]
    table = [[counts[path] for path in paths] for counts in (ours, theirs)]
    assert chi2_contingency(table).pvalue > 0.01


def test_every_token_of_a_chain_can_be_reached() -> None:
    """The toy chain is worth testing on: filters drop tokens in every row, and keep several."""
    support = (ROWS > 0).sum(axis=1)
    assert support.min() >= 2
    assert support.max() < VOCAB
    assert sum(expected_joint(ROWS).values()) == pytest.approx(1.0)
