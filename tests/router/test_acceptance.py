from __future__ import annotations

import pytest

from engine.proposal import State, Verdict
from router.acceptance import (
    DRAFT_MODEL,
    NGRAM,
    AcceptancePriors,
    PositionEstimate,
    SessionAcceptance,
    SpeculationTotals,
    ngram_arm,
)
from router.costs import CostDefaults, CostModel
from router.ngram import NgramMatch


def test_expected_lengths_multiply_what_each_position_needs_of_those_before() -> None:
    estimate = PositionEstimate((0.5,), decay=1.0, prior_weight=4.0)
    assert estimate.expected_lengths(3) == pytest.approx([0.5, 0.75, 0.875])
    assert estimate.expected_lengths(0) == []


def test_only_positions_that_were_reached_are_learnt() -> None:
    estimate = PositionEstimate((0.5,), decay=1.0, prior_weight=0.001)
    for _ in range(10):
        estimate.observe(num_asked=5, num_accepted=1)
    assert estimate.conditional(0) == pytest.approx(1.0, abs=0.01)
    assert estimate.conditional(1) == pytest.approx(0.0, abs=0.01)
    assert estimate.conditional(2) == pytest.approx(0.5)


def test_old_evidence_fades() -> None:
    estimate = PositionEstimate((0.5,), decay=0.9, prior_weight=1.0)
    for _ in range(50):
        estimate.observe(1, 0)
    low = estimate.conditional(0)
    for _ in range(50):
        estimate.observe(1, 1)
    assert low < 0.1
    assert estimate.conditional(0) > 0.9
    estimate.forget(0.0)
    assert estimate.conditional(0) == pytest.approx(0.5)


def test_a_new_session_starts_from_what_others_saw() -> None:
    priors = AcceptancePriors()
    before = SessionAcceptance(priors).arm(DRAFT_MODEL).conditional(0)
    for _ in range(200):
        SessionAcceptance(priors).observe(DRAFT_MODEL, 1, 1)
    assert SessionAcceptance(priors).arm(DRAFT_MODEL).conditional(0) > before + 0.2


CLASSES = {"code": (0.8, 0.82), "creative": (0.4, 0.3)}


def first_acceptance(priors: AcceptancePriors, workload: str, position: int = 0) -> float:
    return SessionAcceptance(priors, workload).arm(DRAFT_MODEL).conditional(position)


def test_a_request_starts_from_what_is_expected_of_its_class() -> None:
    priors = AcceptancePriors(CLASSES)
    assert [first_acceptance(priors, "code", i) for i in range(4)] == pytest.approx([0.8, 0.82, 0.82, 0.82])
    assert first_acceptance(priors, "creative", 5) == pytest.approx(0.3)
    assert first_acceptance(priors, "") == first_acceptance(AcceptancePriors(), "")


def test_what_is_seen_of_a_class_takes_the_place_of_what_was_expected() -> None:
    learnt = []
    for expected in (0.05, 0.95):
        priors = AcceptancePriors({"code": (expected,)})
        for number in range(600):
            SessionAcceptance(priors, "code").observe(DRAFT_MODEL, 1, int(number % 5 < 3))
        learnt.append(first_acceptance(priors, "code"))
    assert learnt == pytest.approx([0.6, 0.6], abs=0.03)
    assert learnt[1] - learnt[0] < 0.03


def test_classes_learn_apart_and_all_requests_from_all_of_them() -> None:
    priors = AcceptancePriors(CLASSES)
    before = first_acceptance(priors, "")
    for _ in range(300):
        SessionAcceptance(priors, "code").observe(DRAFT_MODEL, 1, 1)
    assert first_acceptance(priors, "creative") == pytest.approx(0.4)
    assert first_acceptance(priors, "code") > 0.95
    assert first_acceptance(priors, "") > before + 0.2


def test_where_nothing_is_expected_of_a_class_it_starts_from_what_all_requests_have_seen() -> None:
    priors = AcceptancePriors(CLASSES)
    for _ in range(300):
        SessionAcceptance(priors).observe(NGRAM, 1, 1)
    assert SessionAcceptance(priors, "code").arm(NGRAM).conditional(0) > 0.9
    for _ in range(300):
        SessionAcceptance(priors, "code").observe(NGRAM, 1, 0)
    assert SessionAcceptance(priors, "code").arm(NGRAM).conditional(0) < 0.1


def test_passing_an_arm_over_brings_it_back_to_what_others_saw() -> None:
    acceptance = SessionAcceptance(AcceptancePriors())
    for _ in range(20):
        acceptance.observe(DRAFT_MODEL, 1, 0)
    low = acceptance.arm(DRAFT_MODEL).conditional(0)
    for _ in range(500):
        acceptance.pass_over(DRAFT_MODEL)
    assert acceptance.arm(DRAFT_MODEL).conditional(0) > low + 0.2


@pytest.mark.parametrize(
    ("match", "arm"),
    [
        (NgramMatch((1,), 1), "ngram.weak"),
        (NgramMatch((1,), 1, num_places=4, agreement=0.75), "ngram.fair"),
        (NgramMatch((1,), 1, num_places=4, agreement=0.5), "ngram.weak"),
        (NgramMatch((1,), 2), "ngram.fair"),
        (NgramMatch((1,), 3), "ngram.good"),
        (NgramMatch((1,), 9), "ngram.copy"),
    ],
)
def test_longer_and_more_agreeing_matches_are_trusted_more(match: NgramMatch, arm: str) -> None:
    assert ngram_arm(match) == arm


def test_totals_of_a_request() -> None:
    totals = SpeculationTotals()
    for proposed, accepted, drafter in ((3, 2, "ngram"), (2, 2, "draft_model"), (0, 0, "")):
        totals.count_round(accepted + 1)
        if proposed:
            totals.count_proposal(drafter, proposed, accepted)
    assert totals.drafted_per_position == [2, 2, 1]
    assert totals.accepted_per_position == [2, 2, 0]
    assert (totals.draft_tokens, totals.accepted_tokens) == (5, 4)
    assert totals.acceptance_rate == pytest.approx(0.8)
    assert totals.mean_acceptance_length == pytest.approx(7 / 3)
    assert totals.mean_num_speculative_tokens == pytest.approx(2.5)
    assert totals.drafters["ngram"].rounds == 1


def test_totals_of_a_request_that_never_decoded() -> None:
    totals = SpeculationTotals()
    assert (totals.acceptance_rate, totals.mean_acceptance_length, totals.mean_num_speculative_tokens) == (0, 0, 0)


def test_costs_follow_measurements() -> None:
    costs = CostModel(CostDefaults(verify_s=0.04, draft_token_s=0.003, overhead_s=0.002))
    assert costs.round_s(5) == pytest.approx(0.042)
    judged = Verdict(State(), 0, 0, (1,), forward_time_s=0.030, rows=1)
    costs.saw_round(judged, round_s=0.031, draft_wait_s=0.0)
    assert costs.round_s(0) == pytest.approx(0.031)
    costs.saw_draft(4, draft_s=0.008, wait_s=0.009)
    assert costs.drafted_round_s(7, num_drafted=3.0) == pytest.approx(0.030 + 0.001 + 0.001 + 3 * 0.002)
    assert costs.plain_s == pytest.approx(0.030)
