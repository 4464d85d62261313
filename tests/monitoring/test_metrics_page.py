"""docs/metrics.md says what there is: every metric with its type and labels, every alert, and nothing else."""

from __future__ import annotations

import re

from tests.monitoring.exported import of_router
from tests.monitoring.files import METRICS_PAGE, alerts, rules


def _rows() -> list[list[str]]:
    lines = [line for line in METRICS_PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_metric_is_there_with_its_type_and_labels() -> None:
    documented = {
        f"ray_{name.strip('`')}": (kind, frozenset(filter(None, labels.split(", "))))
        for name, kind, labels in (
            (row[0], *(part.strip() for part in f"{row[1]};".split(";")[:2]))
            for row in _rows()
            if row[0].startswith("`outrider_")
        )
    }
    assert documented == {metric.name: (metric.kind, metric.labels) for metric in of_router()}


def test_every_alert_is_there_with_its_severity_and_patience() -> None:
    documented = {row[0].strip("`"): row[1] for row in _rows() if row[0].startswith("`Outrider")}
    assert documented.keys() == {alert["alert"] for alert in alerts()}
    for alert in alerts():
        said = documented[alert["alert"]]
        assert alert["labels"]["severity"] in said
        assert ("degrade: automatic" in said) == ("degrade" in alert["labels"])
        assert re.findall(r"for (\d+) min", said) == re.findall(r"(\d+)m", alert.get("for", ""))


def test_recorded_series_that_are_named_exist() -> None:
    named = set(re.findall(r"`(outrider:\w+:\w+)`", METRICS_PAGE.read_text()))
    assert named
    assert named <= {rule.get("record") for rule in rules()}
