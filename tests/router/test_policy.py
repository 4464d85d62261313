from __future__ import annotations

from dataclasses import replace

import pytest

from router.acceptance import DRAFT_MODEL, AcceptancePriors, SessionAcceptance, ngram_arm
from router.costs import CostModel
from router.ngram import NgramMatch
from router.policy import PolicyConfig, RoundPlan, RoundView, SpeculationControl, SpeedGate, plan_round

CONFIG = PolicyConfig()
COPY = NgramMatch((1, 2, 3, 4, 5, 6, 7), 9)
WEAK = NgramMatch((1, 2, 3, 4, 5, 6, 7), 1)
VIEW = RoundView(
    temperature=0.0,
    control=SpeculationControl(),
    num_generated=10,
    tokens_left=100,
    max_proposal_tokens=7,
    draft="ready",
    draft_room=1000,
    match=None,
)


def plan(view: RoundView, acceptance: SessionAcceptance | None = None, gate: SpeedGate | None = None) -> RoundPlan:
    seen = acceptance or SessionAcceptance(AcceptancePriors())
    return plan_round(view, CONFIG, seen, CostModel(), gate or SpeedGate(CONFIG))


def after(arm: str, num_accepted: int, times: int = 60) -> SessionAcceptance:
    acceptance = SessionAcceptance(AcceptancePriors())
    for _ in range(times):
        acceptance.observe(arm, 7, num_accepted)
    return acceptance


OFF = SpeculationControl(enabled=False)
DRAFT_ONLY = SpeculationControl(drafter="draft_model")


@pytest.mark.parametrize(
    ("changes", "reason", "plain_tokens"),
    [
        ({"control": OFF}, "request", 100),
        ({"control": SpeculationControl(max_draft_tokens=0)}, "request", 100),
        ({"temperature": 0.9}, "temperature", 100),
        ({"temperature": 1.5}, "temperature", 100),
        ({"draft": "unavailable"}, "draft_unavailable", 1),
        ({"draft": "unavailable", "control": DRAFT_ONLY}, "draft_unavailable", CONFIG.retry_tokens),
        ({"draft": "unavailable", "control": DRAFT_ONLY, "tokens_left": 3}, "draft_unavailable", 3),
        ({"draft_room": 0}, "context", 1),
        ({"draft_room": -5, "control": DRAFT_ONLY}, "context", 100),
        ({"draft": "busy"}, "", 1),
        ({"draft": "none"}, "", 1),
        ({"tokens_left": 1}, "", 1),
        ({"tokens_left": 1, "match": COPY}, "", 1),
    ],
)
def test_rounds_that_stay_plain_and_why(changes: dict[str, object], reason: str, plain_tokens: int) -> None:
    assert plan(replace(VIEW, **changes)) == RoundPlan(reason=reason, plain_tokens=plain_tokens)


@pytest.mark.parametrize(
    ("changes", "drafter", "reason"),
    [
        ({}, "draft_model", ""),
        ({"temperature": 0.89}, "draft_model", ""),
        ({"match": COPY}, "ngram", ""),
        ({"match": COPY, "draft": "unavailable"}, "ngram", "draft_unavailable"),
        ({"match": COPY, "draft_room": 0}, "ngram", "context"),
        ({"match": WEAK, "draft": "busy"}, "ngram", ""),
    ],
)
def test_rounds_that_speculate(changes: dict[str, object], drafter: str, reason: str) -> None:
    planned = plan(replace(VIEW, **changes))
    assert (planned.drafter, planned.reason, planned.plain_tokens) == (drafter, reason, 1)
    assert planned.num_speculative_tokens >= 1


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"tokens_left": 4}, 3),
        ({"max_proposal_tokens": 2}, 2),
        ({"control": SpeculationControl(max_draft_tokens=1)}, 1),
        ({"match": NgramMatch((1, 2), 9)}, 2),
    ],
)
def test_k_never_passes_a_limit(changes: dict[str, object], most: int) -> None:
    view = replace(VIEW, **{"match": COPY, "draft": "none", **changes})
    assert plan(view, after(ngram_arm(COPY), 7)).num_speculative_tokens == most


def test_draft_window_limits_the_draft_and_not_the_ngram() -> None:
    sure = after(DRAFT_MODEL, 7)
    assert plan(replace(VIEW, draft_room=2), sure).num_speculative_tokens == 2
    assert plan(replace(VIEW, draft_room=2, match=COPY)).num_speculative_tokens == 7


