"""What a running system exports, as Prometheus sees it: names and labels of every metric, taken from the code itself.

How Ray spells a metric is checked against a real scrape in test_prometheus.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from deployments import metrics
from engine import errors
from engine.proposal import FinishReason
from router.policy import DRAFTERS, Reason

BY_PROMETHEUS = frozenset({"job", "instance", "namespace", "pod", "container", "endpoint"})
"""Labels that a scrape adds, those of a PodMonitor included."""
BY_RAY = frozenset({"Component", "NodeAddress", "SessionName", "Version", "WorkerId"})


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as its owner declares it; kind is "counter", "gauge" or "histogram"."""

    name: str
    kind: str
    labels: frozenset[str] = frozenset()

    def series(self) -> dict[str, frozenset[str]]:
        """Names under which Prometheus has it, with the labels of its own."""
        if self.kind == "counter":
            return {self.name if self.name.endswith("_total") else f"{self.name}_total": self.labels}
        if self.kind == "gauge":
            return {self.name: self.labels}
        plain = {f"{self.name}_{part}": self.labels for part in ("sum", "count")}
        return plain | {f"{self.name}_bucket": self.labels | {"le"}}


_BY_DEPLOYMENT = frozenset({"application", "deployment"})
OF_SERVE = (
    Metric("ray_serve_replica_startup_latency_ms", "histogram", _BY_DEPLOYMENT),
    Metric("ray_serve_deployment_status", "gauge", _BY_DEPLOYMENT),
    Metric("ray_serve_autoscaling_target_replicas", "gauge", _BY_DEPLOYMENT),
)
"""Metrics of Ray Serve that rules and dashboard use."""

_OUTCOMES = {name for name, it in vars(errors).items() if isinstance(it, type) and issubclass(it, errors.OutriderError)}
VALUES = {
    "reason": {*typing.get_args(Reason), "none"} - {""},
    "drafter": set(DRAFTERS),
    "outcome": {*typing.get_args(FinishReason), "cancelled", *_OUTCOMES},
    "kind": {"target", "draft"},
    "deployment": {"Router", "Target", "Draft"},
    "alertstate": {"pending", "firing"},
}
"""What a label may hold, for labels of which that is known."""


def of_router() -> list[Metric]:
    """What RouterMetrics registers with Ray."""
    made: list[Metric] = []

    def recorder(kind: str) -> type:
        class Recorder:
            def __init__(
                self, name: str, description: str, *rest: Sequence[object], tag_keys: Sequence[str] = ()
            ) -> None:
                assert description, name
                tags = [each for argument in rest for each in argument if isinstance(each, str)]
                made.append(Metric(f"ray_{name}", kind, frozenset({*tags, *tag_keys})))

        return Recorder

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("Counter", "Gauge", "Histogram"):
            patch.setattr(metrics, kind, recorder(kind.lower()))
        metrics.RouterMetrics()
    return made


def catalogue() -> dict[str, frozenset[str]]:
    """Every series that rules and dashboard may use, with the labels it has in Prometheus."""
    known = {"up": BY_PROMETHEUS, "ALERTS": BY_PROMETHEUS | {"alertname", "alertstate", "severity"}}
    for metric in (*of_router(), *OF_SERVE):
        for name, labels in metric.series().items():
            known[name] = labels | BY_PROMETHEUS | BY_RAY
    return known
