from __future__ import annotations

from dataclasses import replace

import pytest

from engine.proposal import State, Verdict
from router.acceptance import DRAFT_MODEL, AcceptancePriors, SessionAcceptance, ngram_arm
from router.costs import CostModel
from router.ngram import NgramMatch
from router.policy import RoundPlan, RoundView, SpeculationControl, plan_round
from router.speed_gate import PolicyConfig, SpeedGate

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
NOT_NOW = RoundPlan(reason="acceptance", plain_tokens=2)


@pytest.mark.parametrize(
    ("changes", "reason", "plain_tokens"),
    [
        ({"control": OFF}, "request", 100),
        ({"control": SpeculationControl(max_draft_tokens=0)}, "request", 100),
        ({"temperature": 0.9}, "temperature", 100),
        ({"temperature": 1.5}, "temperature", 100),
        ({"draft": "unavailable"}, "draft_unavailable", 2),
        ({"draft": "unavailable", "control": DRAFT_ONLY}, "draft_unavailable", CONFIG.retry_tokens),
        ({"draft": "unavailable", "control": DRAFT_ONLY, "tokens_left": 3}, "draft_unavailable", 3),
        ({"draft_room": 0}, "context", 2),
        ({"draft_room": -5, "control": DRAFT_ONLY}, "context", 100),
        ({"draft": "busy"}, "", 2),
        ({"draft": "none"}, "", 2),
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
    assert planned == NOT_NOW


def test_a_drafter_that_is_never_right_is_not_asked() -> None:
    assert plan(VIEW, after(DRAFT_MODEL, 0)) == NOT_NOW


def test_the_floor_rules_out_what_the_clock_would_allow() -> None:
    free = CostModel()
    free.saw_draft(1, draft_s=1e-6, wait_s=1e-6)
    acceptance = right_more_often_than_not()
    strict = PolicyConfig(acceptance_floor=0.95)
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
    assert plan(view, after(DRAFT_MODEL, 0), gate).run_ahead is not None  # what comes of it is verified later
    view = replace(view, control=SpeculationControl(run_ahead=False))
    assert plan(view, after(DRAFT_MODEL, 0), gate).drafter == "draft_model"


# A fixed K.


def fixed(size: int, drafter: str = "auto") -> SpeculationControl:
    return SpeculationControl(drafter=drafter, num_speculative_tokens=size)


@pytest.mark.parametrize(
    ("changes", "size"),
    [({}, 5), ({"tokens_left": 4}, 3), ({"draft_room": 2}, 2), ({"max_proposal_tokens": 1}, 1)],
)
@pytest.mark.parametrize("accepted", [0, 7])
def test_a_fixed_k_is_drafted_whatever_pays(changes: dict[str, int], size: int, accepted: int) -> None:
    view = replace(VIEW, control=fixed(5, "draft_model"), **changes)
    planned = plan(view, after(DRAFT_MODEL, accepted))
    assert (planned.drafter, planned.num_speculative_tokens, planned.reason) == ("draft_model", size, "")


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 5),
        ({"tokens_left": 4}, 3),
        ({"draft_room": 2}, 5),
        ({"max_proposal_tokens": 1}, 1),
        ({"match": NgramMatch((1, 2), 1)}, 2),
    ],
)
def test_a_fixed_k_is_looked_up_whatever_pays(changes: dict[str, object], size: int) -> None:
    view = replace(VIEW, draft="none", **{"match": WEAK, "control": fixed(5, "ngram"), **changes})
    planned = plan(view, after(ngram_arm(WEAK), 0))
    assert (planned.drafter, planned.num_speculative_tokens, planned.reason) == ("ngram", size, "")


def test_a_fixed_k_asks_neither_the_gate_nor_the_floor() -> None:
    gate = SpeedGate(CONFIG)
    view = replace(VIEW, num_generated=close(gate, 0), control=fixed(3))
    assert plan(view, after(DRAFT_MODEL, 0), gate).num_speculative_tokens == 3


