"""The check of expressions finds what it is there to find."""

from __future__ import annotations

import pytest

from tests.monitoring.exported import Metric
from tests.monitoring.promql import BadExpression, labels_of, names_of

KNOWN = {
    "a_total": frozenset({"job", "drafter"}),
    "b_total": frozenset({"job"}),
    "g": frozenset({"job"}),
    "h_bucket": frozenset({"job", "le"}),
}


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("a_total", {"job", "drafter"}),
        ('sum by (drafter) (rate(a_total{drafter!="ngram"}[5m])) / 2', {"drafter"}),
        ("sum without (job) (a_total)", {"drafter"}),
        ("sum(a_total)", set()),
        ("histogram_quantile(0.95, sum by (job, le) (rate(h_bucket[5m]))) >= 0", {"job"}),
        ("max_over_time(g[30m:1m]) unless b_total offset 5m", {"job"}),
        ("a_total and on (job) (b_total > 0)", {"job", "drafter"}),
        ("(sum by (job) (a_total) or 0 * b_total) / (-g > 0)", {"job"}),
    ],
)
def test_labels_of_a_result(expression: str, labels: set[str]) -> None:
    assert labels_of(expression, KNOWN) == labels


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("sum(", "unclosed"),
        ("1 + 1", "a number"),
        ("c_total", "no metric c_total"),
        ('g{drafter="ngram"}', "g has no label drafter"),
        ('a_total{drafter="medusa"}', "drafter is never 'medusa'"),
        ('a_total{drafter=~"ngram|draft"}', "drafter is never"),
        ("sum by (drafter) (g)", "aggregated by"),
        ("a_total / b_total", "differ in"),
        ("a_total and on (drafter) b_total", "matched by"),
        ("rate(g[5m])", "no counter"),
        ("histogram_quantile(0.5, sum by (job) (rate(h_bucket[5m])))", "without le"),
        ("absent(quantile by (le) (0.5, g))", "aggregated by"),
    ],
)
def test_what_is_wrong_is_said(expression: str, why: str) -> None:
    with pytest.raises(BadExpression, match=why):
        labels_of(expression, KNOWN)


def test_all_names_are_found() -> None:
    assert names_of("sum(rate(a_total[5m])) / (max_over_time(g[30m:1m]) unless b_total offset 1m)") == {
        "a_total",
        "b_total",
        "g",
    }


def test_how_ray_spells_metrics() -> None:
    assert Metric("ray_a", "counter", frozenset({"x"})).series() == {"ray_a_total": {"x"}}
    assert set(Metric("ray_a_total", "counter").series()) == {"ray_a_total"}
    assert Metric("ray_a", "gauge").series() == {"ray_a": frozenset()}
    assert Metric("ray_a", "histogram").series() == {"ray_a_sum": set(), "ray_a_count": set(), "ray_a_bucket": {"le"}}
