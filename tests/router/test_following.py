"""How fast the policy follows a change of acceptance, in virtual time with the costs of a 70B target and a 1B draft."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest

from engine.proposal import State, Verdict
from router.acceptance import DRAFT_MODEL, DRAFTED, AcceptancePriors, SessionAcceptance
from router.costs import CostModel
from router.policy import RoundView, SpeculationControl, plan_round
from router.speed_gate import PolicyConfig, SpeedGate

CHANGES_AT, NUM_ROUNDS, LONGEST = 80, 140, 7
DRAFT_TOKEN_S, OVERHEAD_S = 0.002, 0.001
VIEW = RoundView(
    temperature=0.0, control=SpeculationControl(drafter=DRAFT_MODEL, run_ahead=False), num_generated=10,
    tokens_left=1000, max_proposal_tokens=LONGEST, draft="ready", draft_room=1000, match=None,
)  # fmt: skip


def verify_s(size: int) -> float:
    return 0.0183 * (1 + 0.004 * size)


def wait_s(size: int) -> float:
    return DRAFT_TOKEN_S * size + OVERHEAD_S if size else 0.0


def tokens_of(alpha: float, size: int, plain_tokens: int = 1) -> float:
    """Tokens that a round, or a stretch of plain decoding, brings on average."""
    return sum(alpha**i for i in range(size + 1)) + plain_tokens - 1


def seconds_of(size: int, plain_tokens: int = 1) -> float:
    return verify_s(size) * plain_tokens + wait_s(size) + OVERHEAD_S


def speed(alpha: float, size: int) -> float:
    """Tokens per second with K always `size`, where each token is accepted with probability `alpha`."""
    return tokens_of(alpha, size) / seconds_of(size)


def rounds_chosen(before: float, after: float, rng: random.Random) -> list[tuple[int, int]]:
    """K of each round, and its plain tokens, of a session whose acceptance changes at round CHANGES_AT."""
    costs, acceptance, gate = CostModel(), SessionAcceptance(AcceptancePriors()), SpeedGate(PolicyConfig())
    num_generated, rounds = 10, []
    while len(rounds) < NUM_ROUNDS:
        alpha = before if len(rounds) < CHANGES_AT else after
        view = replace(VIEW, num_generated=num_generated)
        plan = plan_round(view, PolicyConfig(), acceptance, costs, gate)
        size = plan.num_speculative_tokens
        accepted = next((i for i in range(size) if rng.random() >= alpha), size)
        tokens = accepted + plan.plain_tokens
        verdict = Verdict(State(), size, accepted, (1,) * tokens, forward_time_s=verify_s(size), rows=size + 1)
        round_s = seconds_of(size)
        costs.saw_round(verdict, round_s, wait_s(size))
        if size:
            costs.saw_draft(size, DRAFT_TOKEN_S * size, wait_s(size))
            acceptance.observe(DRAFT_MODEL, size, accepted)
            acceptance.observe(DRAFTED, size, size)
        num_generated += tokens
        if plan.plain_tokens == 1:
            gate.saw_round(tokens, round_s, costs.plain_s, num_generated)
        for token in range(plan.plain_tokens if plan.plain_tokens > 1 else 0):
            gate.saw_plain(num_generated - plan.plain_tokens + 1 + token)
            acceptance.pass_over(DRAFT_MODEL)
        rounds.append((size, plan.plain_tokens))
    return rounds


def rounds_to_follow(before: float, after: float, seed: int) -> int:
    """Rounds after the change until three in a row have a K within 5% of the best speed."""
    rounds = rounds_chosen(before, after, random.Random(seed))
    best = max(speed(after, size) for size in range(LONGEST + 1))
    good = [speed(after, size) >= 0.95 * best for size, _ in rounds[CHANGES_AT:]]
    return next((i for i in range(len(good) - 2) if all(good[i : i + 3])), len(good))


@pytest.mark.parametrize(
    ("before", "after"), [(0.8, 0.3), (0.3, 0.8), (0.9, 0.5), (0.5, 0.9), (0.05, 0.8), (0.8, 0.05)]
)
def test_k_is_right_again_ten_rounds_after_acceptance_has_changed(before: float, after: float) -> None:
    assert median(rounds_to_follow(before, after, seed) for seed in range(31)) <= 10


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.5, 0.8, 0.95])
def test_where_nothing_changes_speed_stays_near_the_best(alpha: float) -> None:
    best = max(*(speed(alpha, size) for size in range(1, LONGEST + 1)), 1 / verify_s(0))
    seeds = (random.Random(seed) for seed in range(15))
    rounds = [each for rng in seeds for each in rounds_chosen(alpha, alpha, rng)[CHANGES_AT:]]
    reached = sum(tokens_of(alpha, *each) for each in rounds) / sum(seconds_of(*each) for each in rounds)
    assert reached / best > 0.95