def test_a_fixed_k_obeys_the_cap_and_what_switches_speculation_off() -> None:
    capped = replace(fixed(5), max_draft_tokens=2)
    assert plan(replace(VIEW, control=capped)).num_speculative_tokens == 2
    assert plan(replace(VIEW, control=fixed(5), temperature=0.9)).reason == "temperature"
    assert plan(replace(VIEW, control=replace(fixed(5), enabled=False))).reason == "request"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"draft": "busy"}, ""), ({"draft": "unavailable"}, "draft_unavailable"), ({"tokens_left": 1}, "")],
)
def test_a_fixed_k_with_nothing_to_draft_it_is_one_plain_round(changes: dict[str, object], reason: str) -> None:
    assert plan(replace(VIEW, control=fixed(5), **changes)) == RoundPlan(reason=reason)


# Running ahead.


def right_more_often_than_not() -> SessionAcceptance:
    """The draft's first token is, and none behind it."""
    acceptance = SessionAcceptance(AcceptancePriors())
    for number in range(100):
        acceptance.observe(DRAFT_MODEL, 7, int(number % 5 < 3))
    return acceptance


VERIFY_S, DRAFT_TOKEN_S, WAY_S = 0.040, 0.003, 0.001


def measured(
    verify_s: float = VERIFY_S, draft_token_s: float = DRAFT_TOKEN_S, hits: float | None = None, way_s: float = WAY_S
) -> CostModel:
    """A target alone with its session, after rounds that took just that; `hits`: share of early proposals."""
    costs = CostModel()
    for size in (0, 7) * 20:
        judged = Verdict(State(), size, 0, (1,), forward_time_s=verify_s, rows=1 + size)
        costs.saw_round(judged, verify_s + way_s, draft_wait_s=0.0)
        costs.saw_draft(4, 4 * draft_token_s, 4 * draft_token_s + way_s)
    for number in range(400) if hits is not None else ():
        costs.saw_early(Verdict(State(), 7, 0, (1,), forward_time_s=verify_s, rows=8), verify_s)
        costs.saw_ahead(number % 20 < 20 * hits)
    return costs


def planned_with(
    costs: CostModel, acceptance: SessionAcceptance, view: RoundView = VIEW, config: PolicyConfig = CONFIG
) -> RoundPlan:
    return plan_round(view, config, acceptance, costs, SpeedGate(config))


def test_the_draft_runs_ahead_as_far_as_pays() -> None:
    costs = measured()
    run_ahead = planned_with(costs, after(DRAFT_MODEL, 4)).run_ahead
    assert run_ahead is not None
    assert run_ahead.acceptance == pytest.approx(after(DRAFT_MODEL, 4).arm(DRAFT_MODEL).conditional(0))
    assert 1 <= run_ahead.num_speculative_tokens <= 7


@pytest.mark.parametrize(
    ("control", "config"),
    [(SpeculationControl(run_ahead=False), CONFIG), (SpeculationControl(), PolicyConfig(run_ahead=False))],
    ids=["the request", "the configuration"],
)
def test_the_draft_runs_ahead_only_where_it_may(control: SpeculationControl, config: PolicyConfig) -> None:
    planned = planned_with(measured(hits=0.9), after(DRAFT_MODEL, 4), replace(VIEW, control=control), config)
    assert (planned.drafter, planned.run_ahead) == ("draft_model", None)


def test_what_is_drafted_ahead_fits_what_the_request_allows() -> None:
    for changes in ({"tokens_left": 4}, {"draft_room": 3}, {"control": SpeculationControl(max_draft_tokens=3)}):
        run_ahead = planned_with(measured(), after(DRAFT_MODEL, 7), replace(VIEW, **changes)).run_ahead
        assert run_ahead is not None
        assert run_ahead.num_speculative_tokens == 3


def test_where_most_rounds_need_not_wait_one_that_does_is_kept_short() -> None:
    """The sooner it is over, the sooner comes one that needs not wait."""
    acceptance, slow = after(DRAFT_MODEL, 5), 0.010
    rare, often = (
        planned_with(measured(draft_token_s=slow, hits=hits), acceptance).num_speculative_tokens for hits in (0.0, 0.9)
    )
    assert often < rare


