"""Costs that are no longer measured must not rule for ever."""

from __future__ import annotations

import pytest

from engine.proposal import State, Verdict
from router.costs import Allowance, CostDefaults, CostModel


def verdict(num_proposed: int, forward_s: float, rows: int | None = None) -> Verdict:
    rows = 1 + num_proposed if rows is None else rows
    return Verdict(State(), num_proposed, 0, (1,), forward_time_s=forward_s, rows=rows)


def test_a_forward_takes_what_its_rows_take() -> None:
    costs = CostModel()
    assert costs.verify_s(3) == pytest.approx(0.040)  # nothing seen yet
    for _ in range(50):
        for size in (0, 7):
            costs.saw_forward(verdict(size, 0.020 + 0.001 * size))
    assert costs.verify_s(0) == costs.plain_s == pytest.approx(0.020, rel=0.02)
    assert costs.verify_s(3) == pytest.approx(0.023, rel=0.02)


def test_a_measured_round_is_assumed_to_take_what_it_took() -> None:
    costs = CostModel(CostDefaults.measured(verify_s=0.020, draft_token_s=0.002, waiting_s=0.003))
    assert costs.drafted_round_s(4, 4.0) == pytest.approx(0.020 + 4 * 0.002 + 0.003)
    free = CostDefaults.measured(0.020, 0.0, 0.0)
    assert min(free.draft_token_s, free.overhead_s) > 0.0


def test_in_a_batch_every_session_counts_with_what_all_of_them_do() -> None:
    for batch_weight, grown in ((0.0, 0.020 + 0.001 * (33 + 3)), (1.0, 0.020 + 0.001 * 33 * 4)):
        costs = CostModel(batch_weight=batch_weight)
        for _ in range(50):
            for rows in (23, 43):  # of 33 sessions or so, one row each
                costs.saw_forward(verdict(0, 0.020 + 0.001 * rows, rows))
        assert costs.verify_s(3) == pytest.approx(grown, rel=0.05)
        assert costs.verify_alone_s(0) == pytest.approx(0.021, rel=0.05)


def test_a_draft_that_runs_ahead_has_a_verification_less_the_way_there_and_back() -> None:
    costs = CostModel()
    costs.saw_round(verdict(3, 0.040), round_s=0.050, draft_wait_s=0.009)
    costs.saw_draft(3, draft_s=0.006, wait_s=0.009)
    assert costs.ahead_s(3, is_asked=True) == pytest.approx(0.040 - 0.003 - 0.001)
    costs.saw_early(verdict(3, 0.040), round_s=0.0405)
    assert costs.early_round_s(3) == pytest.approx(0.0405)


def test_a_draft_that_was_slow_once_is_worth_asking_again_after_being_passed_over() -> None:
    costs = CostModel()
    costs.saw_round(verdict(0, 0.040), round_s=0.042, draft_wait_s=0.0)
    for _ in range(50):
        costs.saw_draft(4, 0.4, 0.9)  # 100 ms a token: cold after a restart
    one_token = 1.5 / costs.drafted_round_s(1, 1.0)  # half of its first tokens are right
    assert one_token < 1 / costs.plain_s
    rounds = 0
    while 1.5 / costs.drafted_round_s(1, 1.0) < 1 / costs.plain_s:
        costs.pass_over_draft()
        rounds += 1
    assert 300 < rounds < 3000


def test_what_is_allowed_for_covers_what_varies_and_no_first_sample_stays() -> None:
    allowance = Allowance()
    allowance.add(1.0)  # a cold start
    for turn in range(100):
        allowance.add(0.002 + 0.001 * (turn % 2))
    assert 0.003 < allowance.value < 0.2
    for turn in range(300):
        allowance.add(0.002 + 0.001 * (turn % 2))
    assert 0.003 < allowance.value < 0.006


def test_a_draft_is_never_given_longer_than_a_forward_and_never_next_to_nothing() -> None:
    costs = CostModel()
    costs.saw_forward(verdict(3, 0.040))
    for reserve_s, left_s in ((-1.0, 0.039), (10.0, 0.010)):
        for _ in range(1000):
            costs.saw_ahead_reserve(reserve_s, is_asked=True)
        assert costs.ahead_s(3, is_asked=True) == pytest.approx(left_s, rel=0.05)
