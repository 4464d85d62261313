"""Rules use what there is, every alert says what it means, and promtool agrees with both files."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.monitoring.files import ROOT, RULE_TESTS, RULES, alerts, known_series, rules
from tests.monitoring.promql import labels_of, names_of

RULE_NAMES = [rule.get("record") or rule["alert"] for rule in rules()]


@pytest.mark.parametrize("rule", rules(), ids=RULE_NAMES)
def test_the_expression_uses_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    labels = labels_of(rule["expr"], known_series())
    assert "le" not in labels
    assert "namespace" in labels, "installations would mix"
    named = {name for text in rule.get("annotations", {}).values() for name in re.findall(r"\$labels\.(\w+)", text)}
    assert named <= labels


def test_names_are_told_apart() -> None:
    assert len(set(RULE_NAMES)) == len(RULE_NAMES)
    assert all(re.fullmatch(r"outrider:\w+:\w+", rule["record"]) for rule in rules() if "record" in rule)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_what_it_is_about(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description", "runbook_url"} <= alert["annotations"].keys()
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    section = (ROOT / page).read_text().partition(f"## {anchor.capitalize()}\n")[2].partition("\n## ")[0]
    assert f"| `{alert['alert']}` |" in section
    assert ("degrade" in alert["labels"]) == ("degrade" in alert["annotations"])


def test_every_record_is_read_by_an_alert_or_is_golden() -> None:
    read = {name for rule in rules() for name in names_of(rule["expr"])}
    unread = {rule["record"] for rule in rules() if "record" in rule} - read
    assert unread == {"outrider:inter_token_latency_seconds:p50_5m"}


def test_the_golden_thresholds_are_those_of_the_design() -> None:
    limits = {
        alert["alert"]: re.findall(r"ratio5m\{.*\} < (\S+)", alert["expr"])
        for alert in alerts()
        if "Acceptance" in alert["alert"]
    }
    assert limits == {"OutriderAcceptanceLow": ["0.65"], "OutriderAcceptanceCritical": ["0.50"]}


def test_every_alert_is_tried_firing() -> None:
    cases = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    fired = {each["alertname"] for case in cases for each in case.get("alert_rule_test", ()) if each["exp_alerts"]}
    assert fired == {alert["alert"] for alert in alerts()}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
@pytest.mark.parametrize(("command", "file"), [("check", RULES), ("test", RULE_TESTS)])
def test_promtool_agrees(command: str, file: object) -> None:
    said = subprocess.run(
        ["promtool", command, "rules", str(file)], check=False, capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 0, said.stdout + said.stderr