def test_behind_a_draft_too_slow_to_wait_for_plain_rounds_go_on() -> None:
    """Not one token of it pays if a round waits; but it is ready in time behind a round that does not."""
    costs = measured(draft_token_s=0.032, way_s=0.0005)
    planned = planned_with(costs, right_more_often_than_not())
    assert (planned.drafter, planned.num_speculative_tokens, planned.plain_tokens) == ("", 0, 1)
    assert planned.run_ahead is not None
    assert planned.plain_otherwise
    never = replace(VIEW, control=SpeculationControl(run_ahead=False))
    assert planned_with(costs, right_more_often_than_not(), never) == NOT_NOW


def test_behind_a_draft_worth_waiting_for_no_round_is_plain() -> None:
    planned = planned_with(measured(), after(DRAFT_MODEL, 5))
    assert planned.drafter == "draft_model"
    assert not planned.plain_otherwise


@pytest.mark.parametrize("hits", [0.3, 0.9])
def test_nothing_runs_ahead_that_has_measured_worse_than_plain_decoding(hits: float) -> None:
    """Early rounds of a large batch, say, in which each draft token costs more than it brings."""
    costs = crowded(0.001, 300)
    for number in range(400):
        costs.saw_ahead(number % 20 < 20 * hits)
    planned = planned_with(costs, right_more_often_than_not())
    assert planned == replace(NOT_NOW, reason="load")


# Why nothing is drafted.


def crowded(row_s: float, num_others: int) -> CostModel:
    """A target at work for that many plain sessions besides; each row costs."""
    costs = CostModel()
    for spread in (0, 10) * 30:
        rows = 1 + num_others + spread - 5
        judged = Verdict(State(), 0, 0, (1,), forward_time_s=0.020 + row_s * rows, rows=rows)
        costs.saw_round(judged, judged.forward_time_s, draft_wait_s=0.0)
        costs.saw_draft(1, 0.001, 0.001)
    return costs


def test_what_pays_alone_but_not_in_this_batch_is_off_for_load() -> None:
    acceptance, view = right_more_often_than_not(), replace(VIEW, control=SpeculationControl(run_ahead=False))
    assert planned_with(crowded(0.001, 6), acceptance, view).drafter == "draft_model"
    assert planned_with(crowded(0.001, 300), acceptance, view) == replace(NOT_NOW, reason="load")


def test_what_would_not_pay_alone_either_is_off_for_acceptance() -> None:
    view = replace(VIEW, control=SpeculationControl(run_ahead=False))
    for num_others in (6, 300):
        assert planned_with(crowded(0.001, num_others), after(DRAFT_MODEL, 0), view) == NOT_NOW


def test_a_pause_says_load_where_the_batch_is_why() -> None:
    gate = SpeedGate(CONFIG)
    view = replace(VIEW, num_generated=close(gate, 0))
    for acceptance, reason in ((right_more_often_than_not(), "load"), (after(DRAFT_MODEL, 0), "acceptance")):
        planned = plan_round(view, CONFIG, acceptance, crowded(0.001, 300), gate)
        assert planned == RoundPlan(reason=reason, plain_tokens=CONFIG.stretch)


def test_a_draft_that_was_never_asked_is_asked_though_it_is_assumed_not_to_pay() -> None:
    """Of a target this fast only trying can tell; what is assumed of a draft would keep it from being measured."""
    costs = CostModel()
    for _ in range(20):
        costs.saw_forward(Verdict(State(), 0, 0, (1,), forward_time_s=0.001, rows=1))
    acceptance, gate = SessionAcceptance(AcceptancePriors()), SpeedGate(CONFIG)
    assert plan_round(VIEW, CONFIG, acceptance, costs, gate).drafter == DRAFT_MODEL
    costs.saw_draft(1, draft_s=0.003, wait_s=0.004)
    assert plan_round(VIEW, CONFIG, acceptance, costs, gate).drafter == ""
