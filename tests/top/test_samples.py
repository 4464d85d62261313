"""Expositions become samples, and two of them say what happened in between, restarts and silence included."""

from __future__ import annotations

import pytest

from deployments.top.samples import Change, UnreadableMetrics
from tests.top.made import URL, buckets, change, exposition, sample


def test_only_our_own_finite_series_are_read() -> None:
    text = exposition({"num_requests_running": 2.0, "spec_decode_acceptance_rate|drafter=ngram": float("nan")})
    (only,) = sample(0.0, text).values
    assert (only.name, only.source) == ("num_requests_running", URL)
    assert dict(only.labels) == {"router": "aaaaaaaa11"}


def test_an_answer_of_another_kind_is_none_of_ray() -> None:
    assert not sample(0.0, "<html>a page</html>\n").values


def test_a_broken_exposition_names_its_endpoint() -> None:
    with pytest.raises(UnreadableMetrics, match=URL):
        sample(0.0, 'ray_outrider_rounds_total{reason="none 3\n')


def test_a_counter_grows_by_label_and_over_all() -> None:
    seen = change({"rounds_total|reason=none": 5.0}, {"rounds_total|reason=none": 8.0, "rounds_total|reason=load": 2.0})
    assert seen.increases("rounds_total", ("reason",)) == {("none",): 3.0, ("load",): 2.0}
    assert (seen.increase("rounds_total"), seen.increase("rounds_total", reason="load")) == (5.0, 2.0)
    assert seen.increase("failovers_total") == 0.0


def test_a_counter_that_begins_anew_counts_from_nothing() -> None:
    assert change({"rounds_total": 500.0}, {"rounds_total": 20.0}).increase("rounds_total") == 20.0


def test_what_a_new_router_counted_is_new_but_not_what_an_endpoint_did_that_was_silent() -> None:
    other, before = "http://other:8080/metrics", sample(0.0, exposition({"rounds_total": 5.0}))
    restarted = sample(9.0, exposition({"rounds_total": 5.0}), exposition({"rounds_total": 7.0}, "bbbbbbbb22"))
    assert Change(before, restarted).increase("rounds_total") == 7.0
    both = sample(9.0, exposition({"rounds_total": 6.0}), exposition({"rounds_total": 900.0}), sources=(URL, other))
    assert Change(before, both).increase("rounds_total") == 1.0


def test_of_a_gauge_that_routers_agree_on_there_is_one_value() -> None:
    name = "engine_sessions|kind=target|replica=t:1"
    seen = sample(0.0, exposition({name: 4.0}), exposition({name: 3.0}, "bbbbbbbb22"))
    assert seen.gauge("engine_sessions", "replica", kind="target") == {"t:1": 4.0}
    assert seen.gauge("engine_sessions", "replica", kind="draft") == {}


def test_quantiles_are_of_what_came_in_between() -> None:
    old = buckets("itl", le_0_1=100, le_0_2=100, le_0_4=100)
    new = buckets("itl", le_0_1=150, le_0_2=190, le_0_4=200)
    seen = change(old, new)
    assert seen.quantile("itl", 0.25) == pytest.approx(0.05)
    assert seen.quantile("itl", 0.5) == pytest.approx(0.1)
    assert seen.quantile("itl", 0.7) == pytest.approx(0.15)
    assert change(old, old).quantile("itl", 0.5) is None
    assert change({}, {}).quantile("itl", 0.5) is None


def test_what_lies_above_all_bounds_is_given_as_the_last_one() -> None:
    seen = change({}, {"itl_bucket|le=0.1": 0.0, "itl_bucket|le=0.2": 0.0, "itl_bucket|le=+Inf": 7.0})
    assert seen.quantile("itl", 0.5) == 0.2
