"""A real Prometheus scrapes a running system: names are as the files take them, numbers agree with each other."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.local import free_port
from deployments.client import Ask, CallFailed, Client
from deployments.config import OutriderConfig
from deployments.config_file import parse_config
from deployments.system import local_system
from tests.monitoring.exported import OF_SERVE, catalogue
from tests.monitoring.files import ROOT, RULES, queries, rules
from tests.monitoring.promql import names_of
from tests.waiting import until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian: prometheus)"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, at import
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # and of its subprocesses
]

WHEN_IT_HAPPENS = {
    "ray_outrider_failovers_total",
    "ray_outrider_prompt_tokens_cached_total",
    "ray_outrider_spec_decode_num_dropped_total",
    "ray_outrider_spec_decode_num_early_hits_total",
    "ray_outrider_spec_decode_num_rounds_ahead_total",
    "ray_outrider_spec_decode_num_wasted_draft_tokens_total",
    "ray_outrider_speculation_switches_total",
    "outrider:draft_unavailable:ratio5m",
    "outrider:failovers:increase10m",
    "outrider:waiting_per_running:ratio5m",
}
"""Series that need not be there after a few quick requests: Ray's counters appear with their first event."""
BY_OPENTELEMETRY = {"otel_scope_name", "otel_scope_version", "otel_scope_schema_url"}

