"""What the configuration says reaches the router."""

from __future__ import annotations

import pytest

from deployments.config_file import parse_config
from deployments.router_settings import router_config
from router.costs import CostDefaults


@pytest.mark.parametrize(("content", "wait_s"), [({}, 60.0), ({"router": {"failover_wait_s": 0}}, 0.0)])
def test_how_long_a_request_waits_for_a_target(content: dict[str, object], wait_s: float) -> None:
    assert router_config(parse_config(content, "test")).sessions.target_link.failover_wait_s == wait_s


def test_how_the_policy_weighs_and_whether_drafts_run_ahead() -> None:
    speculation = {"run_ahead": False, "batch_weight": 0.25}
    sessions = router_config(parse_config({"speculation": speculation}, "test")).sessions
    assert (sessions.policy.run_ahead, sessions.batch_weight) == (False, 0.25)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({}, CostDefaults()),
        ({"draft_token_s": 0.5}, CostDefaults(draft_token_s=0.5)),
        ({"verify_s": 0.1, "draft_token_s": 0.2, "overhead_s": 0.3}, CostDefaults(0.1, 0.2, 0.3)),
    ],
)
def test_what_the_policy_assumes_before_it_has_seen_rounds(costs: dict[str, float], expected: CostDefaults) -> None:
    assert router_config(parse_config({"speculation": {"costs": costs}}, "test")).sessions.costs == expected
