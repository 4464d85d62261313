"""The process leaves the target's distribution as it is, and the test that says so sees each fault it is to see.

The faults are those of a published simulator: the bonus token is the likeliest one, the residual subtracts the draft
probability of one token only, and where that leaves nothing the token that was just rejected comes out.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from bench.simulation.montecarlo import Floats, Ints, Process, Rounds, distributions, draw, replies, run
from bench.simulation.speedup import closed_form, tokens_per_round

VOCAB, K = 6, 3
SHAPE = (60, 500)
SURE = 1e-3


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def a_pair(seed: int = 7) -> tuple[Floats, Floats]:
    """A target, and a draft that gets worse with its position; the target never says token 0 after token 1."""
    source = rng(seed)
    target = source.dirichlet(np.full(VOCAB, 0.8), VOCAB)
    target[1, 0] = 0.0
    target /= target.sum(-1, keepdims=True)
    noise = source.dirichlet(np.full(VOCAB, 0.8), (K, VOCAB))
    shares = np.array([0.8, 0.6, 0.4])[:, None, None]
    return target, shares * target + (1.0 - shares) * noise


def least_p(rounds: Rounds, target: Floats) -> float:
    """Of a chi-square test for each token that may come before: do the tokens after it have the target's shares?"""
    least = 1.0
    for counts, probs in zip(rounds.transitions, target, strict=True):
        possible = probs > 0.0
        if counts[~possible].any():
            return 0.0
        expected = probs[possible] * counts.sum()
        if expected.min() >= 5.0:
            least = min(least, float(chisquare(counts[possible], expected).pvalue))
    return least


class GreedyBonus(Process):
    def bonus(self, target_probs: Floats, rng: np.random.Generator) -> Ints:
        return target_probs.argmax(-1)


class ResidualOfOneToken(Process):
    def recovered(self, target_probs: Floats, draft_probs: Floats, rejected: Ints, rng: np.random.Generator) -> Ints:
        rows, left = np.arange(len(rejected)), target_probs.copy()
        left[rows, rejected] = np.maximum(left[rows, rejected] - draft_probs[rows, rejected], 0.0)
        return draw(left, rng)


class RejectedWhereNothingIsLeft(Process):
    """The residual is looked for among the draft's likelier half only, where there is often nothing of it."""

    def recovered(self, target_probs: Floats, draft_probs: Floats, rejected: Ints, rng: np.random.Generator) -> Ints:
        known = draft_probs >= np.median(draft_probs, -1, keepdims=True)
        left = np.maximum(target_probs - draft_probs, 0.0) * known
        is_empty = left.sum(-1) <= 0.0
        left[is_empty] = 1.0
        return np.where(is_empty, rejected, draw(left, rng))


def test_tokens_have_the_distribution_of_the_target() -> None:
    target, draft = a_pair()
    assert least_p(run(target, draft, SHAPE, rng()), target) > SURE


def test_a_draft_that_is_always_wrong_changes_nothing() -> None:
    target, _ = distributions((0.5,), K)
    backwards = np.tile(target[:, ::-1], (K, 1, 1))
    rounds = run(target, backwards, SHAPE, rng())
    assert (rounds.lengths == 1).all()
    assert least_p(rounds, target) > SURE


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    target, _ = a_pair()
    rounds = run(target, np.tile(target, (K, 1, 1)), SHAPE, rng())
    assert (rounds.lengths == K + 1).all()
    assert least_p(rounds, target) > SURE


@pytest.mark.parametrize("fault", [GreedyBonus, ResidualOfOneToken, RejectedWhereNothingIsLeft])
def test_each_published_fault_shows(fault: type[Process]) -> None:
    target, draft = a_pair()
    assert least_p(run(target, draft, SHAPE, rng(), fault()), target) < SURE


def test_greedy_decoding_is_a_target_of_one_token() -> None:
    target = np.eye(VOCAB)[(np.arange(VOCAB) + 1) % VOCAB]
    draft = np.tile(np.full((VOCAB, VOCAB), 1.0 / VOCAB), (K, 1, 1))
    assert least_p(run(target, draft, SHAPE, rng()), target) == 1.0


@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_mean_length_meets_the_closed_form(alpha: float, size: int) -> None:
    target, draft = distributions((alpha,), size)
    lengths = run(target, draft, (40, 500), rng()).lengths
    error = lengths.std() / np.sqrt(lengths.size)
    assert abs(lengths.mean() - closed_form(alpha, size, cost=0.0)) <= 4.0 * error


def test_mean_length_follows_acceptance_by_position() -> None:
    rates = (0.9, 0.6, 0.3)
    target, draft = distributions(rates, 5)
    lengths = run(target, draft, (40, 1000), rng()).lengths
    assert lengths.mean() == pytest.approx(tokens_per_round(rates, 5), abs=4.0 * lengths.std() / np.sqrt(lengths.size))
    reached = [(lengths > 1 + position).mean() for position in range(3)]
    assert reached == pytest.approx([0.9, 0.54, 0.162], abs=0.015)


def test_the_acceptance_of_the_distributions_is_what_was_asked_for() -> None:
    target, draft = distributions((0.7, 0.2), 3)
    overlaps = np.minimum(target[0], draft[:, 0]).sum(-1)
    assert overlaps == pytest.approx([0.7, 0.2, 0.2])
    assert draft.sum(-1) == pytest.approx(np.ones((3, len(target))))


def test_luck_lies_around_the_mean_and_is_repeatable() -> None:
    found = replies((0.8,), 4, rng())
    assert found == replies((0.8,), 4, rng())
    assert found.low < found.mean < found.high
    assert found.mean == pytest.approx(tokens_per_round((0.8,), 4), abs=0.02)


def test_what_cannot_be_drawn_never_is() -> None:
    assert set(draw(np.tile([0.0, 2.0, 0.0, 6.0, 0.0], (2000, 1)), rng())) == {1, 3}
