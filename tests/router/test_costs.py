"""Costs that are no longer measured must not rule for ever."""

from __future__ import annotations

from router.costs import CostModel


def test_a_draft_that_was_slow_once_is_worth_asking_again_after_being_passed_over() -> None:
    costs = CostModel()
    costs.saw_verify(0, 0.040, 0.042, 0.0)
    for _ in range(50):
        costs.saw_draft(4, 0.4, 0.9)  # 100 ms a token: cold after a restart
    one_token = 1.5 / costs.drafted_round_s(1, 1.0)  # half of its first tokens are right
    assert one_token < 1 / costs.plain_s
    rounds = 0
    while 1.5 / costs.drafted_round_s(1, 1.0) < 1 / costs.plain_s:
        costs.pass_over_draft()
        rounds += 1
    assert 300 < rounds < 3000
