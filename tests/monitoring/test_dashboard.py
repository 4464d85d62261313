"""Every expression of the dashboard can have a result, and Grafana can show it."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from tests.monitoring.exported import of_router
from tests.monitoring.files import dashboard, filled_in, known_series, named_in, panels, queries
from tests.monitoring.promql import labels_of, names_of

ROWS = ["The three golden metrics", "Speculation", "Latency", "Load", "Engines"]


@pytest.mark.parametrize(("title", "expression", "legend"), list(queries()))
def test_the_expression_uses_metrics_and_labels_that_exist(title: str, expression: str, legend: str) -> None:
    labels = labels_of(expression, known_series())
    assert named_in(legend) <= labels, title
    assert ("le" in labels) == (legend == "{{le}}")


def test_annotations_and_variables_too() -> None:
    known = known_series()
    (firing,) = dashboard()["annotations"]["list"]
    assert named_in(firing["titleFormat"]) <= labels_of(filled_in(firing["expr"]), known)
    (namespace,) = (each for each in dashboard()["templating"]["list"] if each["name"] == "namespace")
    metric, label = namespace["definition"].removeprefix("label_values(").removesuffix(")").split(", ")
    assert label in known[metric]


def test_every_metric_of_the_router_is_shown() -> None:
    """But for the two gauges that tell without Prometheus what two panels compute over time."""
    shown = {name for _, expression, _ in queries() for name in names_of(expression)}
    unseen = {metric.name for metric in of_router() if not shown & metric.series().keys()}
    assert unseen == {"ray_outrider_spec_decode_acceptance_rate", "ray_outrider_target_forward_bubble"}


def test_rows_stand_in_order_and_panels_do_not_overlap() -> None:
    everything = dashboard()["panels"]
    assert [panel["title"] for panel in everything if panel["type"] == "row"] == ROWS
    assert everything == sorted(everything, key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))
    assert len({panel["id"] for panel in everything}) == len(everything)
    for one, other in combinations(everything, 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in everything)


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in ("xw", "yh"))


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_explains_itself_and_asks_the_chosen_source(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 10
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert all('namespace=~"$namespace"' in target["expr"] for target in panel["targets"])
    if panel["type"] != "heatmap":
        assert panel["fieldConfig"]["defaults"]["unit"] in ("percentunit", "short", "s", "ops", "reqps")
