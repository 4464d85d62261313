"""The files that are checked, read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.monitoring.exported import catalogue
from tests.monitoring.promql import Labels, labels_of

ROOT = Path(__file__).parents[2]
RULES = ROOT / "k8s" / "monitoring" / "rules" / "outrider.rules.yaml"
RULE_TESTS = RULES.with_name("outrider.rules.test.yaml")
DASHBOARD = ROOT / "k8s" / "monitoring" / "dashboards" / "outrider.json"
METRICS_PAGE = ROOT / "docs" / "metrics.md"


def rules() -> list[dict[str, Any]]:
    """Recording rules and alerts in order."""
    groups: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def known_series() -> dict[str, Labels]:
    """What the system exports, and what the rules record of it. Raises BadExpression."""
    known = catalogue()
    for rule in rules():
        if "record" in rule:
            known[rule["record"]] = labels_of(rule["expr"], known)
    return known


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return content


def panels() -> list[dict[str, Any]]:
    """All but the titles of rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str, str]]:
    """Title of the panel, expression with Grafana's variables filled in, legend."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], filled_in(target["expr"]), target["legendFormat"]


def filled_in(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$namespace", ".*")


def named_in(template: str) -> set[str]:
    """Labels that a legend names, as `{{label}}`."""
    return set(re.findall(r"\{\{\s*(\w+)\s*\}\}", template))