def test_k_grows_with_acceptance() -> None:
    sizes = [plan(VIEW, after(DRAFT_MODEL, accepted)).num_speculative_tokens for accepted in (1, 2, 4, 7)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 7


def test_a_doubtful_match_gives_way_to_a_draft_that_is_usually_right() -> None:
    acceptance = after(DRAFT_MODEL, 4)
    assert plan(replace(VIEW, match=WEAK), acceptance).drafter == "draft_model"
    assert plan(replace(VIEW, match=COPY), acceptance).drafter == "ngram"


def test_a_slow_draft_is_not_asked() -> None:
    costs = CostModel()
    costs.saw_draft(1, draft_s=0.050, wait_s=0.051)
    planned = plan_round(VIEW, CONFIG, SessionAcceptance(AcceptancePriors()), costs, SpeedGate(CONFIG))
    assert planned == RoundPlan(reason="acceptance")


def test_a_drafter_that_is_never_right_is_not_asked() -> None:
    assert plan(VIEW, after(DRAFT_MODEL, 0)) == RoundPlan(reason="acceptance")


def test_the_floor_rules_out_what_the_clock_would_allow() -> None:
    free = CostModel()
    free.saw_draft(1, draft_s=1e-6, wait_s=1e-6)
    acceptance = after(DRAFT_MODEL, 0)
    strict = PolicyConfig(acceptance_floor=0.5)
    assert plan_round(VIEW, strict, acceptance, free, SpeedGate(strict)).reason == "acceptance"
    lenient = PolicyConfig(acceptance_floor=0.0)
    assert plan_round(VIEW, lenient, acceptance, free, SpeedGate(lenient)).drafter == "draft_model"


def test_the_floor_is_not_for_ngrams() -> None:
    strict = PolicyConfig(acceptance_floor=0.99)
    view = replace(VIEW, match=WEAK)
    planned = plan_round(view, strict, SessionAcceptance(AcceptancePriors()), CostModel(), SpeedGate(strict))
    assert planned.drafter == "ngram"


def test_the_threshold_rises_with_what_a_draft_token_costs() -> None:
    cheap, dear = CostModel(), CostModel()
    cheap.saw_draft(1, draft_s=0.001, wait_s=0.001)
    dear.saw_draft(1, draft_s=0.006, wait_s=0.006)
    acceptance = after(DRAFT_MODEL, 4)
    thresholds = [
        plan_round(VIEW, CONFIG, acceptance, costs, SpeedGate(CONFIG)).confidence_threshold for costs in (cheap, dear)
    ]
    assert 0.0 < thresholds[0] < thresholds[1] <= 0.5


def close(gate: SpeedGate, num_generated: int) -> int:
    """Rounds as slow as two plain tokens each, until the gate closes; returns the position then."""
    while gate.is_open:
        num_generated += 1
        gate.saw_round(1, round_s=0.08, plain_s=0.04, num_generated=num_generated)
    return num_generated


def test_gate_stays_open_while_speculation_pays() -> None:
    gate = SpeedGate(CONFIG)
    for position in range(2, 400, 2):
        gate.saw_round(2, round_s=0.05, plain_s=0.04, num_generated=position)
    assert gate.is_open
    assert gate.speedup == pytest.approx(1.6)


def test_gate_does_not_close_on_little_evidence() -> None:
    assert close(SpeedGate(CONFIG), 0) >= CONFIG.min_tokens


def test_pauses_double_with_every_failed_probe_up_to_a_limit() -> None:
    gate = SpeedGate(CONFIG)
    position = close(gate, 0)
    pauses = []
    for _ in range(6):
        pauses.append(gate.pause_left(position))
        position += pauses[-1]
        for _ in range(CONFIG.probe_rounds):
            assert gate.pause_left(position) == 0
            position += 1
            gate.saw_round(1, round_s=0.08, plain_s=0.04, num_generated=position)
    assert pauses == [24, 48, 96, 192, 256, 256]


def test_a_probe_must_do_clearly_better_to_switch_on_again() -> None:
    for round_s, reopened in ((0.0395, False), (0.030, True)):
        gate = SpeedGate(CONFIG)
        position = close(gate, 0)
        position += gate.pause_left(position)
        for _ in range(CONFIG.probe_rounds):
            position += 1
            gate.saw_round(1, round_s=round_s, plain_s=0.04, num_generated=position)
        assert gate.is_open is reopened


def test_a_pause_is_plain_except_for_a_sure_thing() -> None:
    gate = SpeedGate(CONFIG)
    position = close(gate, 0)
    view = replace(VIEW, num_generated=position)
    hopeless = after(DRAFT_MODEL, 0)
    assert plan(view, hopeless, gate) == RoundPlan(reason="acceptance", plain_tokens=CONFIG.stretch)
    assert plan(replace(view, tokens_left=2), hopeless, gate).plain_tokens == 2
    assert plan(replace(view, control=DRAFT_ONLY), hopeless, gate).plain_tokens == CONFIG.first_pause
    assert plan(replace(view, match=COPY), hopeless, gate).drafter == "ngram"
    gate.saw_round(8, round_s=0.04, plain_s=0.04, num_generated=position + 8)
    assert gate.pause_left(position + 8) == CONFIG.first_pause - 8


def test_a_probe_speculates_though_estimates_are_against_it() -> None:
    gate = SpeedGate(CONFIG)
    position = close(gate, 0)
    view = replace(VIEW, num_generated=position + gate.pause_left(position))
    assert plan(view, after(DRAFT_MODEL, 0), gate).drafter == "draft_model"