Series = tuple[dict[str, str], float]


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}/api/v1"

    def query(self, expression: str) -> list[Series]:
        """The instant vector of an expression."""
        data = self._get("query", query=expression)
        assert data["resultType"] == "vector", expression
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]

    def total(self, name: str) -> float:
        """Sum over all series of a name; 0 where there is none."""
        return sum(value for _, value in self.query(f"sum ({name})"))

    def is_up(self) -> bool:
        """Whether it answers, and so do all of its targets."""
        try:
            targets = self._get("targets")["activeTargets"]
        except (urllib.error.URLError, ConnectionError):
            return False
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def bad_rules(self) -> list[str]:
        groups = self._get("rules")["groups"]
        return [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"]

    def _get(self, what: str, **arguments: str) -> Any:
        with urllib.request.urlopen(f"{self._base}/{what}?{urllib.parse.urlencode(arguments)}", timeout=10) as answer:
            return json.load(answer)["data"]


@pytest.fixture(scope="module")
def config() -> OutriderConfig:
    content = yaml.safe_load((ROOT / "bench" / "profiles" / "70b-1b.yaml").read_text())
    content["emulation"]["dilation"] = 0.2
    content["router"]["peer_refresh_s"] = 0.5
    content["server"] = {"grpc_port": free_port(), "http_port": free_port()}
    return parse_config(content, "tests")


@pytest.fixture(scope="module")
def address(config: OutriderConfig) -> Iterator[str]:
    """A running system that exports every second."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_metrics_report_interval_ms", "1000")
        with local_system(config) as address:
            yield address


@pytest.fixture(scope="module")
def prometheus(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It scrapes and evaluates the shipped rules, both each second."""
    import ray

    folder = tmp_path_factory.mktemp("prometheus")
    shipped = yaml.safe_load(RULES.read_text())
    for group in shipped["groups"]:
        group["interval"] = "1s"
    (folder / "rules.yaml").write_text(yaml.safe_dump(shipped))
    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    with _serving(folder) as prometheus:
        yield prometheus


@contextmanager
def _serving(folder: Path) -> Iterator[Prometheus]:
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            prometheus = Prometheus(port)
            assert until(prometheus.is_up, 30.0), (folder / "log").read_text()
            yield prometheus
        finally:
            process.terminate()
            process.wait(timeout=20)


@pytest.fixture(scope="module")
def told(address: str, prometheus: Prometheus) -> dict[str, float]:
    """What callers were told of their requests, all in all, once Prometheus has heard of it too.

    Two batches, so that counters that begin with the first are seen to grow with the second.
    """
    told = dict.fromkeys(_WHERE, 0.0)
    with Client(address) as client:
        for _ in range(2):
            for size, workload in ((24, ""), (32, "code")):
                _ask(client, size, workload, told)
            with pytest.raises(CallFailed):
                client.generate(Ask(prompt="1", sampling={"max_tokens": 4, "top_p": 2.0}))
            told["refused"] += 1
            assert until(lambda: _heard(prometheus) == told, 20.0), (told, _heard(prometheus))
            assert until(lambda: prometheus.total("ray_outrider_target_busy_seconds_total") > 0, 20.0)
    return told


def _ask(client: Client, size: int, workload: str, told: dict[str, float]) -> None:
    """A request that drafts in every round."""
    sampling = {"max_tokens": size, "ignore_eos": True}
    drafting = {"drafter": "draft_model", "num_speculative_tokens": 3}
    result = client.generate(Ask(prompt="1 2 3", sampling=sampling, workload=workload, **drafting))
    complete = result.complete
    told["generated"] += len(result.token_ids)
    told["prompt"] += complete.usage.prompt_tokens
    told["drafted"] += complete.speculation.draft_tokens
    told["accepted"] += complete.speculation.accepted_tokens
    told["completed"] += complete.finish_reason == "length"


_WHERE = {
    "generated": "ray_outrider_generation_tokens_total",
    "prompt": "ray_outrider_prompt_tokens_total",
    "drafted": "ray_outrider_spec_decode_num_draft_tokens_total",
    "accepted": "ray_outrider_spec_decode_num_accepted_tokens_total",
    "completed": 'ray_outrider_requests_total{outcome="length"}',
    "refused": 'ray_outrider_requests_total{outcome="InvalidArgument"}',
}


def _heard(prometheus: Prometheus) -> dict[str, float]:
    return {what: prometheus.total(name) for what, name in _WHERE.items()}


def test_counters_agree_with_what_callers_were_told_and_with_each_other(
    prometheus: Prometheus, told: dict[str, float]
) -> None:
    assert 0 < told["accepted"] <= told["drafted"]
    speculated = "ray_outrider_spec_decode_num"
    assert prometheus.total(f"{speculated}_draft_tokens_per_pos_total") == told["drafted"]
    assert prometheus.total(f"{speculated}_accepted_tokens_per_pos_total") == told["accepted"]
    rounds, requests = prometheus.total("ray_outrider_rounds_total"), told["completed"]
    # Each round brings a token besides those accepted, each request one before its first round.
    assert rounds + told["accepted"] + requests == told["generated"]
    assert prometheus.total("ray_outrider_num_speculative_tokens_count") == rounds
    assert prometheus.total("ray_outrider_time_to_first_token_seconds_count") == requests
    assert 0 < prometheus.total(f"{speculated}_drafts_total") <= rounds
    assert {labels["workload"] for labels, _ in prometheus.query(f"{speculated}_draft_tokens_total")} == {
        "none",
        "code",
    }


def test_series_are_those_that_the_files_were_checked_against(prometheus: Prometheus, told: dict[str, float]) -> None:
    known, found = catalogue(), prometheus.query('{__name__=~"ray_outrider_.+"}')
    serve = {name for metric in OF_SERVE for name in metric.series()}
    for labels, _ in [*found, *(each for name in sorted(serve) for each in prometheus.query(name))]:
        assert labels.keys() - {"__name__"} - BY_OPENTELEMETRY <= known[labels["__name__"]], labels
    names = {labels["__name__"] for labels, _ in found}
    assert {name for name in known if name.startswith("ray_outrider_")} - names <= WHEN_IT_HAPPENS


def test_every_metric_of_the_rules_is_there(prometheus: Prometheus, told: dict[str, float]) -> None:
    read = {name for rule in rules() for name in names_of(rule["expr"])} - WHEN_IT_HAPPENS

    def missing() -> set[str]:
        return {name for name in read if not prometheus.query(name)}

    assert until(lambda: not missing(), 20.0), missing()
    assert prometheus.bad_rules() == []


def test_golden_metrics_are_shares_and_times_and_nothing_is_nan(prometheus: Prometheus, told: dict[str, float]) -> None:
    for name in ("acceptance_rate:ratio5m", "target_forward_bubble:ratio5m"):
        assert until(lambda name=name: bool(prometheus.query(f"outrider:{name}")), 20.0), name
        found = prometheus.query(f"outrider:{name}")
        assert all(0.0 <= value <= 1.0 for _, value in found), name
    ((_, p50),) = prometheus.query("outrider:inter_token_latency_seconds:p50_5m")
    ((_, p95),) = prometheus.query("outrider:inter_token_latency_seconds:p95_5m")
    assert 0.0 < p50 <= p95
    everything = prometheus.query('{__name__=~"(ray_)?outrider.+"}')
    assert [labels for labels, value in everything if math.isnan(value)] == []


def test_every_query_of_the_dashboard_is_answered(prometheus: Prometheus, told: dict[str, float]) -> None:
    """None fails; those without a result show what has not happened."""
    empty = {title for title, expression, _ in queries() if not prometheus.query(expression)}
    maybe = {"Running ahead: hit rate", "Running ahead: waste", "Prompt tokens found in the prefix cache", "Failovers"}
    assert empty <= maybe | {"Dropped proposals", "Switches of the policy"}
